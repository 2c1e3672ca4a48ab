"""`install`: replaces PyTorch's scaler by the drop-in, for code that must run unedited."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from torch import distributed

from lossscale.common.replaced_names import Installation, replace
from lossscale.torch import ranks
from lossscale.torch.grad_scaler import DEFAULTS, GradScaler


class CudaGradScaler(GradScaler):
    """Replaces `torch.cuda.amp.GradScaler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cuda", *args, **kwargs)


class CpuGradScaler(GradScaler):
    """Replaces `torch.cpu.amp.GradScaler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


class ShardedGradScaler(GradScaler):
    """Replaces `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.

    Its arguments have another order. All processes agree, unless it is given a group.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = DEFAULTS.initial_scale,
        backoff_factor: float = DEFAULTS.backoff_factor,
        growth_factor: float = DEFAULTS.growth_factor,
        growth_interval: int = DEFAULTS.growth_interval,
        enabled: bool = True,
        process_group: ranks.Groups = None,
    ) -> None:
        if process_group is None and distributed.is_available() and distributed.is_initialized():
            process_group = distributed.group.WORLD
        numbers = init_scale, growth_factor, backoff_factor, growth_interval
        super().__init__(device, *numbers, enabled, process_group=process_group)


_PLACES: dict[str, type[GradScaler]] = {
    "torch": GradScaler,
    "torch.amp": GradScaler,
    "torch.amp.grad_scaler": GradScaler,
    "torch.cuda.amp": CudaGradScaler,
    "torch.cuda.amp.grad_scaler": CudaGradScaler,
    "torch.cpu.amp": CpuGradScaler,
    "torch.cpu.amp.grad_scaler": CpuGradScaler,
}
_SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"


class ScalerInstallation(Installation):
    """The installed drop-in; a context manager that uninstalls it."""


def install() -> ScalerInstallation:
    """Replaces PyTorch's scalers by `GradScaler`, for programs that must run unedited.

    `torch.amp.GradScaler`, `torch.GradScaler`, `torch.amp.grad_scaler.GradScaler`, those of
    `torch.cuda.amp` and `torch.cpu.amp`, and `ShardedGradScaler` of FSDP1. Call it before the
    program is imported: a name that was imported already stays what it was. A class that is made
    while it stands, as a subclass of `torch.amp.GradScaler`, stays a subclass of this one.

    Returns:
        An object whose `undo()` puts PyTorch's back; also a context manager that does.

    Examples:
        >>> with lossscale.torch.install():
        ...     isinstance(torch.amp.GradScaler("cpu"), lossscale.torch.GradScaler)
        True
        >>> torch.amp.GradScaler.__module__
        'torch.amp.grad_scaler'
    """
    with contextlib.ExitStack() as stack:
        if ScalerInstallation._first is None:
            # First, because its import would subclass the names that are replaced below.
            # PyTorch may be built without torch.distributed.
            with contextlib.suppress(ImportError):
                sharded = importlib.import_module(_SHARDED)
                replace(stack, sharded, "ShardedGradScaler", ShardedGradScaler)
            for place, scaler in _PLACES.items():
                replace(stack, importlib.import_module(place), "GradScaler", scaler)
        return ScalerInstallation(stack)
