"""Checks of what the optimizer is given, made before anything changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras

from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentError,
    GradientsError,
    MalformedGradientsError,
)
from lossscale.frameworks.keras.settings import SETTINGS_OF_THE_BASE

_wrappers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


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
    wrapper = _wrappers.get(inner, lambda: None)()
    if wrapper is not None:
        raise AlreadyWrappedError(
            f"This {type(inner).__name__} is already wrapped by another LossScaleOptimizer "
            f"({wrapper.name!r}), and two of them would both move it. Use that one, or make a "
            "new optimizer to wrap."
        )
    factor = getattr(inner, "loss_scale_factor", None)
    if factor is not None:
        raise ArgumentError(
            f"The optimizer to wrap has a fixed loss scale of its own, loss_scale_factor="
            f"{factor!r}, and the loss would be scaled twice. Leave `loss_scale_factor` out; for "
            f"a fixed scale make LossScaleOptimizer(..., dynamic=False, initial_scale={factor!r})."
        )


def check_some_gradient(gradients: Sequence[Any]) -> None:
    if all(gradient is None for gradient in gradients):
        raise GradientsError(
            "No gradients provided for any variable. Received: "
            f"{'an empty list' if not gradients else f'{len(gradients)} times None'}. Check that "
            "the loss depends on the variables and that the tape watched them."
        )


def checked_pairs(
    grads_and_vars: Any, is_variable: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients and the variables of (gradient, variable) pairs.

    Raises:
        MalformedGradientsError: If they are no such pairs. It is a `TypeError`.
        GradientsError: If no variable has a gradient. It is a `ValueError`.
    """
    try:
        pairs = [tuple(pair) for pair in grads_and_vars]
    except TypeError:
        pairs = [()]
    if any(len(pair) != 2 for pair in pairs):
        raise MalformedGradientsError(
            "`grads_and_vars` must hold (gradient, variable) pairs, as in "
            "zip(gradients, variables). "
            f"Received: {grads_and_vars!r} of type {type(grads_and_vars).__name__}."
        )
    for _, variable in pairs:
        if not is_variable(variable):
            raise MalformedGradientsError(
                "The second item of every pair in `grads_and_vars` must be a variable. "
                f"Received: {variable!r} of type {type(variable).__name__}."
            )
    gradients = [gradient for gradient, _ in pairs]
    check_some_gradient(gradients)
    return gradients, [variable for _, variable in pairs]


def remember_wrapper(inner: Any, wrapper: Any) -> None:
    """Notes that `wrapper` moves `inner`, for as long as the wrapper lives."""
    _wrappers[inner] = weakref.ref(wrapper)
