"""The base of monitors for custom training loops, which call it after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from lossscale.errors import ArgumentError
from lossscale.monitoring.record import StepRecord
from lossscale.monitoring.recorder import Recorder, StepStats

Read = Callable[[int], "StepStats | None"]
"""Waits for the device. Given the number of the last step that was read, returns the optimizer's
statistics and the loss; None if they are gone."""


class LoopMonitor:
    """Samples steps, and records the last one when it is closed.

    Args:
        recorder: Records the sampled steps.
        start: Number of steps before the first monitored one.
    """

    def __init__(self, recorder: Recorder, start: int) -> None:
        self._recorder = recorder
        self._last_read = self._position = start
        self._is_first = True
        self._is_closed = False
        self._unread: Read | None = None
        recorder.open()

    @property
    def last_record(self) -> StepRecord | None:
        """The last record of this monitor, or None."""
        return self._recorder.last_record

    def close(self) -> None:
        """Records the last step if it was not sampled.

        Closing it again does nothing; `step` is an error afterwards.
        """
        self._is_closed, unread = True, self._unread
        if unread is not None:
            self._sample(unread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ArgumentError(
                "This Monitor is closed and records no more steps. Create another one, with "
                "another `path`."
            )

    def _add_steps(self, steps: int, read: Read) -> StepRecord | None:
        """Counts steps, and reads the last one if it is to be sampled.

        Args:
            steps: Number of steps since the last call.
            read: Reads the statistics of the last step.

        Returns:
            The record of the last step; None if it was not read.
        """
        every, before = self._recorder.settings.every, self._position
        self._position += steps
        if self._is_first or self._position // every > before // every:
            return self._sample(read)
        self._unread = read
        return None

    def _sample(self, read: Read) -> StepRecord | None:
        self._unread = None
        stats = read(self._last_read)
        if stats is None:
            return None
        self._is_first = False
        before, self._last_read = self._last_read, stats.step
        self._position = stats.step
        return None if stats.step == before else self._recorder.observe(stats)
