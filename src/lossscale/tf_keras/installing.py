"""What `lossscale.install()` changes in tf_keras."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import tf_keras

from lossscale.common.monkeypatch import (
    DocumentedNames,
    Wrapping,
    put_into_mixed_precision,
    replace,
)
from lossscale.tf_keras import private_names
from lossscale.tf_keras.current import TFKerasLossScaleOptimizer


def put_in_place(names: DocumentedNames) -> contextlib.ExitStack:
    """Sets the documented names, and lets `compile` wrap optimizers in the documented class.

    Returns:
        A stack that puts back what was there before when it is closed.
    """
    own, optimizers = private_names.loss_scaling(), private_names.optimizers()
    training, training_v1 = private_names.trainers()
    with contextlib.ExitStack() as stack:
        mixed_precision = tf_keras.mixed_precision
        put_into_mixed_precision(stack, mixed_precision, names, mixed_precision)

        def wrap(optimizer: Any) -> Any:
            return names.wrap(optimizer, mixed_precision.global_policy())

        # Each trainer's own name for the module with the classes, and not the classes themselves:
        # others look for them too.
        for trainer, name, cls in (
            (training, "lso", "BaseLossScaleOptimizer"),
            (training_v1, "loss_scale_optimizer", "LossScaleOptimizer"),
        ):
            wrapping = Wrapping(getattr(own, cls), wrap)
            replace(stack, trainer, name, types.SimpleNamespace(**{cls: wrapping}))

        convert = _with_ours(optimizers.convert_to_legacy_optimizer)
        # The last one is what `tf.keras` is with TF_USE_LEGACY_KERAS=1, and only then is it there.
        of_tensorflow = sys.modules.get("tf_keras.api._v2.keras.__internal__.optimizers")
        for module in (optimizers, tf_keras.__internal__.optimizers, of_tensorflow):
            if module is not None:
                replace(stack, module, "convert_to_legacy_optimizer", convert)
        # What loads models and checkpoints of configurations: they name tf_keras' own class.
        read = _reading_ours(optimizers.deserialize, own.BaseLossScaleOptimizer, names.optimizer)
        of_tensorflow = sys.modules.get("tf_keras.api._v2.keras.optimizers")
        for module in (optimizers, tf_keras.optimizers, of_tensorflow):
            if module is not None:
                replace(stack, module, "deserialize", read)
        return stack.pop_all()


def _reading_ours(deserialize: Callable[..., Any], own: type[Any], ours: Any) -> Callable[..., Any]:
    """Returns tf_keras' function that makes optimizers of configurations, with ours for its own."""

    @functools.wraps(deserialize)
    def read(*args: Any, **kwargs: Any) -> Any:
        found = deserialize(*args, **kwargs)
        if isinstance(found, own) and not isinstance(found, ours):
            return ours.from_config(found.get_config())
        return found

    return read


def _with_ours(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns tf_keras' function that makes legacy optimizers, which then knows this class too."""

    @functools.wraps(convert)
    def convert_to_legacy_optimizer(optimizer: Any) -> Any:
        if not isinstance(optimizer, TFKerasLossScaleOptimizer):
            return convert(optimizer)
        inner = convert(optimizer.inner_optimizer)
        # A copy, because the two must not move one loss scale.
        arguments = copy.deepcopy(optimizer._constructor_arguments())
        return type(optimizer)(inner, **arguments)

    return convert_to_legacy_optimizer
