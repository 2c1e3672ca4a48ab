"""The places where TensorFlow's pages have the names of loss scaling."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_ABSENT = object()


def put_in_place(
    optimizer: type[Any], older_optimizer: type[Any], loss_scales: Sequence[type[Any]]
) -> contextlib.ExitStack:
    """Sets every documented name.

    Args:
        optimizer: The class of the pages for TensorFlow 2.4 and later.
        older_optimizer: The class of the pages for TensorFlow 2.0 to 2.3.
        loss_scales: The classes of the loss scale objects.

    Returns:
        A stack that puts back what was there before when it is closed.
    """
    with contextlib.ExitStack() as stack:
        for root in (tf, tf.compat.v1, tf.compat.v2):
            _put_optimizers(stack, root.keras.mixed_precision, optimizer, older_optimizer)
            _put_loss_scales(stack, _submodule(stack, root, "mixed_precision"), loss_scales)
            _put_loss_scales(stack, root.train, loss_scales)
        # `from tensorflow.keras.mixed_precision import ...` finds another module than the
        # attribute access above.
        imported = importlib.import_module("tensorflow.keras.mixed_precision")
        _put_optimizers(stack, imported, optimizer, older_optimizer)
        tf_keras = sys.modules.get("tf_keras")
        if tf_keras is not None:
            _put_optimizers(stack, tf_keras.mixed_precision, optimizer, older_optimizer)
        return stack.pop_all()


def _put_optimizers(
    stack: contextlib.ExitStack,
    mixed_precision: Any,
    optimizer: type[Any],
    older_optimizer: type[Any],
) -> None:
    _set(stack, mixed_precision, "LossScaleOptimizer", optimizer)
    older = _submodule(stack, mixed_precision, "experimental")
    _set(stack, older, "LossScaleOptimizer", older_optimizer)
    # Code of that time sets the policy from the same place.
    # tf_keras has these in its names for TensorFlow 2 only.
    policies = tf.keras.mixed_precision
    _set(stack, older, "Policy", policies.Policy)
    _set(stack, older, "global_policy", policies.global_policy)
    _set(stack, older, "set_policy", policies.set_global_policy)


def _put_loss_scales(
    stack: contextlib.ExitStack, parent: Any, loss_scales: Sequence[type[Any]]
) -> None:
    module = _submodule(stack, parent, "experimental")
    for loss_scale in loss_scales:
        _set(stack, module, loss_scale.__name__, loss_scale)


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
