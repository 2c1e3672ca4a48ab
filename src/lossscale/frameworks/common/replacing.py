"""Attributes of modules that are replaced for a while, and put back exactly."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

_ABSENT = object()


def replace(stack: contextlib.ExitStack, target: Any, name: str, value: Any) -> None:
    """Sets an attribute of a module; closing the stack puts back what was there, or nothing."""
    before = vars(target).get(name, _ABSENT)
    setattr(target, name, value)
    if before is _ABSENT:
        stack.callback(delattr, target, name)
    else:
        stack.callback(setattr, target, name, before)


def submodule(stack: contextlib.ExitStack, parent: Any, name: str) -> Any:
    """Returns the module of this name in `parent`; makes an empty one where there is none."""
    found = getattr(parent, name, None)
    if found is not None:
        return found
    path = f"{parent.__name__}.{name}"
    module = types.ModuleType(path, "Names that TensorFlow documented, from lossscale.")
    replace(stack, parent, name, module)
    # `from tensorflow.keras.mixed_precision import experimental` looks here.
    if path not in sys.modules:
        sys.modules[path] = module
        stack.callback(sys.modules.pop, path, None)
    return module
