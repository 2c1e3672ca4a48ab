"""The base of monitors for custom training loops, which call it after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from lossscale.errors import ArgumentError
from lossscale.framework_types import Scalar
from lossscale.monitoring.record import StepRecord
from lossscale.monitoring.recorder import Recorder, StepStats

Read = Callable[[int], "StepStats | None"]
"""Waits for the device. Given the number of the last step that was read, returns the optimizer's
statistics; None if they are gone."""


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
        self._unread: tuple[Read, Scalar | None] | None = None
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
            self._sample(*unread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ArgumentError(
                "This Monitor is closed and records no more steps. Create another one; with the "
                "same `path`, pass append=True."
            )

    def _add_steps(self, steps: int, read: Read, loss: Scalar | None) -> None:
        """Counts steps, and reads the last one if it is to be sampled.

        Args:
            steps: Number of steps since the last call.
            read: Reads the optimizer's statistics.
            loss: The unscaled loss of the last step, a scalar of the framework, or None.
        """
        end = self._position + steps
        sampled = self._is_first or self._recorder.settings.samples(self._position, end)
        self._position = end
        if sampled:
            self._sample(read, loss)
        else:
            self._unread = read, loss

    def _sample(self, read: Read, loss: Scalar | None) -> None:
        self._unread = None
        stats = read(self._last_read)
        if stats is None:
            return
        self._is_first = False
        before, self._last_read = self._last_read, stats.step
        self._position = stats.step
        if stats.step != before:
            loss = stats.loss if loss is None else float(loss)
            self._recorder.observe(stats._replace(loss=loss))
