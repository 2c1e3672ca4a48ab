"""One table of frameworks and one list of backends: nothing else repeats them."""

import ast

import pytest

from core.source_tree import PACKAGE, modules
from lossscale import registry
from lossscale.packages import BACKENDS, PACKAGES

KERASES = {framework.name for framework in registry.kerases()}
MAY_NAME_ALL = {
    # The list itself.
    "lossscale.packages",
    # What each does in a way of its own, by name: a class, a program.
    "lossscale.migration.restore_targets",
}


def repeated(source):
    """Yields the lists of names that hold all backends or all generations of Keras."""
    tree = ast.parse(source)
    # Types are for type checkers, which know no table.
    types = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            parts = node.elts
        else:
            parts = node.keys if isinstance(node, ast.Dict) else []
        names = {part.value for part in parts if isinstance(part, ast.Constant)}
        if id(node) not in types and (names >= set(BACKENDS) or names >= KERASES):
            yield ast.unparse(node)


def test_the_names_of_frameworks_are_listed_where_they_may_be_and_nowhere_else():
    listed = {module.name: list(repeated(module.source)) for module in modules()}
    assert {name for name, lists in listed.items() if lists} == MAY_NAME_ALL


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_has_a_row_and_a_module(backend):
    assert registry.named(backend).root in PACKAGES
    assert (PACKAGE / "keras" / "backends" / f"{backend}.py").exists()


def test_rows_differ():
    rows = registry.frameworks()
    for column in ("name", "title", "root", "package"):
        assert len({getattr(row, column) for row in rows}) == len(rows)
    assert {row.root for row in rows} <= set(PACKAGES)
