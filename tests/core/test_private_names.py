"""What frameworks do not document stands in one file for each, and every use of it is listed."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from core.source_tree import modules
from lossscale.errors import UnsupportedError
from lossscale.frameworks.common.private_names import private_module, private_name

PRIVATE_MODULES = re.compile(
    r"\b(?:(?:tf_)?keras\.src|tensorflow\.python|jax\._src|__internal__)\b"
)
MAY_NAME_THEM = {
    # The name of a class in a file, and a module that is there or not.
    "lossscale.migration.keras_2_12",
    "lossscale.frameworks.tf_keras.installing",
}
OF_NAMED_TUPLES = {"_replace", "_fields", "_asdict"}
OTHERS = {
    "_event_queue": "tensorboardX",
    "_worker": "tensorboardX",
}
"""Of packages that are no frameworks."""


@functools.cache
def trees():
    return {module.name: ast.parse(module.source) for module in modules()}


def names_of_ours():
    """What the library itself calls by a name with an underscore."""
    found = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(node.attr)
            elif is_item(node):
                found.add(node.slice.value)
    return found


def is_item(node):
    """Whether it is what `self.__dict__["_name"] = ...` sets."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
    )


@functools.cache
def names_used():
    """The names with an underscore that are asked of objects, with a module that asks."""
    found = {}
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found[node.attr] = module
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in {"getattr", "hasattr", "replaced"}
                and isinstance(node.args[1], ast.Constant)
            ):
                found[node.args[1].value] = module
    return {
        name: module
        for name, module in found.items()
        if name.startswith("_") and not name.endswith("__")
    }


@functools.cache
def tables():
    """What the files of private names list: table by table, attribute to purpose."""
    found = {}
    for module, tree in trees().items():
        if module.endswith(".private_names") and ".common." not in module:
            for node in tree.body:
                if isinstance(node, ast.Assign) and node.targets[0].id.startswith("OF_"):
                    found[module, node.targets[0].id] = ast.literal_eval(node.value)
    return found


def test_every_framework_that_needs_it_has_a_file():
    assert {module.split(".")[2] for module, _ in tables()} == {
        "keras",
        "tf_keras",
        "tensorflow",
        "jax",
        "torch",
    }


def test_private_modules_are_named_in_these_files_only():
    naming = {
        name
        for name, tree in trees().items()
        if not name.endswith(".private_names") and PRIVATE_MODULES.search(ast.unparse(tree))
    }
    assert naming == MAY_NAME_THEM


def test_every_private_attribute_is_listed():
    known = {*OTHERS, *OF_NAMED_TUPLES, *names_of_ours()}.union(*tables().values())
    unlisted = {name: module for name, module in names_used().items() if name not in known}
    # `private_names.py` of its framework has a table for each kind of object.
    assert unlisted == {}


def test_what_is_listed_is_used_and_has_a_purpose():
    strings = {
        node.value
        for module, tree in trees().items()
        if not module.endswith(".private_names")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for listed in tables().values():
        assert set(listed) <= {*names_used(), *strings}
        assert all(len(purpose.split()) > 2 for purpose in listed.values())


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
