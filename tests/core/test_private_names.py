"""What frameworks do not document: taken in one file of a room, or listed."""

from __future__ import annotations

import ast
import functools
import re

import pytest

import undocumented
from core.source_tree import modules
from lossscale.common.private_names import private_module, private_name
from lossscale.errors import UnsupportedError

PRIVATE_MODULES = re.compile(
    r"\b(?:(?:tf_)?keras\.src|tensorflow\.python|jax\._src|__internal__)\b"
)
MAY_NAME_THEM = {
    # The name of a class in a file, and a module that is there or not.
    "lossscale.migration.keras_2_12",
    "lossscale.tf_keras.installing",
}
LISTED = {
    name: purpose
    for framework in ("KERAS", "TF_KERAS", "TENSORFLOW", "JAX", "TORCH")
    for table in getattr(undocumented, framework).values()
    for name, purpose in table.items()
}
OTHERS = {"_event_queue": "tensorboardX", "_worker": "tensorboardX"}
OF_NAMED_TUPLES = {"_replace", "_fields", "_asdict"}
ASK_BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "replaced"}


@functools.cache
def trees():
    return {module.name: ast.parse(module.source) for module in modules()}


def is_private(name):
    """Whether a name is one that its owner keeps to itself; Python's own are not."""
    return (
        isinstance(name, str)
        and name.startswith("_") != name.endswith("__")
        and name not in {"_", *OF_NAMED_TUPLES}
    )


def constant(node):
    return node.value if isinstance(node, ast.Constant) else None


def is_dictionary_of_attributes(node):
    """Whether it is `object.__dict__` or `vars(object)`."""
    return (isinstance(node, ast.Attribute) and node.attr == "__dict__") or (
        isinstance(node, ast.Call) and ast.unparse(node.func) == "vars"
    )


def names_used(tree):
    """What is asked of any object by a name with an underscore, whichever way."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Subscript) and is_dictionary_of_attributes(node.value):
            yield constant(node.slice)
        elif isinstance(node, ast.Compare) and is_dictionary_of_attributes(node.comparators[0]):
            yield constant(node.left)
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            if isinstance(function, ast.Name) and function.id in ASK_BY_NAME:
                yield constant(node.args[1])
            elif isinstance(function, ast.Attribute) and is_dictionary_of_attributes(
                function.value
            ):
                yield constant(node.args[0])


def names_defined(tree):
    """What a module itself calls by such a name: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if is_dictionary_of_attributes(node.value):
                yield constant(node.slice)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("__dict__.setdefault"):
            yield constant(node.args[0])
        elif isinstance(node, ast.Dict):
            # What takes the place of attributes.
            yield from map(constant, node.keys)


def collected(function):
    return {name for tree in trees().values() for name in function(tree) if is_private(name)}


def test_private_modules_are_named_in_these_files_only():
    naming = {
        name
        for name, tree in trees().items()
        if not name.endswith(".private_names") and PRIVATE_MODULES.search(ast.unparse(tree))
    }
    assert naming == MAY_NAME_THEM


def test_every_private_attribute_is_listed_or_ours():
    unlisted = collected(names_used) - collected(names_defined) - {*LISTED, *OTHERS}
    # tests/undocumented.py has a table for each kind of object.
    assert unlisted == set()


def test_what_is_listed_is_used_and_has_a_purpose():
    assert {*LISTED, *OTHERS} <= collected(names_used) | collected(names_defined)
    assert all(len(purpose.split()) > 2 for purpose in LISTED.values())


@pytest.mark.parametrize(
    "source",
    [
        "left = scale._unheard_of",
        "target = getattr(v, '_unheard_of', v)",
        "part.__dict__['_unheard_of'] = list",
        "part.__dict__.pop('_unheard_of', None)",
        "found = '_unheard_of' in vars(inner)",
        "function.unheard_of__ = {}",
    ],
)
def test_each_way_to_use_a_private_attribute_is_seen(source):
    [found] = [name for name in names_used(ast.parse(source)) if is_private(name)]
    assert "unheard_of" in found


def test_a_name_that_is_gone_is_named_with_what_needs_it():
    with pytest.raises(UnsupportedError, match=r"^json .* has no json\.decoder\.Gone\.away, which"):
        private_name("json.decoder", "Gone.away", "read what nobody wrote")
    with pytest.raises(UnsupportedError, match=r"json\.gone.* needs to be read\."):
        private_module("json.gone", "be read")
    assert private_name("json.decoder", "Gone", "be replaced", fallback=3) == 3
    assert private_name("json", "decoder.JSONDecoder", "read").__name__ == "JSONDecoder"


def test_a_framework_that_is_not_installed_says_so_itself():
    with pytest.raises(ModuleNotFoundError, match="no_such_framework"):
        private_name("no_such_framework.src", "name", "be found", fallback=3)
