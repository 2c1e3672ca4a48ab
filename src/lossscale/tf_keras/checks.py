"""Checks of the constructor's arguments, made before anything changes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lossscale.common.autograph import as_written
from lossscale.common.checks import check_not_wrapped, flat_list
from lossscale.errors import AlreadyWrappedError, ArgumentError, ArgumentTypeError
from lossscale.tf_keras.private_names import BaseLossScaleOptimizer


def check_names(kwargs: dict[str, Any]) -> None:
    """Checks that no argument was given that the constructor does not have.

    Raises:
        ArgumentError: If one was. It is a `ValueError`.
    """
    if kwargs:
        raise ArgumentError(
            f"LossScaleOptimizer has no arguments: `{'`, `'.join(kwargs)}`. It takes "
            "inner_optimizer, dynamic, initial_scale, dynamic_growth_steps, rule and name; set "
            "everything else on the `inner_optimizer`."
        )


def check_inner(inner: Any, base: type[Any]) -> None:
    """Checks that an optimizer can be wrapped by a shell.

    Args:
        inner: The optimizer.
        base: The base class of the optimizers that the shell wraps.

    Raises:
        AlreadyWrappedError: If it has loss scaling already.
        ArgumentTypeError: If it is of another family. Both are `TypeError`s.
    """
    if isinstance(inner, BaseLossScaleOptimizer):
        raise AlreadyWrappedError(
            "The optimizer to wrap is a LossScaleOptimizer itself; the gradients would be "
            f"divided twice. Wrap the optimizer inside it. Received: {inner!r}."
        )
    if not isinstance(inner, base):
        raise ArgumentTypeError(
            f"This class wraps optimizers of {base.__module__}.{base.__name__}. Received: "
            f"{inner!r} of type {type(inner).__name__}. Use lossscale.LossScaleOptimizer, which "
            "picks the class by the optimizer."
        )
    check_not_wrapped(inner)
    if getattr(inner, "_is_wrapped_by_loss_scale_optimizer", False):
        raise AlreadyWrappedError(
            f"This {type(inner).__name__} is already wrapped by a LossScaleOptimizer of tf_keras, "
            "and two of them would both move it. Make a new optimizer to wrap."
        )


def is_variable(value: Any) -> bool:
    """Whether a gradient can be applied to `value`."""
    return isinstance(value, tf.Variable)


@as_written
def flat_variables(variables: Any) -> list[Any]:
    """Returns a list of variables from one variable or a nest of them.

    Raises:
        GradientsError: If something in it is no variable. It is a `ValueError`.
    """
    return flat_list(variables, tf.nest.flatten, is_variable)
