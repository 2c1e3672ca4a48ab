"""What frameworks do not document stands in one file for each, and every use of it is listed."""

from __future__ import annotations

import ast
import functools
import re
from typing import NamedTuple

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


OF_OURS = {
    # Of a LossScale of the older API, which its optimizer shares the state of.
    "_bound_state": {"loss_scale"},
    "_loss_scale": {"optimizer"},
    "_rule": {"loss_scale"},
    "_state": {"loss_scale", "self._loss_scale"},
    # Of classes that `registry.combined` makes.
    "_is_combined": {"cls"},
    # Of shells, from within their rooms.
    "_current_scale": {"super()"},
    "_first_state": {"super()"},
    "_given_name": {"self"},
    "_hidden": {"SavedBesideInner"},
    "_inner_attribute": {"type(self)"},
    "_inner_base": {"shell"},
    "_keep_notes": {"super()"},
    "_take_inner_values": {"optimizer"},
    # Set on an optimizer of the user's.
    "_copied_gradients": {"optimizer"},
    "_watcher": {"optimizer", "self._watched"},
    # Of what stands around an optimizer of PyTorch.
    "_checked_numbers": {"self._optimizer"},
    "_restore_numbers": {"self._optimizer"},
    "_saved_numbers": {"self._optimizer"},
    "_scale_for": {"super()"},
    "_scales": {"optimizer"},
    # Of classes, whose other constructors use it.
    "_drop_from": {"history"},
    "_made": {"Installation", "ScalerInstallation"},
    "_standing": {"ScalerInstallation"},
}
"""What else is ours, by name, and of what it is asked besides `self`."""

SHELLS = {
    "default_shell()",
    "optimizer",
    "other",
    "registry.default_shell()",
    "self._optimizer",
    "self.optimizer",
    "shell",
}
"""Where a shell stands, whose contract has the names."""

OF_USERS = {"_add_weight": "documented for subclasses of TensorFlow's LossScale"}
"""What nobody here calls."""

CONTRACT = "lossscale.frameworks.shell.contract"


class Use(NamedTuple):
    """A name with an underscore, what it is asked of, and the module that asks."""

    name: str
    of: str
    module: str


@functools.cache
def trees():
    return {module.name: ast.parse(module.source) for module in modules()}


def is_private(name):
    """Whether a name is one that its owner keeps to itself; Python's own are not."""
    return name.startswith("_") != name.endswith("__") and name not in {"_", *OF_NAMED_TUPLES}


def names_defined(module, tree):
    """What a module itself calls by a name with an underscore."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self.__dict__"
        ):
            found.add(constant(node.slice))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.__dict__.setdefault":
            found.add(constant(node.args[0]))
    return {name for name in found if isinstance(name, str) and is_private(name)}


@functools.cache
def names_of_ours():
    """What the library itself calls by a name with an underscore, by module."""
    return {module: names_defined(module, tree) for module, tree in trees().items()}


@functools.cache
def names_for(module):
    """What is ours in an object whose class is in this module, which its bases may define."""
    room = module.split(".")[:3]
    found = set()
    for other, names in names_of_ours().items():
        parts = other.split(".")
        is_of_frameworks = parts[1:2] == ["frameworks"] == room[1:2]
        if not is_of_frameworks or parts[2:3] in (room[2:], ["shell"], ["common"]):
            found |= names
    return found


def uses_in(module, tree):
    """Yields each `Use` of a name with an underscore, but for those of modules."""
    for node in ast.walk(tree):
        name, owner = None, None
        if isinstance(node, ast.Attribute):
            name, owner = node.attr, node.value
            if ast.unparse(owner) in ("object", "importlib"):
                continue
        elif isinstance(node, ast.Subscript):
            name, owner = constant(node.slice), owner_of_dictionary(node.value)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            name, owner = constant(node.left), owner_of_dictionary(node.comparators[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            name, owner = constant(node.args[0]), owner_of_dictionary(node.func.value)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"getattr", "hasattr", "setattr", "delattr", "replaced"}
        ):
            name, owner = constant(node.args[1]), node.args[0]
        if isinstance(name, str) and owner is not None and is_private(name):
            yield Use(name, ast.unparse(owner), module)


def constant(node):
    return node.value if isinstance(node, ast.Constant) else None


def owner_of_dictionary(node):
    """The object whose attributes are `object.__dict__` or `vars(object)`, else None."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
        return node.args[0]
    return None


@functools.cache
def uses():
    return tuple(use for module, tree in trees().items() for use in uses_in(module, tree))


@functools.cache
def names_of_shells():
    """The names in the contract of a shell."""
    found = set()
    for node in ast.walk(trees()[CONTRACT]):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(node.target.id)
    return found


def is_of_ours(use):
    """Whether a name is asked of an object of the library's own."""
    if use.of in {"self", "cls"} and use.name in names_for(use.module):
        return True
    if use.of in SHELLS and use.name in names_of_shells():
        return True
    return use.of in OF_OURS.get(use.name, ())


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
    known = {*OTHERS}.union(*tables().values())
    unlisted = {use for use in uses() if use.name not in known and not is_of_ours(use)}
    # `private_names.py` of its framework has a table for each kind of object.
    assert unlisted == set()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("torch.grad_scaler.scale", "left = scale._version"),
        ("torch.diagnosis.precisions", "autocast._enabled = False"),
        ("tensorflow.gate", "target = getattr(v, '_variable', v)"),
        ("keras.backends.tensorflow", "part.__dict__['_unheard_of'] = list"),
        ("keras.backends.tensorflow", "part.__dict__.pop('_unheard_of', None)"),
        ("tf_keras.verbs", "known = '_unheard_of' in vars(inner)"),
        ("common.autograph", "function.unheard_of__ = {}"),
        ("tf_keras.state", "super()._trackable_children()"),
        # Of a shell's base class, though another room has something of that name.
        ("keras.shell", "self._track_variable(variable)"),
        ("keras.verbs", "self._growth_tracker"),
        # Of a shell alone.
        ("keras.verbs", "inner._state"),
    ],
)
def test_a_name_of_a_framework_is_not_taken_for_one_of_ours(module, source):
    [use] = uses_in(f"lossscale.frameworks.{module}", ast.parse(source))
    assert not is_of_ours(use)


def test_what_is_ours_is_asked_for():
    asked = {(use.name, use.of) for use in uses()}
    assert {(name, of) for name, several in OF_OURS.items() for of in several} <= asked
    assert {of for name, of in asked if name in names_of_shells()} >= SHELLS


def test_what_nobody_here_asks_for_is_listed():
    known = {*OF_USERS}.union(*tables().values())
    asked = {use.name for use in uses()}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                asked.add(node.id)
            elif isinstance(node, ast.ImportFrom):
                asked |= {alias.name for alias in node.names}
    # A method that a framework calls, or an attribute of a class that it reads.
    unlisted = {name for name in methods_and_constants() if name not in {*known, *asked}}
    assert unlisted == set()


def methods_and_constants():
    """What classes of the library define by a name with an underscore."""
    found = set()
    for tree in trees().values():
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in cls.body:
                if isinstance(node, ast.FunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.Assign):
                    found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in found if is_private(name)}


def test_what_is_listed_is_used_and_has_a_purpose():
    used = {use.name for use in uses()} | methods_and_constants() | names_of_attributes_replaced()
    for listed in tables().values():
        assert set(listed) <= used
        assert all(len(purpose.split()) > 2 for purpose in listed.values())


def names_of_attributes_replaced():
    """The keys of dictionaries, whose values take the place of such attributes."""
    return {
        constant(key)
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
    }


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
