"""Monitors of loops that the user writes: told of each step, they read the sampled ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lossscale.monitoring.monitor import Monitor, StepStats
from lossscale.monitoring.record import StepRecord

Read = Callable[[int], "StepStats | None"]
"""Waits for the device. Given the number of the last step that was read, returns what there is to
know now; None if it is gone."""


class LoopMonitor:
    """Samples steps, and records the last one when it is closed.

    Args:
        monitor: What the sampled ones are shown to.
        start: How many steps were run before the first one.
    """

    def __init__(self, monitor: Monitor, start: int) -> None:
        self._monitor = monitor
        self._before = self._position = start
        self._is_first = True
        self._unread: tuple[Read, Any] | None = None
        monitor.open()

    def __repr__(self) -> str:
        record = self.last_record
        if record is None:
            return "<Monitor: no step was sampled yet>"
        return (
            f"<Monitor: at step {record.step} loss scale {record.next_scale:g}, "
            f"{record.steps_skipped} steps skipped>"
        )

    @property
    def last_record(self) -> StepRecord | None:
        """The last record of this monitor, or None."""
        return self._monitor.last_record

    def close(self) -> None:
        """Records the last step, if it was not sampled, and closes the files."""
        try:
            if self._unread is not None:
                self._sample(*self._unread)
        finally:
            self._unread = None
            self._monitor.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _took(self, steps: int, read: Read, loss: Any) -> None:
        """Takes note of steps, and reads if it is time.

        Args:
            steps: How many were run since the last call.
            read: Reads what there is to know of them.
            loss: The loss of the last one, a scalar of the framework, or None.
        """
        end = self._position + steps
        sampled = self._is_first or self._monitor.settings.samples(self._position, end)
        self._position = end
        if sampled:
            self._sample(read, loss)
        else:
            self._unread = read, loss

    def _sample(self, read: Read, loss: Any) -> None:
        self._unread = None
        stats = read(self._before)
        if stats is None:
            return
        self._is_first = False
        before, self._before = self._before, stats.step
        self._position = stats.step
        if stats.step != before:
            number = None if loss is None else float(loss)
            self._monitor.observe(stats._replace(loss=number))
