"""Checks of the constructor's arguments, and configurations."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

import lossscale.framework_types as ft
from lossscale import registry
from lossscale.arguments import check_described
from lossscale.errors import AlreadyWrappedError, ArgumentError, ArgumentTypeError
from lossscale.keras_common.configs import deserialized
from lossscale.old_formats import inner_config
from lossscale.wrapper import check_not_wrapped


def check_inner(inner: object) -> None:
    """Checks that an optimizer can be wrapped.

    Raises:
        ArgumentTypeError: If it is not an optimizer of Keras 3.
        AlreadyWrappedError: If it has loss scaling already.
        ArgumentError: If it has a fixed scale of its own.
    """
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ArgumentTypeError(registry.not_an_optimizer(inner))
    check_not_wrapped(inner, keras.optimizers.LossScaleOptimizer)
    factor = getattr(inner, "loss_scale_factor", None)
    if factor is not None:
        raise ArgumentError(
            "The loss would be scaled twice: the inner optimizer has "
            f"loss_scale_factor={factor!r}. Leave `loss_scale_factor` out; for a fixed scale make "
            f"LossScaleOptimizer(..., dynamic=False, initial_scale={factor!r})."
        )


def refuse_factor(value: object) -> None:
    """Raises because Keras' own loss scale is set on an optimizer that scales the loss itself."""
    # The constructor of Keras' own class sets None on the optimizer that it is given.
    error = AlreadyWrappedError if value is None else ArgumentError
    raise error(
        "`loss_scale_factor` would scale the loss a second time, as Keras' LossScaleOptimizer "
        "around this one would. For a fixed scale make LossScaleOptimizer(inner_optimizer, "
        f"dynamic=False, initial_scale=...). Received: loss_scale_factor={value!r}."
    )


def inner_from_config(config: Any, custom_objects: dict[str, Any] | None) -> ft.KerasOptimizer:
    """Returns the inner optimizer that a configuration of any release describes.

    Args:
        config: The configuration, or an optimizer, which is returned as it is.
        custom_objects: Classes that Keras does not know, by class name.
    """
    if isinstance(config, keras.optimizers.Optimizer):
        return config
    check_described(config, "inner optimizer")
    names = [config.get("class_name"), config.get("registered_name")]
    registered = keras.saving.get_registered_object
    own = {name: None for name in names if name and registered(name, custom_objects) is not None}
    # A copy: Keras lower-cases the class name in the dictionary it is given.
    config = inner_config(config, own)
    inner = keras.optimizers.deserialize(config, custom_objects=custom_objects)
    if not isinstance(inner, str):
        return inner
    # Keras' own list of names lacks some that Keras has (Lamb).
    if config.get("module") is None and hasattr(keras.optimizers, inner):
        config = {**config, "module": "keras.optimizers"}
    return deserialized(keras, inner, config, custom_objects)


# Keras has no types.
@keras.saving.register_keras_serializable(package="lossscale")  # type: ignore[untyped-decorator]
def hard_sigmoid(x: ft.Tensor) -> ft.Tensor:
    """TensorFlow's hard sigmoid: 0.2 x + 0.5, between 0 and 1. Keras 3's is x / 6 + 0.5.

    Args:
        x: A tensor of any shape.

    Examples:
        >>> [round(float(hard_sigmoid(x)), 1) for x in (-3.0, 0.0, 1.0)]
        [0.0, 0.5, 0.7]
    """
    return ops.clip(ops.add(ops.multiply(x, 0.2), 0.5), 0.0, 1.0)
