"""Learning rate schedules that follow the steps that were applied."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch

from lossscale.errors import AlreadyWrappedError, ArgumentTypeError
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.optimizer import LossScaleOptimizer

_Scheduler = TypeVar("_Scheduler")


class Guarded:
    """Comes after the class of a scheduler, to mark it."""


class _Steps(NamedTuple):
    """How many steps were made, how many of them were applied, and since when they are counted."""

    made: int
    applied: int
    start: Any

    def since_start(self) -> _Steps:
        """What later steps are compared with, if a state was loaded in between."""
        start = self.start
        return _Steps(start.iterations, start.iterations - start.steps_skipped, start)


class _Guard:
    """Whether a scheduler is held back: what its optimizer has done since it was last asked."""

    def __init__(self, optimizer: Any, of: Any) -> None:
        # Of a scaler that steps several, those of the scheduler's own optimizer count.
        self.optimizer, self.of = optimizer, of
        self.seen, self.held = self._steps(), False

    def holds(self) -> bool:
        now = self._steps()
        before = self.seen if self.seen.start is now.start else now.since_start()
        if now.made < before.made:
            # A copied scaler counts anew.
            before = _Steps(0, 0, now.start)
        # Accelerate steps a scheduler once for each process: all of these are about one step.
        if now != before:
            self.held = now.made > before.made and now.applied == before.applied
        self.seen = now
        return self.held

    def _steps(self) -> _Steps:
        optimizer = self.optimizer
        if isinstance(optimizer, GradScaler):
            records = optimizer._records.items()
            counted = [record for key, record in records if key == id(self.of) or not self.of]
            made = sum(each.steps_made for each in counted)
            return _Steps(made, made - sum(each.steps_skipped for each in counted), None)
        made = int(optimizer.iterations)
        return _Steps(made, made - int(optimizer.steps_skipped), optimizer._engine.scale.start)


def _new_guarded(cls: type[Any]) -> Any:
    """Returns a guarded scheduler that still has to be given its state."""
    return object.__new__(_guarded_class(cls))


def _guarded_class(cls: type[Any]) -> type[Any]:
    # A class with a layout of its own among its bases, such as a Protocol, has to come first.
    class GuardedScheduler(cls, Guarded):
        _guard: _Guard

        def step(self, *args: Any, **kwargs: Any) -> Any:
            """Steps the scheduler, unless every step since the last time was skipped."""
            return None if self._guard.holds() else super().step(*args, **kwargs)

        def state_dict(self) -> dict[str, Any]:
            """Returns the state of the scheduler, as without a guard."""
            state: dict[str, Any] = super().state_dict()
            return {name: value for name, value in state.items() if name != "_guard"}

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _new_guarded, (cls,), self.__dict__

    GuardedScheduler.__name__, GuardedScheduler.__qualname__ = cls.__name__, cls.__qualname__
    GuardedScheduler.__module__, GuardedScheduler.__doc__ = cls.__module__, cls.__doc__
    return GuardedScheduler


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
        optimizer: The `LossScaleOptimizer` whose steps count, or the `GradScaler`.

    Returns:
        The same object.

    Raises:
        TypeError: If `optimizer` is no loss scale optimizer of PyTorch, `scheduler` has no `step`,
            or it is guarded already.

    Examples:
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
    if not isinstance(optimizer, (LossScaleOptimizer, GradScaler)):
        raise ArgumentTypeError(
            "`optimizer` must be the lossscale.torch.LossScaleOptimizer whose steps count, or the "
            "lossscale.torch.GradScaler. "
            f"Received: {type(optimizer).__name__}."
        )
    if not callable(getattr(scheduler, "step", None)) or isinstance(
        scheduler, (type, torch.optim.Optimizer)
    ):
        raise ArgumentTypeError(
            "`scheduler` must be a scheduler such as torch.optim.lr_scheduler.StepLR(optimizer, "
            f"10). Received: {scheduler!r}."
        )
    watched: Any = scheduler
    watched.__class__ = _guarded_class(type(scheduler))
    watched._guard = _Guard(optimizer, getattr(scheduler, "optimizer", None))
    return scheduler
