"""Closures, which are evaluated before a step, so that it can still be skipped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.optim import Optimizer

from lossscale.common.signatures import signature_of
from lossscale.errors import ArgumentTypeError, UnsupportedError

Loss = TypeVar("Loss")

_IN_STEP = "ScheduleFreeClosure", "AliG"
"""How classes end whose step needs a closure, although its signature does not show it."""
_NEEDS_IT = (
    "evaluates a closure within its step, which is not supported. Use it without "
    "LossScaleOptimizer and MasterWeights, in float32."
)


def check_needs_no_closure(parts: Sequence[Optimizer]) -> None:
    """Refuses optimizers that evaluate a closure within their step, such as LBFGS.

    Raises:
        UnsupportedError: If one of them is known to do so.
    """
    for part in parts:
        name = type(part).__name__
        closure = signature_of(type(part).step).get("closure")
        is_required = closure is not None and closure.default is inspect.Parameter.empty
        # SAM has two calls in place of it.
        if (is_required and not _is_sam(part)) or name.endswith(_IN_STEP):
            raise UnsupportedError(f"{name} {_NEEDS_IT}")


def _is_sam(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")


def step_with_closure(
    parts: Sequence[Optimizer], closure: Callable[[], Loss], step: Callable[[], object]
) -> Loss:
    """Evaluates a closure before a step, which then takes none and can still be skipped.

    Args:
        parts: The optimizers that the step updates parameters with.
        closure: The closure, whose result is returned.
        step: Makes the step.

    Raises:
        ArgumentTypeError: If the closure cannot be called.
        UnsupportedError: If an optimizer needs the closure, or moves the weights before it.
    """
    if not callable(closure):
        raise ArgumentTypeError(
            "`closure` must be a callable that evaluates the model, calls backward() and "
            f"returns the loss. Received: {type(closure).__name__}. step() takes no loss: call "
            "optimizer.backward(loss) before it."
        )
    for part in parts:
        if _is_sam(part):
            raise UnsupportedError(
                f"{type(part).__name__} moves the weights before it evaluates a closure. Make "
                "its two calls: backward(loss) and first_step(), then zero_grad(), "
                "backward(loss) and second_step()."
            )
    with torch.enable_grad():
        loss = closure()
    try:
        step()
    except Exception as error:
        # Some ask for it although it is optional in their signature.
        if "closure" in str(error):
            raise UnsupportedError(f"{type(parts[0]).__name__} {_NEEDS_IT}") from error
        raise
    return loss
