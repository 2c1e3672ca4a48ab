"""PyTorch: eager, with one look at the verdict on the host for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from lossscale.errors import ArgumentError, GradientsError
from lossscale.frameworks.keras.engines.common import (
    aggregation_name,
    check_strategy,
    outside_traces,
)
from lossscale.frameworks.keras.engines.common import flat_keras_variables as flat_variables
from lossscale.frameworks.keras.engines.common import is_keras_variable as is_variable
from lossscale.frameworks.keras.engines.common import only_place as current_place

__all__ = [
    "aggregation_name",
    "check_strategy",
    "current_place",
    "flat_variables",
    "is_variable",
    "outside_traces",
]


def read(variable: Any) -> Any:
    """The value of a Keras variable now, as a tensor of its own: variables change in place."""
    return variable.value.detach().clone()


def unscaled(gradient: Any, scale: Any, exact_reciprocal: bool) -> Any:
    """Divides a gradient by the scale, in float32 or wider.

    Args:
        gradient: Tensor of any dtype; sparse stays sparse.
        scale: float32 scalar tensor, or a Python float.
        exact_reciprocal: Whether multiplying by the reciprocal is exact. It is for powers of
            two; others are divided by.
    """
    gradient = _widened(gradient)
    divisor = torch.as_tensor(scale, dtype=gradient.real.dtype, device=gradient.device)
    return gradient * divisor.reciprocal() if exact_reciprocal else gradient / divisor


def scaled(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the scale, in float32 or wider."""
    loss = _widened(torch.as_tensor(loss))
    return loss * torch.as_tensor(scale, dtype=loss.real.dtype, device=loss.device)


def _widened(tensor: Any) -> Any:
    wide = tensor.dtype in (torch.float32, torch.float64) or tensor.is_complex()
    return tensor if wide else tensor.to(torch.float32)


def all_finite(gradients: Sequence[Any]) -> Any:
    """Whether every element of every gradient is finite: a boolean scalar tensor.

    Args:
        gradients: Tensors (of sparse ones the values are looked at) or None (skipped).
    """
    checks = [torch.isfinite(_values(g)).all() for g in gradients if g is not None]
    if not checks:
        return torch.tensor(True)
    return torch.stack([check.to(checks[0].device) for check in checks]).all()


def _values(gradient: Any) -> Any:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def flat_gradients(gradients: Any) -> list[Any]:
    """The gradients in a nest, without None."""
    return [gradient for gradient in keras.tree.flatten(gradients) if gradient is not None]


def replica_count() -> int:
    """Always 1: this process applies its own gradients."""
    return 1


def run_step(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], aggregate: bool
) -> None:
    """Applies unscaled gradients or skips the step.

    Args:
        optimizer: The loss scale optimizer, built.
        gradients: Unscaled gradients; None where there is none.
        variables: Their variables.
        aggregate: Not used: this process applies its own gradients.
    """
    with torch.no_grad():
        finite = optimizer._judge(gradients)
        if finite is True or bool(finite):
            optimizer.inner_optimizer.apply(list(gradients), list(variables))
        optimizer._move_scale(finite)


def differentiate(
    loss: Any,
    variables: Any,
    scale: Callable[[Any], Any],
    *,
    tape: Any = None,
    grad_loss: Any = None,
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of a scaled loss, and the variables they belong to.

    Args:
        loss: A callable without arguments, or a tensor with a gradient function.
        variables: A list, one variable, or a callable that returns either.
        scale: Multiplies a loss by the loss scale.
        tape: Must be None: PyTorch has no tapes.
        grad_loss: Tensor of the loss's shape that multiplies the gradients, or None.
    """
    if tape is not None:
        raise ArgumentError("`tape` is for the TensorFlow backend. Leave it out.")
    scaled_loss = scale(loss() if callable(loss) else loss)
    if callable(variables):
        variables = variables()
    if variables is None:
        raise ArgumentError(
            "`var_list` must be given on the PyTorch backend, which does not record the "
            "variables a loss was computed from. Pass model.trainable_variables."
        )
    variables = flat_variables(variables)
    if not scaled_loss.requires_grad:
        raise GradientsError(
            "The loss does not depend on any variable, so that it has no gradient."
        )
    if grad_loss is None and scaled_loss.ndim:
        grad_loss = torch.ones_like(scaled_loss)
    gradients = torch.autograd.grad(
        scaled_loss, [v.value for v in variables], grad_loss, allow_unused=True
    )
    return list(gradients), variables


def symbolic_gradients(loss: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a tensor, which knows how it was computed."""
    gradients, _ = differentiate(loss, list(variables), lambda value: value)
    return gradients
