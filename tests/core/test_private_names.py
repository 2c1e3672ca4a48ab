"""What frameworks do not document: taken in one file of a part, or listed."""

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
    "lossscale.migration.tf_keras_models",
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


def is_dictionary_of_attributes(node):
    """Whether it is `object.__dict__` or `vars(object)`."""
    return (isinstance(node, ast.Attribute) and node.attr == "__dict__") or (
        isinstance(node, ast.Call) and ast.unparse(node.func) == "vars"
    )


def names_used(tree):
    """What is asked of any object by a name with an underscore, whichever way."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case (
                ast.Subscript(value=value, slice=ast.Constant(value=name))
                | ast.Compare(left=ast.Constant(value=name), comparators=[value, *_])
                | ast.Call(func=ast.Attribute(value=value), args=[ast.Constant(value=name), *_])
            ) if is_dictionary_of_attributes(value):
                yield name
            case ast.Call(func=ast.Name(id=ask), args=[_, ast.Constant(value=name), *_]):
                if ask in ASK_BY_NAME:
                    yield name


def names_defined(tree):
    """What a module itself calls by such a name: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
            ):
                yield name
            case ast.Subscript(value=value, slice=ast.Constant(value=name), ctx=ast.Store()):
                if is_dictionary_of_attributes(value):
                    yield name
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="__dict__"), attr="setdefault"),
                args=[ast.Constant(value=name), *_],
            ):
                yield name
            case ast.Dict(keys=keys):
                # What takes the place of attributes.
                yield from (key.value for key in keys if isinstance(key, ast.Constant))


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
