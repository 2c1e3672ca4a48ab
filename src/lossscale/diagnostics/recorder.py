"""Takes the records of a run where they belong: to its files, and to its alarms."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from lossscale.diagnostics.alarms import Alarms
from lossscale.diagnostics.history_header import HistoryHeader
from lossscale.diagnostics.history_writer import HistoryWriter
from lossscale.diagnostics.records import StepRecord
from lossscale.diagnostics.tensorboard import TensorBoardWriter
from lossscale.errors import RecordingError, TrainingHaltedError
from lossscale.packages import warn

ON_WRITE_ERROR = ("warn", "raise")


class RunRecorder:
    """Writes records, and warns of what the alarms find in them.

    Call `open` before the first record and `close` after the last one. Opened again it goes on
    in the same history.

    A record of an earlier step than the one before means that the run has gone back to a
    checkpoint. The files go on then as those of a run that was resumed, and the alarms start anew.

    A file that cannot be written any more is given up, with one warning.

    Args:
        header: What is known about the run.
        alarms: Makes new alarms.
        path: A file for the history, or None.
        tensorboard: A folder for TensorBoard, or None.
        append: Whether to go on with a history that exists.
        on_write_error: "warn", or "raise" for an error in the place of the warning.
    """

    def __init__(
        self,
        header: HistoryHeader,
        alarms: Callable[[], Alarms],
        *,
        path: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        append: bool = False,
        on_write_error: str = "warn",
    ) -> None:
        self._header = header
        self._new_alarms = alarms
        self._alarms = alarms()
        self._append = append
        self._on_write_error = on_write_error
        # What makes a writer, given `append`, by where it writes; without those given up.
        self._targets: dict[str, Callable[[bool], Any]] = {}
        if path is not None:
            self._targets[f"the history {os.fspath(path)!r}"] = lambda append: HistoryWriter(
                path, header, append=append
            )
        if tensorboard is not None:
            self._targets[f"the folder for TensorBoard {os.fspath(tensorboard)!r}"] = (
                lambda append: TensorBoardWriter(tensorboard)
            )
        self._last_step = 0
        self._writers: dict[str, Any] = {}
        # A run that ends by an exception closes nothing by itself.
        self._finalizer = weakref.finalize(self, _discard, self._writers)

    def open(self) -> None:
        """Opens the files.

        Raises:
            ArgumentError: If the history exists and `append` is False, or is no history. It is a
                `ValueError`.
            RecordingError: If a file cannot be written. It is an `OSError`.
        """
        self.close()
        for target in tuple(self._targets):
            try:
                self._open(target)
            except OSError as error:
                _discard(self._writers)
                raise RecordingError(
                    f"The run cannot be recorded in {target}: {_reason(error)}."
                ) from error

    def add(self, record: StepRecord) -> None:
        """Writes a record, and says what is wrong.

        Args:
            record: The record.

        Raises:
            TrainingHaltedError: If an alarm is fatal. All files are closed before that.
            RecordingError: If a file cannot be written and `on_write_error` is "raise". It is an
                `OSError`.
        """
        if record.step <= self._last_step:
            self._alarms = self._new_alarms()
            self.close()
            self._for_each(self._targets, self._open)
        self._last_step = record.step
        self._for_each(self._writers, lambda target: self._writers[target].append(record))
        for alarm in self._alarms.observe(record):
            if alarm.is_fatal:
                self.close()
                raise TrainingHaltedError(alarm.message)
            warn(alarm.message)

    def flush(self) -> None:
        """Hands all that was written to the operating system."""
        # A history keeps nothing back.
        self._for_each(
            [name for name, found in self._writers.items() if isinstance(found, TensorBoardWriter)],
            lambda target: self._writers[target].flush(),
        )

    def close(self) -> None:
        """Closes the files. Closing them again does nothing."""
        self._for_each(self._writers, lambda target: self._writers[target].close())
        self._writers.clear()

    def _open(self, target: str) -> None:
        self._writers[target] = self._targets[target](self._append)
        # From now on the history is one that exists.
        self._append = self._append or isinstance(self._writers[target], HistoryWriter)

    def _for_each(self, targets: Iterable[str], act: Callable[[str], None]) -> None:
        """Does something to some targets, and gives up those that it fails for."""
        for target in tuple(targets):
            try:
                act(target)
            except OSError as error:
                del self._targets[target]
                if target in self._writers:
                    self._writers.pop(target).discard()
                message = (
                    f"{target[0].upper()}{target[1:]} cannot be written any more: "
                    f"{_reason(error)}. From step {self._last_step} on, the run is not recorded "
                    "there."
                )
                if self._on_write_error == "raise":
                    self.close()
                    raise RecordingError(f"{message} (on_write_error='raise')") from error
                warn(f"{message} Training goes on.")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _discard(writers: dict[str, Any]) -> None:
    while writers:
        writers.popitem()[1].discard()
