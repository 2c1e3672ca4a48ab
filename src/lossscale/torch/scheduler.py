"""A schedule that follows the steps that were applied."""

from __future__ import annotations

from typing import Any

from lossscale.torch import ranks
from lossscale.torch.grad_scaler import GradScaler


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
        records = list(watched._records.values())
        optimizer = getattr(self.scheduler, "optimizer", None)
        if optimizer is not None:
            # Compared by parameters, because Accelerate and others wrap the optimizer.
            ids = set(map(id, ranks.parameters_of(optimizer)))
            records = [r for r in records if not ids.isdisjoint(r.info.ids)] or records
        counts = [record.count.read() for record in records]
        made = sum(steps for steps, _ in counts)
        return made, made - sum(skipped for _, skipped in counts)

    @property  # type: ignore[misc]  # of this name
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
        return object.__new__, (GuardedScheduler,), self.__dict__.copy()
