"""Learning rate schedules that follow the steps that were applied."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

from lossscale.errors import AlreadyWrappedError, ArgumentTypeError
from lossscale.torch import ranks
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.optimizer import LossScaleOptimizer

Scheduler = TypeVar("Scheduler")


class GuardedScheduler:
    """Steps a scheduler only after steps that were applied; see `guard`.

    All other attributes are those of the scheduler.

    Attributes:
        scheduler: The scheduler.
    """

    _OWN = frozenset({"scheduler", "_watched", "_seen", "_held"})

    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler, self._watched = scheduler, optimizer
        self._seen, self._held = self._steps(), False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps the scheduler, unless every step since its last one was skipped."""
        return None if self._holds() else self.scheduler.step(*args, **kwargs)

    def _holds(self) -> bool:
        now = self._steps()
        # Counts that were loaded, or are those of a copy, begin again.
        made, applied = self._seen if now >= self._seen else (0, 0)
        # Accelerate steps a scheduler once per process: all these calls belong to one step.
        if now != self._seen:
            self._held = now[0] > made and now[1] == applied
        self._seen = now
        return self._held

    def _steps(self) -> tuple[int, int]:
        """The number of steps, and of applied ones, since the last load or copy."""
        watched = self._watched
        if not isinstance(watched, GradScaler):
            start = watched._engine.scale.start
            made = int(watched.iterations) - start.iterations
            return made, made - int(watched.steps_skipped) + start.steps_skipped
        known = list(watched._known.values())
        optimizer = getattr(self.scheduler, "optimizer", None)
        if optimizer is not None:
            # Compared by parameters, because Accelerate and others wrap the optimizer.
            ids = set(map(id, ranks.parameters_of(optimizer)))
            known = [each for each in known if not ids.isdisjoint(each.info.ids)] or known
        made = sum(each.count.made for each in known)
        return made, made - sum(each.count.skipped for each in known)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Lightning and Accelerate find schedulers that take a metric by isinstance.
        return type(self.scheduler) if "scheduler" in self.__dict__ else GuardedScheduler

    def __getattr__(self, name: str) -> Any:
        if "scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["scheduler"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # An assigned `step` replaces this one, not that of the scheduler.
        own = name in self._OWN or name == "step"
        (object.__setattr__ if own else setattr)(self if own else self.scheduler, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (), self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"<guarded {self.scheduler!r}>"


def _blank() -> GuardedScheduler:
    return object.__new__(GuardedScheduler)


def guard(scheduler: Scheduler, optimizer: LossScaleOptimizer | GradScaler) -> Scheduler:
    """Returns a learning rate scheduler that steps only after steps that were applied.

    A skipped step trains nothing, so a schedule that counts steps must not count it. The scheduler
    steps if at least one step since its last one was applied, so that a scheduler for epochs does
    not depend on the last step of an epoch.

    The scheduler's `state_dict` does not change. With `decide="device"` each call waits for the
    device.

    Args:
        scheduler: A scheduler of `torch.optim.lr_scheduler`, or an object with a `step` method. It
            may have been made for `optimizer` or for the inner optimizer; with a `GradScaler` for
            the optimizer whose steps count, or a wrapper of it such as Accelerate's.
        optimizer: The `LossScaleOptimizer` whose steps count, or the `GradScaler`.

    Returns:
        A scheduler with all attributes of `scheduler`, to use in its place.

    Raises:
        TypeError: If `optimizer` is not a loss scale optimizer of PyTorch, or `scheduler` has no
            `step` or is guarded already.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        >>> scheduler = lossscale.torch.guard(scheduler, optimizer)
        >>> overflowed = optimizer.backward((weight * torch.inf).sum())
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.last_step_skipped, scheduler.get_last_lr()
        (True, [0.5])
    """
    if type(scheduler) is GuardedScheduler:
        raise AlreadyWrappedError("This scheduler is already guarded. Use it as it is.")
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
    return cast(Scheduler, GuardedScheduler(scheduler, optimizer))


def report_skips_to_accelerate(accelerated: Any) -> None:
    """Reports skipped steps to Accelerate, whose `optimizer_step_was_skipped` then counts them.

    Accelerate itself only sees the skips of a GradScaler. Its schedulers read
    `accelerator.optimizer_step_was_skipped`, as your program may.

    Args:
        accelerated: The optimizer that `accelerator.prepare` returned for a `LossScaleOptimizer`.

    Raises:
        ArgumentTypeError: If it is something else.

    Examples:
        >>> import types
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
        >>> prepared = types.SimpleNamespace(optimizer=optimizer)  # accelerator.prepare(optimizer)
        >>> lossscale.torch.report_skips_to_accelerate(prepared)
        >>> overflowed = optimizer.backward((weight * torch.inf).sum())
        >>> optimizer.step()
        >>> prepared._is_overflow
        True
    """
    optimizer = getattr(accelerated, "optimizer", None)
    if not isinstance(optimizer, LossScaleOptimizer):
        raise ArgumentTypeError(
            "`accelerated` must be the optimizer that accelerator.prepare() returned for a "
            f"lossscale.torch.LossScaleOptimizer. Received: {accelerated!r} of type "
            f"{type(accelerated).__name__}."
        )

    def note(skipped: bool) -> Any:
        return lambda *_: setattr(accelerated, "_is_overflow", skipped)

    optimizer.register_step_skipped_hook(note(True))
    optimizer.register_step_post_hook(note(False))
