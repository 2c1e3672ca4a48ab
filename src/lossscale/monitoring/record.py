"""What is known about one training step, and how it is written as a line of JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from typing import NamedTuple

from lossscale.errors import ArgumentError
from lossscale.rules import ScaleRule


class SkipReason(enum.StrEnum):
    """Why a step was skipped, by what can be done about it.

    Attributes:
        OVERFLOW: The loss is finite and the gradients are not: a lower scale helps.
        FLOOR: The gradients are not finite at the lowest scale of the rule.
        LOSS: The loss itself is not finite. No scale can help.
        UNKNOWN: The loss was not recorded, so nothing tells these apart.
    """

    OVERFLOW = "overflow"
    FLOOR = "floor"
    LOSS = "loss"
    UNKNOWN = "unknown"


class NonfiniteTensor(NamedTuple):
    """A gradient with elements that are not finite.

    Attributes:
        name: The name of its variable.
        infs: How many elements are infinite.
        nans: How many are not numbers.

    Examples:
        >>> str(NonfiniteTensor("dense/kernel", infs=3, nans=0))
        'dense/kernel (3 inf)'
    """

    name: str
    infs: int
    nans: int

    def __str__(self) -> str:
        counts = ((self.infs, "inf"), (self.nans, "NaN"))
        return f"{self.name} ({', '.join(f'{n} {what}' for n, what in counts if n)})"


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known about one training step.

    Attributes:
        step: The number of the step, counted from 1, skipped steps included.
        scale: The loss scale that the step was taken with, dimensionless.
        skipped: Whether the step was skipped.
        next_scale: The loss scale after the step, or None if it was not read.
        loss: The loss, not scaled, in its own unit; None if it was not read.
        reason: Why the step was skipped, or None.
        nonfinite: The gradients with an infinity or a NaN in this step.
        steps_skipped: How many steps the optimizer has skipped so far, this one included.
    """

    step: int
    scale: float
    skipped: bool
    next_scale: float | None = None
    loss: float | None = None
    reason: SkipReason | None = None
    nonfinite: tuple[NonfiniteTensor, ...] = ()
    steps_skipped: int | None = None

    def to_json(self) -> str:
        """Returns the record as a line of JSON, without what is not known."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({name: v for name, v in fields.items() if v not in (None, ())})


def read_records(path: str | os.PathLike[str]) -> list[StepRecord]:
    """Returns the records that a monitor has written, as `pandas.read_json(lines=True)` does.

    Args:
        path: The file. A last line that was cut off is left out. Of a run that went back to a
            checkpoint, the steps that it took twice are those of the last time.

    Raises:
        ArgumentError: If a line is no record. It is a `ValueError`.
        OSError: If the file cannot be read.
    """
    records: list[StepRecord] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            try:
                fields = json.loads(line)
                fields["nonfinite"] = tuple(
                    NonfiniteTensor(*each) for each in fields.get("nonfinite", ())
                )
                if "reason" in fields:
                    fields["reason"] = SkipReason(fields["reason"])
                record = StepRecord(**fields)
                while records and records[-1].step >= record.step:
                    records.pop()
                records.append(record)
            except (AttributeError, TypeError, ValueError) as error:
                raise ArgumentError(f"{os.fspath(path)}, line {number}: {error}.") from error
    return records


def at_lowest(rule: ScaleRule, scale: float) -> bool:
    """Whether a scale, as float32 had it, is the lowest one of a rule."""
    lowest = rule.lowest_scale
    # Rounded to float32, a lowest scale of 0.1 is a little above 0.1.
    return lowest is not None and scale <= lowest * (1 + 2.0**-20)


def skip_reason(rule: ScaleRule, scale: float, loss: float | None) -> SkipReason:
    """Returns why a step was skipped, as far as the loss tells.

    Examples:
        >>> from lossscale.rules import DynamicScale
        >>> skip_reason(DynamicScale(), 32768.0, loss=0.3)
        <SkipReason.OVERFLOW: 'overflow'>
    """
    if loss is not None and not math.isfinite(loss):
        return SkipReason.LOSS
    if at_lowest(rule, scale):
        return SkipReason.FLOOR
    return SkipReason.UNKNOWN if loss is None else SkipReason.OVERFLOW
