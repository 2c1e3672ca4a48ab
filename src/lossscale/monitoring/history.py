"""The history of a training run: a file of JSON lines, written as the run goes on, and read.

```
{"lossscale_history": 1, "rule": {...}, "versions": {...}, "started": "2025-01-31T12:00:00+00:00"}
{"step": 1, "scale": 32768.0, "skipped": true, "next_scale": 16384.0, "reason": "overflow", ...}
{"step": 2, "scale": 16384.0, "skipped": false, "loss": 2.31}
```

The first line describes the run, each other line is a `StepRecord`. A run that is resumed and goes
on in the same file writes a first line again; its records take the place of those of the same and
later steps, which the run has taken anew.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import os
import platform
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from lossscale.errors import ArgumentError
from lossscale.monitoring.record import (
    SkipReason,
    StepRecord,
    after,
    is_text,
    json_line,
    parsed,
)
from lossscale.monitoring.skips import SkipCounter, at_lowest, check_order, lowest_scale
from lossscale.rules import RULES, ScaleRule

FORMAT_VERSION = 1
"""What the key "lossscale_history" of the first line says."""

_FORMAT_KEY = "lossscale_history"
_REPORTED_LINES = 1000
# What a step says of some hundred thousand gradients.
_LONGEST_LINE = 2**24
_KERASES = ("keras", "tf_keras")


@dataclasses.dataclass(frozen=True)
class HistoryHeader:
    """What is known about a run as a whole.

    Attributes:
        rule: The rule of the loss scale: its class name and its configuration, JSON-ready.
        versions: Name of a package to its version.
        started: When the run started, in ISO 8601 with a time zone.

    Examples:
        >>> from lossscale import DynamicScale
        >>> header = HistoryHeader.of(DynamicScale(initial_scale=8), {"keras": "3.15.1"})
        >>> header.rule["class_name"], header.versions["keras"]
        ('DynamicScale', '3.15.1')
        >>> header.scale_rule() == DynamicScale(initial_scale=8)
        True
    """

    rule: Mapping[str, Any]
    versions: Mapping[str, str]
    started: str

    @classmethod
    def of(cls, rule: ScaleRule, versions: Mapping[str, str] | None = None) -> HistoryHeader:
        """Returns the header of a run that starts now.

        Args:
            rule: The rule of its loss scale.
            versions: Versions of the packages in use. Those of Python and lossscale are added.
        """
        own = {"python": platform.python_version(), "lossscale": metadata.version("lossscale")}
        return cls(
            rule={"class_name": type(rule).__name__, "config": rule.get_config()},
            versions={**own, **(versions or {})},
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def scale_rule(self) -> ScaleRule | None:
        """Returns the rule, or None if it is not one of this library."""
        if self.rule["class_name"] not in RULES:
            return None
        rule: ScaleRule = RULES[self.rule["class_name"]](**self.rule["config"])
        return rule

    @property
    def has_mean_losses(self) -> bool:
        """Whether losses are those of Keras: the mean over the epoch so far."""
        return any(name in self.versions for name in _KERASES)

    def to_json(self) -> dict[str, Any]:
        """Returns the header as a dictionary of strict JSON."""
        return {_FORMAT_KEY: FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, line: Any) -> HistoryHeader:
        """Returns the header that `to_json` has described.

        Raises:
            ArgumentError: If it is no such dictionary; the message says what is wrong with it.
        """
        number = line.get(_FORMAT_KEY) if isinstance(line, Mapping) else None
        if number is None:
            raise ArgumentError(
                f'a history starts with a JSON object that has "{_FORMAT_KEY}"; this does not'
            )
        if number != FORMAT_VERSION:
            raise ArgumentError(
                f"this is a history of format {number!r}, and only format {FORMAT_VERSION} can be "
                "read: a newer lossscale may read it"
            )
        described = {name: each for name, each in line.items() if name != _FORMAT_KEY}
        rule = described.get("rule")
        if not (
            set(described) == {"rule", "versions", "started"}
            and isinstance(rule, dict)
            and isinstance(rule.get("class_name"), str)
            and isinstance(rule.get("config"), dict)
            and isinstance(described["versions"], dict)
            and isinstance(described["started"], str)
            and is_text(json.dumps(described, ensure_ascii=False))
        ):
            raise ArgumentError(
                "the first line must have `rule`, with `class_name` and `config`, `versions` and "
                f"`started`, as they are written. Received: {described!r}"
            )
        found = cls(**described)
        try:
            found.scale_rule()
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"the rule of the first line cannot be made: {error}") from error
        return found


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
        ArgumentError: If the file exists and `append` is False, if another run writes to it now,
            or if it is no history. Nothing is written then. It is a `ValueError`.
        OSError: If the file cannot be written.

    Examples:
        >>> import tempfile
        >>> from lossscale import DynamicScale
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
        line = json_line(header.to_json())
        name = os.fspath(path)
        self._last: StepRecord | None = None
        try:
            # Not "a", which could not cut a line off.
            flags = os.O_RDWR | os.O_CREAT | (0 if append else os.O_EXCL)
            self._file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        except FileExistsError:
            raise ArgumentError(
                f"{name!r} exists. Give another name, remove it, or pass append=True to go on with "
                "it, as a run that was resumed does."
            ) from None
        try:
            _lock(self._file, name)
            # What is no file, such as a pipe, has no size.
            if os.fstat(self._file.fileno()).st_size:
                _parsed_header(self._file.readline(), name)
                line = self._cut() + line
            self._write(line)
        except BaseException:
            self.discard()
            raise

    def _cut(self) -> str:
        """Cuts off a last line that is not whole; returns the line end that a whole one lacks."""
        line, missing = b"\n", ""
        with os.fdopen(os.dup(self._file.fileno()), "rb") as file:
            file.seek(0)
            for line in file:  # noqa: B007
                pass
            end = file.tell()
        if not line.endswith(b"\n"):
            try:
                parsed(line)
                missing = "\n"
            except ValueError:
                end -= len(line)
        self._file.truncate(end)
        self._file.seek(end)
        return missing

    def _write(self, line: str) -> None:
        left = line.encode("ascii")
        while left:
            left = left[self._file.write(left) :]

    def append(self, record: StepRecord) -> None:
        """Writes one more record.

        Args:
            record: A record of a later step than the one before.

        Raises:
            ArgumentError: If its step is not a later one; nothing is written then. It is a
                `ValueError`.
        """
        if self._last is not None:
            check_order(self._last, record)
        line = json_line(record.to_json())
        self._last = record
        self._write(line)

    def close(self) -> None:
        """Closes the file. Closing it again does nothing."""
        self._file.close()

    def discard(self) -> None:
        """Closes a file that cannot be written."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclasses.dataclass
class TrainingHistory:
    """A run, step by step.

    Args:
        header: What is known about the run as a whole.
        records: What is known about its steps, in the order of the steps. Not every step has to
            have a record.
        truncated: Whether the file ended within a line, which is left out: the run was killed as
            it wrote it.

    Raises:
        ArgumentError: If the steps are not in order. It is a `ValueError`.

    Examples:
        >>> from lossscale import DynamicScale
        >>> history = TrainingHistory(HistoryHeader.of(DynamicScale(initial_scale=4)))
        >>> history.append(StepRecord(1, 4.0, skipped=True, nonfinite=[("dense/kernel", 3, 0)]))
        >>> history.append(StepRecord(2, 2.0, skipped=False))
        >>> history.scales, history.skipped_steps, history.overflow_counts
        ([4.0, 2.0], [1], {'dense/kernel': 1})
    """

    header: HistoryHeader
    records: list[StepRecord] = dataclasses.field(default_factory=list)
    truncated: bool = False

    def __post_init__(self) -> None:
        self.records = list(self.records)
        for earlier, later in zip(self.records, self.records[1:], strict=False):
            check_order(earlier, later)

    def __repr__(self) -> str:
        if not self.records:
            return "<TrainingHistory: no steps>"
        first, last = self.records[0], self.records[-1]
        return (
            f"<TrainingHistory: steps {first.step} to {last.step}, {self.skips.skips} skipped, "
            f"loss scale {first.scale:g} at first and {last.scale:g} at last>"
        )

    def append(self, record: StepRecord) -> None:
        """Adds one more record.

        Raises:
            ArgumentError: If its step is not a later one. It is a `ValueError`.
        """
        if self.records:
            check_order(self.records[-1], record)
        self.records.append(record)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the history to a new file.

        Args:
            path: The file.

        Raises:
            ArgumentError: If it exists. It is a `ValueError`.
            OSError: If it cannot be written.
        """
        with HistoryWriter(path, self.header) as writer:
            for record in self.records:
                writer.append(record)

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        after_bytes: Callable[[int], None] = lambda size: None,
    ) -> TrainingHistory:
        """Reads a history.

        A last line that was cut off is left out, and `truncated` is True then. Of a run that was
        resumed, the steps that it took twice are those of the last time.

        Args:
            path: The file.
            after_bytes: Called now and then with how much of the file was read, in bytes.

        Raises:
            ArgumentError: If it is empty, is no history, or has a line that cannot be read; the
                message has the number of the line. It is a `ValueError`.
            OSError: If the file cannot be read.
        """
        name = os.fspath(path)
        with open(path, "rb") as file:
            first = _line(file, name, 1)
            if not first.strip():
                raise ArgumentError(f"{name}: the file is empty, so it is no history.")
            history = cls(_parsed_header(first, name))
            resumed, size = False, len(first)
            for number, line in enumerate(iter(functools.partial(_line, file, name), b""), start=2):
                try:
                    value = parsed(line)
                    if isinstance(value, dict) and _FORMAT_KEY in value:
                        history.header, resumed = HistoryHeader.from_json(value), True
                        continue
                    record = StepRecord.from_json(value)
                    if resumed:
                        history._drop_from(record.step)
                        resumed = False
                    history.append(record)
                except ValueError as error:
                    # Only a line without an end can be one that was cut off.
                    if not line.endswith(b"\n") and not isinstance(error, ArgumentError):
                        history.truncated = True
                        break
                    raise ArgumentError(f"{name}, line {number}: {error}") from error
                # Numbers that no float holds, and whatever else damage makes of a line.
                except Exception as error:
                    raise ArgumentError(f"{name}, line {number}: damaged: {error}") from error
                size += len(line)
                if number % _REPORTED_LINES == 0:
                    after_bytes(size)
        return history

    def _drop_from(self, step: int) -> None:
        while self.records and self.records[-1].step >= step:
            self.records.pop()

    @property
    def steps(self) -> list[int]:
        """The number of each recorded step, counted from 1."""
        return [record.step for record in self.records]

    @property
    def scales(self) -> list[float]:
        """The loss scale that each recorded step was taken with, dimensionless."""
        return [record.scale for record in self.records]

    @property
    def losses(self) -> list[float | None]:
        """The loss of each recorded step; None where it was not read."""
        return [record.loss for record in self.records]

    @property
    def skipped_steps(self) -> list[int]:
        """The numbers of the recorded steps that were skipped."""
        return [record.step for record in self.records if record.skipped]

    @property
    def steps_at_floor(self) -> list[int] | None:
        """The numbers of the recorded steps at the lowest scale of the rule.

        None if the rule is not one of this library, so that its lowest scale is not known.
        """
        rule = self.header.scale_rule()
        if rule is None:
            return None
        lowest = lowest_scale(rule)
        return [record.step for record in self.records if at_lowest(record.scale, lowest)]

    @property
    def overflow_counts(self) -> dict[str, int]:
        """Name of a variable to the recorded steps in which its gradient was not finite."""
        names = (tensor.name for record in self.records for tensor in record.nonfinite)
        return dict(collections.Counter(names))

    @property
    def skips(self) -> SkipCounter:
        """The skips counted: `steps`, `skips`, `consecutive` and `longest`.

        Skips between two records count too, where `steps_skipped` was recorded.
        """
        counter = SkipCounter()
        for record in self.records:
            counter.observe(record)
        return counter

    @property
    def skip_rate(self) -> float:
        """The share of skipped steps, from 0 to 1; 0 without records."""
        counter = self.skips
        return counter.skips / max(counter.steps, 1)

    def summary(self) -> dict[str, Any]:
        """Returns what can be said about the whole run, JSON-ready.

        Raises:
            ArgumentError: If there is no record. It is a `ValueError`.
        """
        if not self.records:
            raise ArgumentError("A history without records has no summary.")
        counter, at_floor = self.skips, self.steps_at_floor
        reasons = collections.Counter(record.reason for record in self.records)
        counts = sorted(self.overflow_counts.items(), key=lambda item: -item[1])
        return {
            "first_step": self.records[0].step,
            "last_step": self.records[-1].step,
            "records": len(self.records),
            "skips": counter.skips,
            "skip_rate": self.skip_rate,
            "longest_run_of_skips": counter.longest,
            "reasons": {str(reason): reasons[reason] for reason in SkipReason if reasons[reason]},
            "first_scale": self.scales[0],
            "last_scale": after(self.records[-1]),
            "lowest_scale": min(self.scales),
            "highest_scale": max(self.scales),
            "recorded_steps_at_floor": None if at_floor is None else len(at_floor),
            "overflow_counts": dict(counts),
            "alarms": [
                {"step": record.step, "kind": kind, "message": message}
                for record in self.records
                for kind, message in record.alarms
            ],
            "truncated": self.truncated,
        }


def _line(file: Any, name: str, number: int | None = None) -> bytes:
    line: bytes = file.readline(_LONGEST_LINE + 1)
    if len(line) > _LONGEST_LINE:
        raise ArgumentError(
            f"{name}{'' if number is None else f', line {number}'}: a line has more than "
            f"{_LONGEST_LINE} bytes, so this is no history."
        )
    return line


def _parsed_header(line: bytes, name: str) -> HistoryHeader:
    try:
        value = parsed(line)
    except ValueError as error:
        raise ArgumentError(
            f"{name}: this is no history of a training run: its first line is no JSON ({error})."
        ) from error
    try:
        return HistoryHeader.from_json(value)
    except Exception as error:
        raise ArgumentError(f"{name}, line 1: {error}") from error


def _lock(file: Any, name: str) -> None:
    try:
        import fcntl
    except ImportError:
        # Windows has no such lock.
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArgumentError(
            f"{name!r} is written by another run now. Give each run a file of its own; of several "
            "processes let one write."
        ) from None
    # Some file systems have no locks.
    except OSError:
        pass
