"""Writing a history while the run goes on."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import Any, Literal, TextIO

from lossscale.diagnostics.history_header import HistoryHeader, parsed_header
from lossscale.diagnostics.json_forms import json_text, parsed
from lossscale.diagnostics.records import StepRecord
from lossscale.diagnostics.skips import check_order
from lossscale.errors import ArgumentError


def _line(value: dict[str, Any]) -> str:
    return json_text(value, separators=(",", ":")) + "\n"


class HistoryWriter:
    """Writes a history line by line, so that a run that is killed leaves what it knew.

    Each line is handed to the operating system at once, and nothing is kept in memory. Closed by
    `close`, or at the end of a `with` block.

    Args:
        path: The file. Its folder must exist.
        header: What is known about the run.
        append: Whether to go on with a file that exists, for a run that was resumed. A last line
            that was cut off is removed from it. False makes a new file, and leaves one that
            exists alone.

    Raises:
        ArgumentError: If the file exists and `append` is False, or if it is no history. Nothing
            is written then. It is a `ValueError`.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> from lossscale import DynamicScale
        >>> from lossscale.diagnostics import TrainingHistory
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = folder.name + "/run.jsonl"
        >>> with HistoryWriter(path, HistoryHeader.of(DynamicScale())) as writer:
        ...     writer.append(StepRecord(1, 32768.0, skipped=True, next_scale=16384.0))
        ...     writer.append(StepRecord(2, 16384.0, skipped=False, loss=0.5))
        >>> TrainingHistory.read(path).skip_rate
        0.5
        >>> folder.cleanup()
    """

    def __init__(
        self, path: str | os.PathLike[str], header: HistoryHeader, *, append: bool = False
    ) -> None:
        line = _line(header.to_json())
        self._last: StepRecord | None = None
        if append and os.path.exists(path) and os.path.getsize(path):
            whole, unended = _whole_lines(path)
            self._file: TextIO = open(path, "r+", encoding="ascii", newline="\n")  # noqa: SIM115
            self._file.truncate(whole)
            self._file.seek(whole)
            line = "\n" * unended + line
        else:
            try:
                mode: Literal["w", "x"] = "w" if append else "x"
                self._file = open(path, mode, encoding="ascii", newline="\n")  # noqa: SIM115
            except FileExistsError:
                raise ArgumentError(
                    f"{os.fspath(path)!r} exists. Give another name, remove it, or pass "
                    "append=True to go on with it, as a run that was resumed does."
                ) from None
        try:
            self._write(line)
        except OSError:
            self.discard()
            raise

    def _write(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()

    def append(self, record: StepRecord) -> None:
        """Writes one more record.

        Args:
            record: A record of a later step than the one before.

        Raises:
            ArgumentError: If its step is not a later one, or `histograms` is no JSON; nothing is
                written then. It is a `ValueError`.
        """
        if self._last is not None:
            check_order(self._last, record)
        line = _line(record.to_json())
        self._last = record
        self._write(line)

    def close(self) -> None:
        """Closes the file. Closing it again does nothing."""
        self._file.close()

    def discard(self) -> None:
        """Closes a file that cannot be written, and drops what could not be written to it."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _whole_lines(path: str | os.PathLike[str]) -> tuple[int, bool]:
    """Returns how many bytes of a history are whole lines, and if only a line end is missing."""
    with open(path, "rb") as file:
        line = file.readline()
        parsed_header(line, os.fspath(path))
        for line in file:  # noqa: B007
            pass
        end = file.tell()
    if line.endswith(b"\n"):
        return end, False
    try:
        parsed(line)
    except ValueError:
        return end - len(line), False
    return end, True
