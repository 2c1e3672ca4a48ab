"""Optimizers whose fused kernels unscale gradients and skip steps."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lossscale.common.signatures import signature_of
from lossscale.torch import ranks
from lossscale.torch.optimizer_list import OuterOptimizer, parts_of, with_parts

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""PyTorch's optimizers with fused kernels, which read `grad_scale` and `found_inf`."""


def can_skip(inner: Optimizer) -> bool:
    """Whether an optimizer, with its present settings, reads `grad_scale` and `found_inf`."""
    if isinstance(inner, OuterOptimizer):
        return all(map(can_skip, inner.optimizers))
    if type(inner).step in _steps_of_torch():
        # Not the optimizer's own flag: loading a state replaces `fused` in the groups, and a copy
        # loses the flag.
        return all(group.get("fused") for group in inner.param_groups)
    # One that takes a `grad_scaler`, as Apex' do, reads no attributes.
    supports = getattr(inner, "_step_supports_amp_scaling", False)
    return bool(supports) and not takes_a_scaler(inner.step)


def can_unscale(inner: Optimizer) -> bool:
    """Whether the kernel may unscale: nothing else reads `.grad` before it."""
    are_torchs = all(can_skip(part) and steps_as_torch(part) for part in parts_of(inner))
    has_global_hooks = bool(torch_optimizer._global_optimizer_pre_hooks)
    return are_torchs and not has_global_hooks and not any(map(_has_pre_hooks, with_parts(inner)))


def _has_pre_hooks(inner: Optimizer) -> bool:
    """Whether a hook may read gradients before a step; the wrapper's own hook does not."""
    hooks = inner._optimizer_step_pre_hooks.values()
    return not all(hasattr(hook, "of_lossscale") for hook in hooks)


def steps_as_torch(inner: Optimizer) -> bool:
    """Whether `step` is PyTorch's: not a subclass's, nor replaced, except by a scheduler."""
    own = type(inner).step
    if own not in _steps_of_torch():
        return False
    replaced = vars(inner).get("step")
    # The `step` of a scheduler only counts the calls.
    counts = hasattr(replaced, "_wrapped_by_lr_sched")
    return replaced is None or (counts and getattr(replaced, "__wrapped__", None) is own)


def _steps_of_torch() -> list[Callable[..., object]]:
    # Read each time: PyTorch wraps the `step` of a class when it makes the first instance.
    return [cls.step for cls in FUSED]


def expects_attributes(inner: Optimizer) -> bool:
    """Whether an optimizer may need both attributes."""
    return any(can_skip(part) and not steps_as_torch(part) for part in parts_of(inner))


@contextlib.contextmanager
def attributes(
    optimizers: Sequence[Any], grad_scale: Tensor | None, found_inf: Tensor | None
) -> Iterator[None]:
    """Sets attributes of optimizers that are not None, within the context.

    Args:
        optimizers: Optimizers that `can_skip`.
        grad_scale: float32 scalar tensor, the divisor of the gradients, or None.
        found_inf: float32 scalar tensor, exactly 1 to skip and 0 to apply, or None.
    """
    # Removed afterwards, because the next caller of `step` may set none.
    try:
        for optimizer in optimizers:
            if grad_scale is not None:
                own = getattr(optimizer, "grad_scale", None)
                optimizer.grad_scale = grad_scale if own is None else grad_scale * own
            if found_inf is not None:
                optimizer.found_inf = found_inf
                # An optimizer of the user's may read both.
                optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
        yield
    finally:
        for optimizer in optimizers:
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)


def is_dummy_step(optimizer: Optimizer) -> bool:
    """Whether a step can only create the optimizer's state.

    `torch.distributed.checkpoint` takes such a step before it loads a state: with gradients of 0
    and a learning rate of 0, on an optimizer without state.
    """
    groups = optimizer.param_groups
    return not optimizer.state and all("lr" in group and group["lr"] == 0 for group in groups)


def takes_a_scaler(step: Callable[..., object]) -> bool:
    """Whether a `step` takes a `grad_scaler`, as PyTorch's did before 2.0."""
    return "grad_scaler" in signature_of(step)


def makes_state(optimizers: Iterable[Optimizer]) -> bool:
    """Whether a step makes the state of a parameter, which a kernel that skips would leave behind.

    SGD's momentum would be uninitialized memory. Without momentum it has no state.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, FUSED):
            continue
        is_sgd = isinstance(optimizer, torch.optim.SGD)
        states, parameters = optimizer.state.items(), ranks.parameters_of(optimizer)
        made = [p for p, s in states if (s.get("momentum_buffer") is not None if is_sgd else s)]
        # As after the first step. The rest takes five times as long.
        if len(made) == len(parameters) and all(map(operator.is_, made, parameters)):
            continue
        ids = set(map(id, made))
        for group in optimizer.param_groups:
            lacking = (p for p in group["params"] if id(p) not in ids)
            if (not is_sgd or group["momentum"]) and any(p.grad is not None for p in lacking):
                return True
    return False
