"""Learning rate schedules that follow the steps that were applied."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch

from lossscale.errors import AlreadyWrappedError, ArgumentTypeError
from lossscale.torch.optimizer.optimizer import TorchLossScaleOptimizer

_Scheduler = TypeVar("_Scheduler")


class Guarded:
    """Comes before the class of a scheduler; what it needs to know is in the class."""

    _guarded_by: Any
    _seen: Any
    _held: bool

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps the scheduler, unless every step since the last time was skipped."""
        cls: Any = type(self)
        before, now = _since(cls._seen, cls._guarded_by), _steps(cls._guarded_by)
        # Accelerate steps a scheduler once for each process: all of these are about one step.
        if now != before:
            cls._held = now.made > before.made and now.applied == before.applied
        cls._seen = now
        if cls._held:
            return None
        return super().step(*args, **kwargs)  # type: ignore[misc]


def guard(scheduler: _Scheduler, optimizer: Any) -> _Scheduler:
    """Lets a learning rate scheduler step only after steps that were applied.

    A skipped step trains nothing, so a schedule that counts steps must not count it. Of the steps
    since the scheduler's last one, one that was applied is enough: a scheduler that is stepped once
    for each epoch is not held back by an epoch whose last step was skipped.

    The scheduler's `state_dict` stays as it is. With `decide="device"` each call waits for the
    device.

    Args:
        scheduler: A scheduler of `torch.optim.lr_scheduler`, or an object with a `step` method. It
            may have been made for `optimizer` or for the optimizer inside.
        optimizer: The `LossScaleOptimizer` whose steps count.

    Returns:
        The same object.

    Raises:
        TypeError: If `optimizer` is no loss scale optimizer of PyTorch, `scheduler` has no `step`,
            or it is guarded already.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        >>> scheduler = lossscale.torch.guard(scheduler, optimizer)
        >>> optimizer.scale_loss((weight * torch.inf).sum()).backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.last_step_skipped, scheduler.get_last_lr()
        (True, [0.5])
    """
    if isinstance(scheduler, Guarded):
        raise AlreadyWrappedError("The scheduler is guarded already.")
    if not isinstance(optimizer, TorchLossScaleOptimizer):
        raise ArgumentTypeError(
            "`optimizer` must be the lossscale.torch.LossScaleOptimizer whose steps count. "
            f"Received: {type(optimizer).__name__}."
        )
    if not callable(getattr(scheduler, "step", None)) or isinstance(
        scheduler, (type, torch.optim.Optimizer)
    ):
        raise ArgumentTypeError(
            "`scheduler` must be a scheduler such as torch.optim.lr_scheduler.StepLR(optimizer, "
            f"10). Received: {scheduler!r}."
        )
    cls = type(scheduler)
    # A class of its own, because the state dictionary of a scheduler has all of its attributes.
    namespace = {
        "__module__": cls.__module__,
        "_guarded_by": optimizer,
        "_seen": _steps(optimizer),
        "_held": False,
    }
    scheduler.__class__ = type(cls.__name__, (Guarded, cls), namespace)
    return scheduler


class _Steps(NamedTuple):
    """How many steps were made, how many of them were applied, and since when they are counted."""

    made: int
    applied: int
    start: Any


def _steps(optimizer: Any) -> _Steps:
    made = int(optimizer.iterations)
    return _Steps(made, made - int(optimizer.steps_skipped), optimizer._scales.start)


def _since(before: _Steps, optimizer: Any) -> _Steps:
    """What later steps are compared with: what was loaded, if that was done in between."""
    start = optimizer._scales.start
    if start is before.start:
        return before
    return _Steps(start.iterations, start.iterations - start.steps_skipped, start)
