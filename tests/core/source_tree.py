"""What the modules of a package import, read from their source without importing them."""

import ast
import dataclasses
import functools
import importlib.util
import pathlib
import re

import lossscale

FRAMEWORKS = {"tensorflow", "keras", "tf_keras", "jax", "torch", "optax", "flax"}
PACKAGE = pathlib.Path(lossscale.__file__).parent


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of the library: its dotted name, its source, and whether it is a package."""

    name: str
    source: str
    is_package: bool = False

    @property
    def part(self):
        """The file or folder below `lossscale`: "rules", "keras"; for itself "lossscale"."""
        return (*self.name.split("."), "lossscale")[1]

    @property
    def package(self):
        """What its relative imports are relative to."""
        return self.name if self.is_package else self.name.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module. `lazy` if it is imported when a function is called."""

    name: str
    lazy: bool

    @property
    def root(self):
        return self.name.partition(".")[0]


@functools.cache
def modules():
    """Returns every module of the library."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("lossscale", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return tuple(found)


@functools.cache
def imports(module):
    """Returns the set of `Import`s of a module, leaving out those for type checkers only.

    `from package import name` counts as `package` and as `package.name`, since the name may be a
    module; `from lossscale import name` as the latter only. A literal name given to
    `import_module` counts too.
    """
    return frozenset(_imports_below(ast.parse(module.source), module, lazy=False))


@functools.cache
def modules_named(module):
    """Returns the `Import`s of this library that a string of their own stands for.

    Such a string is the path of a module, or the start of one that an f-string goes on with:
    whoever has it can import the module later, whichever way.
    """
    found = set()
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.JoinedStr):
            start = node.values[0] if node.values else None
            texts, pattern = [start], r"lossscale\.(?:\w+\.)*\w*"
        else:
            texts, pattern = [node], r"lossscale(?:\.\w+)+"
        for text in texts:
            value = text.value if isinstance(text, ast.Constant) else None
            if isinstance(value, str) and re.fullmatch(pattern, value):
                found.add(Import(value.rstrip("."), lazy=True))
    return frozenset(found)


def _imports_below(node, module, lazy):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _last_name(child.test) == "TYPE_CHECKING":
            for statement in child.orelse:
                yield from _imports_below(ast.Module([statement], []), module, lazy)
            continue
        for name in _names(child, module):
            yield Import(name, lazy)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports_below(child, module, lazy or is_function)


def _names(node, module):
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=name, level=level, names=names):
            base = importlib.util.resolve_name("." * level + (name or ""), module.package)
            names = [f"{base}.{alias.name}" for alias in names]
            # A module of the library in use has imported `lossscale` already.
            return names if base == "lossscale" else [base, *names]
        case ast.Call(args=[ast.Constant(value=name), *given]) if _last_name(node.func) in (
            "import_module",
            "__import__",
        ):
            package = given[0].value if given and isinstance(given[0], ast.Constant) else None
            return [importlib.util.resolve_name(name, package or module.package)]
    return []


def _last_name(node):
    return getattr(node, "attr", getattr(node, "id", None))
