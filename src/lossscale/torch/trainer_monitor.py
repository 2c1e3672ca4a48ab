"""What the monitors in trainers of other libraries have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lossscale.errors import ArgumentError
from lossscale.monitoring.monitor import MonitorSettings
from lossscale.monitoring.record import StepRecord
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.monitor import Monitor
from lossscale.torch.optimizer import TorchLossScaleOptimizer


class HostedMonitor:
    """A monitor that is made when training begins, and closed when it ends.

    Args:
        path, every, on_floor, max_consecutive_skips, append: As of `lossscale.torch.Monitor`.
    """

    def __init__(self, path: Any = None, **settings: Any) -> None:
        super().__init__()
        self._settings = MonitorSettings(path, **settings)
        self._monitor: Monitor | None = None
        self._last: StepRecord | None = None

    @property
    def last_record(self) -> StepRecord | None:
        """The last record of this monitor, or None."""
        return self._last if self._monitor is None else self._monitor.last_record

    def _begin(self, found: list[Any], model: Any, steps: int, is_first_process: bool) -> None:
        """Begins to watch.

        Args:
            found: What may have a loss scale.
            model: For the names of parameters.
            steps: How many steps the run has behind it.
            is_first_process: Whether this process writes the files.
        """
        self._end()
        watched = [
            each for each in found if isinstance(each, (TorchLossScaleOptimizer, GradScaler))
        ]
        if not watched:
            raise ArgumentError(
                "There is no loss scale of lossscale to watch in this trainer. Give it a "
                "lossscale.torch.GradScaler, or wrap the optimizer in "
                "lossscale.torch.LossScaleOptimizer." + _what_there_is(found)
            )
        settings = self._settings
        if not is_first_process:
            settings = dataclasses.replace(settings, path=None)
        self._monitor = Monitor(watched[0], model, **vars(settings), steps_before=steps)
        self._steps = steps

    def _took(self, steps: int, loss: Any) -> None:
        """Takes note of a step, if one was made.

        Args:
            steps: How many steps were made so far.
            loss: The loss of the last one, not scaled, or None.
        """
        if self._monitor is not None and steps > self._steps:
            self._steps = steps
            self._monitor.step(loss)

    def _end(self) -> None:
        if self._monitor is not None:
            monitor, self._monitor = self._monitor, None
            monitor.close()
            self._last = monitor.last_record


def _what_there_is(found: list[Any]) -> str:
    scaler = [each for each in found if isinstance(each, torch.amp.GradScaler)]
    return f" Received: a {type(scaler[0]).__module__}.GradScaler." if scaler else ""
