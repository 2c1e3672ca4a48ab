"""Takes the records of a run where they belong: to its files, and to its alarms."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from lossscale.diagnostics.alarms import Alarms
from lossscale.diagnostics.history import HistoryHeader, HistoryWriter
from lossscale.diagnostics.records import StepRecord
from lossscale.diagnostics.tensorboard import TensorBoardWriter
from lossscale.errors import LossScaleWarning, TrainingHaltedError


class RunRecorder:
    """Writes records, and warns of what the alarms find in them.

    Call `open` before the first record and `close` after the last one. Opened again it goes on
    in the same history.

    A record of an earlier step than the one before means that the run has gone back to a
    checkpoint. The files go on then as those of a run that was resumed, and the alarms start anew.

    Args:
        header: What is known about the run.
        alarms: Makes new alarms.
        path: A file for the history, or None.
        tensorboard: A folder for TensorBoard, or None.
        append: Whether to go on with a history that exists.
    """

    def __init__(
        self,
        header: HistoryHeader,
        alarms: Callable[[], Alarms],
        *,
        path: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        append: bool = False,
    ) -> None:
        self._header = header
        self._new_alarms = alarms
        self._alarms = alarms()
        self._path = path
        self._tensorboard = tensorboard
        self._append = append
        self._last_step = 0
        self._writers: list[Any] = []
        # A run that ends by an exception closes nothing by itself.
        self._finalizer = weakref.finalize(self, _close, self._writers)

    def open(self) -> None:
        """Opens the files.

        Raises:
            ArgumentError: If the history exists and `append` is False, or is no history. It is a
                `ValueError`.
            OSError: If a file cannot be written.
        """
        self.close()
        if self._path is not None:
            self._writers.append(HistoryWriter(self._path, self._header, append=self._append))
            self._append = True
        if self._tensorboard is not None:
            self._writers.append(TensorBoardWriter(self._tensorboard))

    def add(self, record: StepRecord) -> None:
        """Writes a record, and says what is wrong.

        Args:
            record: The record.

        Raises:
            TrainingHaltedError: If an alarm is fatal. All files are closed before that.
        """
        if record.step <= self._last_step:
            self._alarms = self._new_alarms()
            self.open()
        self._last_step = record.step
        for writer in self._writers:
            writer.append(record)
        for alarm in self._alarms.observe(record):
            if alarm.is_fatal:
                self.close()
                raise TrainingHaltedError(alarm.message)
            warnings.warn(alarm.message, LossScaleWarning, stacklevel=2)

    def flush(self) -> None:
        """Hands all that was written to the operating system."""
        # A history keeps nothing back.
        for writer in self._writers:
            if isinstance(writer, TensorBoardWriter):
                writer.flush()

    def close(self) -> None:
        """Closes the files. Closing them again does nothing."""
        _close(self._writers)


def _close(writers: list[Any]) -> None:
    while writers:
        writers.pop().close()
