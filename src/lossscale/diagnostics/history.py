"""The history of a training run: a file of JSON lines, and what it says.

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
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from lossscale.diagnostics.history_header import HistoryHeader, parsed_header
from lossscale.diagnostics.history_writer import HistoryWriter
from lossscale.diagnostics.json_forms import parsed
from lossscale.diagnostics.records import SkipReason, StepRecord
from lossscale.diagnostics.skips import SkipCounter, at_lowest, check_order, lowest_scale
from lossscale.errors import ArgumentError

_REPORTED_LINES = 1000


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

    Example:
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
            first = file.readline()
            if not first.strip():
                raise ArgumentError(f"{name}: the file is empty, so it is no history.")
            history = cls(parsed_header(first, name))
            resumed, size = False, len(first)
            for number, line in enumerate(file, start=2):
                try:
                    value = parsed(line)
                    if isinstance(value, dict) and "lossscale_history" in value:
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
        return dict(
            collections.Counter(
                tensor.name for record in self.records for tensor in record.nonfinite
            )
        )

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
        scales = self.scales
        last = self.records[-1]
        return {
            "first_step": self.records[0].step,
            "last_step": last.step,
            "records": len(self.records),
            "skips": counter.skips,
            "skip_rate": self.skip_rate,
            "longest_run_of_skips": counter.longest,
            "reasons": {str(reason): reasons[reason] for reason in SkipReason if reasons[reason]},
            "first_scale": scales[0],
            "last_scale": scales[-1] if last.next_scale is None else last.next_scale,
            "lowest_scale": min(scales),
            "highest_scale": max(scales),
            "recorded_steps_at_floor": None if at_floor is None else len(at_floor),
            "overflow_counts": dict(
                sorted(self.overflow_counts.items(), key=lambda item: -item[1])
            ),
            "truncated": self.truncated,
        }
