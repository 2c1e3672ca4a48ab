"""The places where TensorFlow's pages have the names of loss scaling."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from typing import Any

import tensorflow as tf

import lossscale
from lossscale import experimental

_LOSS_SCALES = ("LossScale", "FixedLossScale", "DynamicLossScale")
_ABSENT = object()


def put_in_place() -> contextlib.ExitStack:
    """Sets every documented name.

    Returns:
        A stack that puts back what was there before when it is closed.
    """
    with contextlib.ExitStack() as stack:
        for root in (tf, tf.compat.v1, tf.compat.v2):
            _put_keras_names(stack, root.keras.mixed_precision)
            _put_loss_scales(stack, _submodule(stack, root, "mixed_precision"))
            _put_loss_scales(stack, root.train)
        # `from tensorflow.keras.mixed_precision import ...` finds another module than the
        # attribute access above.
        imported = importlib.import_module("tensorflow.keras.mixed_precision")
        _put_keras_names(stack, imported)
        return stack.pop_all()


def _put_keras_names(stack: contextlib.ExitStack, mixed_precision: Any) -> None:
    _set(stack, mixed_precision, "LossScaleOptimizer", lossscale.LossScaleOptimizer)
    older = _submodule(stack, mixed_precision, "experimental")
    _set(stack, older, "LossScaleOptimizer", experimental.LossScaleOptimizer)
    # Code of that time sets the policy from the same place.
    _set(stack, older, "Policy", mixed_precision.Policy)
    _set(stack, older, "global_policy", mixed_precision.global_policy)
    _set(stack, older, "set_policy", mixed_precision.set_global_policy)


def _put_loss_scales(stack: contextlib.ExitStack, parent: Any) -> None:
    module = _submodule(stack, parent, "experimental")
    for name in _LOSS_SCALES:
        _set(stack, module, name, getattr(experimental, name))


def _submodule(stack: contextlib.ExitStack, parent: Any, name: str) -> Any:
    """Returns the module of this name in `parent`; makes an empty one where there is none."""
    found = getattr(parent, name, None)
    if found is not None:
        return found
    path = f"{parent.__name__}.{name}"
    module = types.ModuleType(path, "Names that TensorFlow documented, from lossscale.")
    _set(stack, parent, name, module)
    # `from tensorflow.keras.mixed_precision import experimental` looks here.
    if path not in sys.modules:
        sys.modules[path] = module
        stack.callback(sys.modules.pop, path, None)
    return module


def _set(stack: contextlib.ExitStack, target: Any, name: str, value: Any) -> None:
    before = vars(target).get(name, _ABSENT)
    setattr(target, name, value)
    if before is _ABSENT:
        stack.callback(delattr, target, name)
    else:
        stack.callback(setattr, target, name, before)
