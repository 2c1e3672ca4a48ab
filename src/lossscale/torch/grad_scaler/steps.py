"""What a gradient scaler has to know about the optimizer that it steps."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lossscale.diagnostics.records import NonfiniteTensor
from lossscale.errors import AlreadyWrappedError, ArgumentTypeError, CallOrderError
from lossscale.optimizer import LossScaleOptimizer
from lossscale.torch.optimizer.handing import FUSED
from lossscale.torch.ranks import local
from lossscale.torch.scaling import real_parts


def check_optimizer(optimizer: Any) -> None:
    """Refuses what a scaler cannot step.

    Raises:
        ArgumentTypeError: If it is no optimizer. It is a `TypeError`.
        AlreadyWrappedError: If it scales by itself. It is a `TypeError`.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        raise AlreadyWrappedError(
            "This optimizer is a LossScaleOptimizer, which scales by itself. Use it without a "
            f"GradScaler, or pass the optimizer inside it. Received: {optimizer!r}."
        )
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentTypeError(
            "A GradScaler unscales and steps an optimizer, such as "
            f"torch.optim.AdamW(model.parameters()). Received: {optimizer!r} of type "
            f"{type(optimizer).__name__}."
        )


def refuse_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses a closure, given by name or by place.

    Raises:
        CallOrderError: It is a `RuntimeError`.
    """
    if any(map(callable, args)) or kwargs.get("closure") is not None:
        raise CallOrderError(
            "step() of a GradScaler takes no closure: the optimizer would see scaled losses. "
            "lossscale.torch.LossScaleOptimizer takes closures, also those of LBFGS."
        )


def _is_of_torch(optimizer: Any) -> bool:
    # As they are now: PyTorch wraps the `step` of a class when the first instance is made.
    return type(optimizer).step in [cls.step for cls in FUSED]


def takes_the_scaler(optimizer: Any) -> bool:
    """Whether `step` has an argument `grad_scaler`, and does what a scaler does by itself."""
    if _is_of_torch(optimizer):
        return False
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def needs_no_attributes(optimizer: Any) -> bool:
    """Whether an optimizer that can unscale by itself does without `grad_scale` and `found_inf`.

    Those of PyTorch do, unless somebody has set a `grad_scale` of their own.
    """
    return _is_of_torch(optimizer) and not hasattr(optimizer, "grad_scale")


@contextlib.contextmanager
def handed_over(optimizer: Any, scale: Any) -> Iterator[None]:
    """Sets the attributes `grad_scale` and `found_inf` for a step, and takes them away after it.

    Args:
        optimizer: One that divides its gradients by `grad_scale`.
        scale: float32 scalar tensor, what the gradients still have to be divided by.
    """
    own = getattr(optimizer, "grad_scale", None)
    optimizer.grad_scale = scale if own is None else scale * own
    # The host has decided already; some require a tensor.
    optimizer.found_inf = torch.zeros_like(scale)
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def named(parameters: Any) -> dict[Any, str]:
    """Parameters with their names.

    Args:
        parameters: A module, or an iterable of (name, parameter) pairs.

    Raises:
        ArgumentTypeError: If it is neither. It is a `TypeError`.
    """
    pairs = parameters
    if isinstance(parameters, torch.nn.Module):
        pairs = parameters.named_parameters()
    found: dict[Any, str] | None
    try:
        found = {parameter: name for name, parameter in pairs}
    except (TypeError, ValueError):
        found = None
    if found is None or not all(
        isinstance(p, torch.Tensor) and isinstance(n, str) for p, n in found.items()
    ):
        raise ArgumentTypeError(
            "Parameters are named by a module, or by (name, parameter) pairs as "
            f"model.named_parameters() gives them. Received: {parameters!r} of type "
            f"{type(parameters).__name__}."
        )
    return found


def nonfinite_of(optimizer: Any, names: Mapping[Any, str]) -> tuple[NonfiniteTensor, ...]:
    """The gradients of an optimizer with an infinity or a NaN in the part that is here.

    Args:
        optimizer: The optimizer.
        names: The names of parameters; others are numbered, group by group.
    """
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            parts = real_parts(local(parameter.grad))
            counts = [int(test(p).sum()) for p in parts for test in (torch.isinf, torch.isnan)]
            if any(counts):
                name = names.get(parameter, f"param_groups[{index}]['params'][{number}]")
                found.append(NonfiniteTensor(name, *counts))
    return tuple(found)


def flat(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The parameters of an optimizer's groups, in order."""
    return [parameter for group in groups for parameter in group["params"]]
