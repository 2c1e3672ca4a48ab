"""Counts `Any` in the public signatures: those of the names on the pages of `docs/api`.

    python -m tools.public_any            # the numbers, by name
    python -m tools.public_any FOLDER     # of another checkout, to compare

It takes a second, and imports nothing of the package. A parameter, a result, a property or an
annotated attribute counts once, however often `Any` is in it. `dict[str, Any]` does not count:
its values have different types. A class counts its own members, not inherited ones.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]


def public_names(root: pathlib.Path) -> list[str]:
    """The dotted names that the pages of the API show."""
    pages = sorted((root / "docs/api").glob("*.md"))
    return sorted(
        {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
    )


def definition(root: pathlib.Path, name: str) -> ast.stmt | None:
    """The class or function of a dotted name."""
    module, _, last = name.rpartition(".")
    for sources in root.glob("**/src"):
        for path in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
            if (sources / path).is_file():
                tree = ast.parse((sources / path).read_text(encoding="utf-8"))
                return next((n for n in ast.walk(tree) if getattr(n, "name", None) == last), None)
    return None


def is_any(annotation: ast.expr | None) -> bool:
    """Whether any object is meant by an annotation, or a part of it."""
    written = "" if annotation is None else ast.unparse(annotation)
    return "Any" in re.findall(r"\w+", written.replace("dict[str, Any]", "dict"))


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The places in the signature of a function that are Any."""
    parameters = node.args
    named = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
    for each in [*named, *filter(None, (parameters.vararg, parameters.kwarg))]:
        if is_any(each.annotation):
            yield f"{node.name}({each.arg})"
    if is_any(node.returns):
        yield f"{node.name} ->"


def places(node: ast.stmt) -> Iterator[str]:
    """The places in a definition that are Any; an overloaded function counts its overloads only."""
    if isinstance(node, ast.ClassDef):
        overloaded = {
            each.name
            for each in node.body
            if isinstance(each, ast.FunctionDef)
            and "overload" in map(ast.unparse, each.decorator_list)
        }
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and ast.unparse(each.target)[:1] != "_":
                if is_any(each.annotation):
                    yield ast.unparse(each.target)
            elif isinstance(each, ast.FunctionDef):
                decorators = [*map(ast.unparse, each.decorator_list)]
                if each.name in overloaded and "overload" not in decorators:
                    continue
                if each.name[0] != "_" or each.name in ("__init__", "__new__", "__call__"):
                    yield from of_function(each)
    elif isinstance(node, ast.FunctionDef):
        yield from of_function(node)


def main(root: pathlib.Path) -> None:
    total = 0
    for name in public_names(root):
        node = definition(root, name)
        found = [] if node is None else list(places(node))
        total += len(found)
        if found:
            print(f"{name}: {len(found)}: {', '.join(found)}")
    print(f"{total} in all")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
