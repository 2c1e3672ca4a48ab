"""Checks of the wrapper's arguments, before anything changes."""

from __future__ import annotations

import traceback

from torch import Tensor
from torch.optim import Optimizer

from lossscale.checks import checked_above_zero
from lossscale.errors import ArgumentError, ArgumentTypeError, GradientsError, UnsupportedError
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.registry import not_an_optimizer
from lossscale.torch import fused, ranks
from lossscale.torch.backward import was_scaled
from lossscale.torch.closures import check_needs_no_closure
from lossscale.torch.gradient_record import ONE_FOR_SEVERAL
from lossscale.torch.masters import in_float32
from lossscale.torch.optimizer_list import parts_of
from lossscale.wrapper import check_not_wrapped


def check_inner(inner: object) -> None:
    check_not_wrapped(inner, FrontDoor)
    if not isinstance(inner, Optimizer):
        raise ArgumentTypeError(not_an_optimizer(inner))
    check_needs_no_closure(parts_of(inner))
    if any(group.get("differentiable") for group in inner.param_groups):
        raise UnsupportedError(
            "An optimizer with differentiable=True cannot be wrapped: its gradients belong to a "
            "graph, and the wrapper divides gradients in place. Make it with "
            "differentiable=False, or scale the loss and divide the gradients yourself."
        )


def check_processes(inner: Optimizer, process_group: object) -> None:
    """Refuses optimizers that communicate in `step`: if one process skips, the others hang."""
    for part in parts_of(inner):
        if type(part).__name__ == "PostLocalSGDOptimizer" and process_group is None:
            raise UnsupportedError(
                "PostLocalSGDOptimizer averages parameters over processes in its step: a process "
                "that skips a step alone would leave the others waiting. Pass "
                "process_group=torch.distributed.group.WORLD, or the group it averages over."
            )
        if getattr(part, "_overlap_with_ddp", False):
            raise UnsupportedError(
                "ZeroRedundancyOptimizer with overlap_with_ddp=True steps inside backward(), "
                "before all gradients are checked. Make it with overlap_with_ddp=False."
            )
    # By who calls: nothing else shows that only a part of the parameters is given.
    callers = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    if process_group is None and any("zero_redundancy_optimizer" in file for file in callers):
        raise UnsupportedError(
            "A LossScaleOptimizer inside a ZeroRedundancyOptimizer cannot see overflows of other "
            "processes. Wrap the ZeroRedundancyOptimizer, or make the LossScaleOptimizer with "
            "process_group=torch.distributed.group.WORLD."
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in ranks.parameters_of(inner)):
        raise UnsupportedError(
            "_apply_optimizer_in_backward steps these parameters inside backward(), before all "
            "gradients are checked. Wrap an optimizer of other parameters."
        )


def checked_clip_norm(value: float | None) -> float | None:
    return None if value is None else checked_above_zero("clip_norm", value)


def check_decide(decide: object, inner: Optimizer) -> None:
    if decide not in ("host", "device"):
        raise ArgumentError(f"`decide` must be 'host' or 'device'. Received: decide={decide!r}.")
    if decide == "host":
        return
    parameters = ranks.parameters_of(inner)
    if not parameters or any(p.is_meta for p in parameters):
        raise ArgumentError(
            "decide='device' keeps the loss scale on the device of the parameters. Received: an "
            "optimizer without parameters, or with some on the meta device. Make it after the "
            "model is materialized."
        )
    for part in parts_of(inner):
        if not fused.can_skip(part):
            raise UnsupportedError(
                f"decide='device' needs an optimizer that can skip its own step. This "
                f"{type(part).__name__} cannot. Make it with fused=True (and capturable=True for a "
                "CUDA graph) if it has that option, such as torch.optim.AdamW(parameters, "
                "fused=True), or leave `decide` out."
            )


def check_is_tensor(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise ArgumentTypeError(
            f"The loss must be a tensor. Received: {loss!r} of type {type(loss).__name__}. For "
            "several losses, pass their sum, or each of them."
        )


def check_not_scaled(loss: Tensor) -> None:
    if was_scaled(loss):
        raise GradientsError(
            "This loss is already scaled. Pass the unscaled loss, once, to backward() or "
            f"scale_loss(). If two optimizers train on it: {ONE_FOR_SEVERAL}"
        )


def check_backpropagated(loss: Tensor, inner: Optimizer, has_half: bool) -> None:
    check_is_tensor(loss)
    check_not_scaled(loss)
    if has_half:
        raise GradientsError(
            "A parameter has the dtype float16, in which unscaled gradients would flush to zero. "
            f"{in_float32(inner)}"
        )
