"""The call of the optimizer inside, with what fused optimizers take besides the gradients."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""PyTorch's own optimizers with fused kernels, which divide and skip if they are told to."""


def takes_scaling(inner: Any) -> bool:
    """Whether an optimizer can be handed a divisor and a verdict as tensors, as it is now."""
    if not getattr(inner, "_step_supports_amp_scaling", False):
        return False
    # Loading a state replaces the settings of the groups, this one too.
    return not isinstance(inner, FUSED) or all(group.get("fused") for group in inner.param_groups)


def demands_scaling(inner: Any) -> bool:
    """Whether an optimizer may rely on being handed both, as others than PyTorch's own may."""
    return not isinstance(inner, FUSED) and takes_scaling(inner)


def is_dummy_step(optimizer: Any) -> bool:
    """Whether nothing can come of a step but the state of the optimizer.

    `torch.distributed.checkpoint` makes the state so, before it loads into it: with zeros for
    gradients and a learning rate of 0, on an optimizer that has no state.
    """
    groups = optimizer.param_groups
    return not optimizer.state and all("lr" in group and group["lr"] == 0 for group in groups)


def demands_closure(inner: Any) -> bool:
    """Whether the step of an optimizer evaluates a closure by itself, such as that of LBFGS."""
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def call(inner: Any, divisor: Any = None, found: Any = None, closure: Any = None) -> Any:
    """Steps an optimizer, and returns what it returns.

    Args:
        inner: The optimizer.
        divisor: float32 tensor of no dimensions to divide the gradients by, or None.
        found: float32 tensor of no dimensions, exactly 1 to skip and 0 to apply, or None.
        closure: What it evaluates, or None.
    """
    step: Callable[..., Any] = inner.step
    if divisor is None and found is None:
        return step() if closure is None else step(closure)
    # Left behind, as numbers or as None, they would mislead whoever steps this optimizer next.
    try:
        if divisor is not None:
            inner.grad_scale = divisor
        if found is not None:
            inner.found_inf = found
        return step() if closure is None else step(closure)
    finally:
        for name in ("grad_scale", "found_inf"):
            inner.__dict__.pop(name, None)


def check_signature(inner: Any) -> None:
    """Warns of an optimizer whose step takes a scaler, as PyTorch did before 2.0."""
    if "grad_scaler" in inspect.signature(type(inner).step).parameters:
        warnings.warn(
            f"{type(inner).__name__}.step takes a `grad_scaler`, which it is not given here: its "
            "gradients are unscaled before.",
            FutureWarning,
            stacklevel=3,
        )
