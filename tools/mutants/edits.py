"""Edits that name a function and a part of its syntax tree.

Files may move within a part, and code be formatted and commented anew, and the edits stay.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

PACKAGES = {
    "lossscale": "src/lossscale",
    "migration": "lossscale-migration/src/lossscale_migration",
}


class EditError(ValueError):
    """An edit that does not fit the sources."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """What replaces a part of a function.

    `...` in `old` stands for any expression, and `f(...)` for a call with any arguments. In `new`
    it puts back the expression that the only `...` of `old` stood for.

    Attributes:
        part: Module or package below lossscale: "keras", or "keras.backends.jax" where several
            modules of keras have such a function; "migration" is lossscale_migration.
        function: Qualified name, as "Ledger.move". A class can be named too; "" is the module.
        old: An expression, or consecutive statements, that stand there once.
        new: What replaces them; "pass" leaves statements out.
    """

    part: str
    function: str
    old: str
    new: str

    @property
    def place(self) -> str:
        """The part and the function: "keras.Ledger.move"."""
        return f"{self.part}.{self.function}"

    def apply(self, root: pathlib.Path) -> tuple[pathlib.Path, str]:
        """Returns the path of the module and its text with the edit.

        Args:
            root: A folder with the sources of both distributions, as this repository has them.

        Raises:
            EditError: If the edit does not fit the sources in that folder.
        """
        path = self._module(root)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        old, new = ast.parse(self.old).body, ast.parse(self.new).body
        if len(old) == len(new) == 1 and all(isinstance(node, ast.Expr) for node in old + new):
            old, new = [old[0].value], [new[0].value]
        named = [node for name, node in _definitions(tree) if name == self.function]
        runs = [run for node in named for run in _runs(node, len(old))]
        found = [(run, held) for run in runs if _fits(old, run, held := [])]
        if len(found) != 1:
            lines = sorted(run[0].lineno for run, _ in found)
            raise self._error(
                f"must have `{self.old}` once. Received: {len(found)} times, in lines {lines} of "
                f"{path.name}. Follow the source, or let `old` have more of what is around."
            )
        nodes, held = found[0]
        for gap in [node for top in new for node in ast.walk(top) if _is_any(node)]:
            if len(held) != 1:
                raise self._error(f"must have one `...` in `{self.old}` for that in `{self.new}`.")
            new = [_Replacing([gap], held).visit(node) for node in new]
        if _fits(new, nodes, []):
            raise self._error(f"must be changed by `{self.new}`.")
        edited = _spliced(text, nodes, new)
        # What is put into the text can be read as something else there, as after `el` of `elif`.
        with contextlib.suppress(SyntaxError):
            if ast.dump(ast.parse(edited)) == ast.dump(_Replacing(nodes, new).visit(tree)):
                return path, edited
        raise self._error(f"cannot have `{self.old}` replaced. Replace less or more than that.")

    def _module(self, root: pathlib.Path) -> pathlib.Path:
        package = root / PACKAGES["migration" if self.part == "migration" else "lossscale"]
        part = package if self.part == "migration" else package.joinpath(*self.part.split("."))
        paths = [part.with_suffix(".py"), *sorted(part.rglob("*.py"))]
        found = [path for path in paths if path.exists() and self.function in _names(path)]
        if len(found) != 1:
            where = ", ".join(str(path.relative_to(package)) for path in found) or "none"
            raise self._error(
                f"must be in one module. Received: {where}. Follow the sources, or let the part be "
                "one of several modules, as 'keras.backends.jax'."
            )
        return found[0]

    def _error(self, message: str) -> EditError:
        return EditError(f"`{self.function}` of {self.part} {message}")


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields functions and classes with their qualified names, and the module as ""."""
    if isinstance(node, ast.Module):
        yield "", node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


@functools.cache
def _names(path: pathlib.Path) -> frozenset[str]:
    return frozenset(name for name, _ in _definitions(ast.parse(path.read_text(encoding="utf-8"))))


def _runs(top: ast.AST, length: int) -> Iterator[list[Any]]:
    """Yields as many neighbours below a node, wherever they are."""
    for parent in ast.walk(top):
        for _, value in ast.iter_fields(parent):
            children = value if isinstance(value, list) else [value]
            for start in range(len(children) - length + 1):
                yield children[start : start + length]


def _is_any(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _fits(old: Any, node: Any, held: list[Any]) -> bool:
    """Whether a tree is like the old one. `held` gets what `...` stands for."""
    if _is_any(old) and isinstance(node, ast.expr):
        held.append(node)
        return True
    if type(old) is not type(node):
        return False
    if isinstance(old, list):
        return len(old) == len(node) and all(map(_fits, old, node, [held] * len(old)))
    if not isinstance(old, ast.AST):
        # -0.0 equals 0.0.
        return repr(old) == repr(node)
    names = old._fields
    if isinstance(old, ast.Call) and [*map(_is_any, [*old.args, *old.keywords])] == [True]:
        names = names if len(node.args) == 1 and not node.keywords else ("func",)
    return all(_fits(getattr(old, name), getattr(node, name), held) for name in names)


class _Replacing(ast.NodeTransformer):
    """Puts new nodes in the place of neighbours."""

    def __init__(self, nodes: list[Any], new: list[Any]) -> None:
        self.nodes, self.new = nodes, new

    def visit(self, node: ast.AST) -> Any:
        if node is self.nodes[0]:
            return self.new if isinstance(node, ast.stmt) else self.new[0]
        return None if node in self.nodes else self.generic_visit(node)


def _spliced(text: str, nodes: list[Any], new: list[Any]) -> str:
    """Puts the source of new nodes in the place of that of neighbours."""
    first, last = nodes[0], nodes[-1]
    lines = text.encode().splitlines(keepends=True)
    before = b"".join(lines[: first.lineno - 1]) + lines[first.lineno - 1][: first.col_offset]
    after = lines[last.end_lineno - 1][last.end_col_offset :] + b"".join(lines[last.end_lineno :])
    written = "\n".join(map(ast.unparse, new)).replace("\n", "\n" + " " * first.col_offset)
    between = f"({written})" if isinstance(first, ast.expr) else written
    return (before + between.encode() + after).decode()
