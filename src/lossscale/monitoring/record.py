"""The record of a training step, and the line that it is in a file."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from typing import Any, NamedTuple

from lossscale.rules import ScaleRule

_USEFUL_FLOOR = 2.0**-24
"""Below it, a lower minimum is not advised."""


class SkipReason(enum.StrEnum):
    """The reason why a step was skipped.

    Attributes:
        OVERFLOW: The loss is finite and the gradients are not. A lower scale helps.
        FLOOR: The gradients are not finite at `min_scale`, the lowest scale of the rule.
        LOSS: The loss itself is not finite. No scale helps.
        UNKNOWN: The loss was not recorded, so these cannot be told apart.
    """

    OVERFLOW = "overflow"
    FLOOR = "floor"
    LOSS = "loss"
    UNKNOWN = "unknown"


class NonfiniteTensor(NamedTuple):
    """A gradient with elements that are not finite.

    Attributes:
        name: The name of its variable.
        infs: Number of infinite elements.
        nans: Number of elements that are NaN.

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
    """The record of one training step.

    Attributes:
        step: The number of the step, counted from 1; skipped steps count.
        scale: The loss scale of the step.
        skipped: Whether the step was skipped.
        next_scale: The loss scale after the step; None if it was not read.
        loss: The unscaled loss; None if it was not read.
        reason: Why the step was skipped; None if it was applied.
        nonfinite: The gradients with an infinity or a NaN.
        steps_skipped: Number of steps skipped so far, this one included; None if it was not read.

    Examples:
        >>> StepRecord(2, 8.0, False, next_scale=8.0, loss=0.5).to_dict()["loss"]
        0.5
    """

    step: int
    scale: float
    skipped: bool
    next_scale: float | None = None
    loss: float | None = None
    reason: SkipReason | None = None
    nonfinite: tuple[NonfiniteTensor, ...] = ()
    steps_skipped: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as a dictionary of plain Python values.

        Unknown values are None. `nonfinite` is a list of dictionaries with the keys `name`, `infs`
        and `nans`. `loss` is a float and may be infinite or NaN.
        """
        fields: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["reason"] = None if self.reason is None else self.reason.value
        fields["nonfinite"] = [tensor._asdict() for tensor in self.nonfinite]
        return fields

    def to_json(self) -> str:
        """Returns the dictionary as one line of JSON.

        JSON has no infinity and no NaN, so such a loss is the string "inf", "-inf" or "nan".
        """
        fields = self.to_dict()
        if is_broken(self.loss):
            fields["loss"] = str(self.loss)
        return json.dumps(fields, allow_nan=False)


def is_broken(loss: float | None) -> bool:
    """Whether a loss is known, and not finite."""
    return loss is not None and not math.isfinite(loss)


def is_lowest(rule: ScaleRule, scale: float) -> bool:
    """Whether a scale, rounded to float32, is the lowest one of a rule."""
    lowest = rule.lowest_scale
    # Rounded to float32, a lowest scale of 0.1 is a little above 0.1.
    return lowest is not None and scale <= lowest * (1 + 2.0**-20)


def advice_at_floor(scale: float, *, takes_rules: bool) -> str:
    """Returns what to do about steps that are skipped at the minimum scale, by their cause.

    Args:
        scale: The loss scale of the step.
        takes_rules: Whether a rule can be passed, as to all but a gradient scaler.
    """
    rare, lower = "", "min_scale=2.0**-24"
    if takes_rules:
        rare = ", or, if they are rare, use rule=DynamicScale(overflows_before_backoff=2)"
        lower = f"rule=DynamicScale({lower})"
    of_loss = f"If the loss itself is not finite, no scale helps: leave such batches out{rare}."
    of_gradients = f" If gradients are too large for float16, use {lower}."
    return of_loss + (of_gradients if scale > _USEFUL_FLOOR else "")


def skip_reason(rule: ScaleRule, scale: float, loss: float | None) -> SkipReason:
    """Returns the reason of a skip, as far as the loss shows it.

    Examples:
        >>> from lossscale.rules import DynamicScale
        >>> skip_reason(DynamicScale(), 32768.0, loss=0.3)
        <SkipReason.OVERFLOW: 'overflow'>
    """
    if is_broken(loss):
        return SkipReason.LOSS
    if is_lowest(rule, scale):
        return SkipReason.FLOOR
    return SkipReason.UNKNOWN if loss is None else SkipReason.OVERFLOW
