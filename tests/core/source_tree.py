"""The modules of the library and what they import, read from their sources alone."""

import ast
import functools
import pathlib
from typing import NamedTuple

import lossscale

FRAMEWORKS = {"tensorflow", "keras", "tf_keras", "jax", "torch", "optax", "flax"}
PACKAGE = pathlib.Path(lossscale.__file__).parent


class Import(NamedTuple):
    """An imported module. `lazy` if it is imported when a function is called."""

    name: str
    lazy: bool

    @property
    def root(self):
        return self.name.partition(".")[0]


@functools.cache
def modules():
    """Returns the source of each module of the library by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def imports(source):
    """Returns the `Import`s of a source, without those for type checkers only.

    `from package import name` is an import of both `package` and `package.name`, which may be a
    module; `from lossscale import name` is one of the latter alone. `import_module("name")` counts.
    """
    return set(_imports(ast.parse(source), lazy=False))


def _imports(node, lazy):
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=runs):
                child = ast.Module(runs, [])
            case ast.Import(names=names):
                yield from (Import(alias.name, lazy) for alias in names)
            case ast.ImportFrom(module=base, level=0, names=names):
                found = [f"{base}.{alias.name}" for alias in names]
                # A module of the library has imported `lossscale` already.
                yield from (Import(name, lazy) for name in found + [base] * (base != "lossscale"))
            case ast.Call(ast.Attribute(attr="import_module"), [ast.Constant(name)]):
                yield Import(name, lazy)
        yield from _imports(child, lazy or isinstance(child, (ast.FunctionDef, ast.Lambda)))
