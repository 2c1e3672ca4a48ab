"""Checks of what the optimizer is given, made before anything changes."""

from __future__ import annotations

from typing import Any

import keras

from lossscale.common.checks import check_not_wrapped
from lossscale.errors import AlreadyWrappedError, ArgumentError
from lossscale.keras.settings import SETTINGS_OF_THE_BASE


def check_names(kwargs: dict[str, Any]) -> None:
    for setting in (*SETTINGS_OF_THE_BASE, "loss_scale_factor", "learning_rate"):
        if setting in kwargs:
            raise ArgumentError(
                f"LossScaleOptimizer has no argument `{setting}`. "
                f"Set `{setting}` on the `inner_optimizer`."
            )
    if kwargs:
        raise ArgumentError(
            f"LossScaleOptimizer has no arguments: `{'`, `'.join(kwargs)}`. It takes "
            "inner_optimizer, dynamic, initial_scale, dynamic_growth_steps, rule and name."
        )


def check_inner(inner: Any) -> None:
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise AlreadyWrappedError(
            "The optimizer to wrap is a LossScaleOptimizer itself; the gradients would be "
            f"divided twice. Wrap the optimizer inside it. Received: {inner!r}."
        )
    check_not_wrapped(inner)
    factor = getattr(inner, "loss_scale_factor", None)
    if factor is not None:
        raise ArgumentError(
            f"The optimizer to wrap has a fixed loss scale of its own, loss_scale_factor="
            f"{factor!r}, and the loss would be scaled twice. Leave `loss_scale_factor` out; for "
            f"a fixed scale make LossScaleOptimizer(..., dynamic=False, initial_scale={factor!r})."
        )
