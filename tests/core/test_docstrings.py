"""Runs the examples in the docstrings of every module that needs no framework to be imported."""

import doctest
import importlib

import pytest

from core.source_tree import FRAMEWORKS, imports, modules


def needs_a_framework(name, by_name):
    """Whether importing this module imports a framework, itself or through another module."""
    seen, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in seen or current not in by_name:
            continue
        seen.add(current)
        at_once = {imported for imported in imports(by_name[current]) if not imported.lazy}
        if FRAMEWORKS & {imported.root for imported in at_once}:
            return True
        waiting.extend(imported.name for imported in at_once)
        waiting.append(current.rpartition(".")[0])
    return False


def documented():
    by_name = {module.name: module for module in modules()}
    return [
        name
        for name in by_name
        # Importing a `__main__` runs it, and what is asked of `torch` imports PyTorch.
        if not name.endswith(("__main__", ".torch")) and not needs_a_framework(name, by_name)
    ]


def run_examples(name):
    given = {}
    if name == "lossscale.members":
        # Its examples say once what holds for every framework.
        given = {root: importlib.import_module(root) for root in ("keras", "lossscale")}
        given["tf"] = importlib.import_module("tensorflow")
    return doctest.testmod(
        importlib.import_module(name),
        extraglobs=given,
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )


@pytest.mark.parametrize("name", documented())
def test_the_examples_of_a_module_print_what_they_say(name):
    assert run_examples(name).failed == 0


def test_the_examples_are_found():
    assert {"lossscale", "lossscale.errors", "lossscale.rules"} <= set(documented())
    assert run_examples("lossscale.rules").attempted >= 5
    assert run_examples("lossscale.members").attempted >= 30


def test_what_imports_a_framework_is_left_out():
    rooms = ("lossscale.keras.", "lossscale.tf_keras.")
    assert [name for name in documented() if name.startswith(rooms)] == []
