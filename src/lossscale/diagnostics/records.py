"""What is known about one training step, and how it is written as a line of JSON."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lossscale.checks import checked_above_zero, checked_count, checked_number, checked_truth
from lossscale.diagnostics.json_forms import Conversion, JsonForm
from lossscale.errors import ArgumentError


class SkipReason(enum.StrEnum):
    """Why a step was skipped, by what can be done about it.

    Attributes:
        OVERFLOW: The loss is finite and the gradients are not: it goes away at a lower scale.
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

    Example:
        >>> str(NonfiniteTensor("dense/kernel", infs=3, nans=0))
        'dense/kernel (3 inf)'
    """

    name: str
    infs: int
    nans: int

    def __str__(self) -> str:
        counts = ((self.infs, "inf"), (self.nans, "NaN"))
        return f"{self.name} ({', '.join(f'{n} {what}' for n, what in counts if n)})"


FIDELITY_KEYS = ("lost", "error", "cosine", "nonfinite", "share")
"""Of one variable: the share of its sum of |x| that is lost to zero, the relative error, the
cosine, how many elements are not finite, and its largest element as a share of its layer's."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known about one step.

    Args:
        step: The number of the step, counted from 1; skipped steps count too.
        scale: The loss scale that the step was taken with, dimensionless.
        skipped: Whether the step was skipped.
        next_scale: The loss scale after the step, or None if it was not read.
        loss: The loss, not scaled, in its own unit; None if it was not read. Infinities and NaN
            are allowed.
        reason: Why the step was skipped. For a skipped step None stands for `UNKNOWN`.
        nonfinite: The gradients with an infinity or a NaN in this step, as `NonfiniteTensor`s
            or (name, infs, nans) tuples.
        steps_skipped: How many steps the optimizer has skipped so far, this one included; None
            if it was not read. With it, skips between two records are not lost where only some
            steps are recorded.
        histograms: Name of a variable to the JSON-ready dictionary that describes its
            gradients, as `GradientHistogram.to_dict` returns it. Nothing here looks into it.
        fidelity: Name of a variable to what float16 made of its gradient at `next_scale`, with the
            keys of `FIDELITY_KEYS`; empty if it was not measured after this step.

    Raises:
        ArgumentError: If a value cannot be used; the message names it. It is a `ValueError`.

    Example:
        >>> record = StepRecord(7, 32768.0, True, loss=float("nan"), reason="loss")
        >>> record.to_json()
        {'step': 7, 'scale': 32768.0, 'skipped': True, 'loss': 'nan', 'reason': 'loss'}
        >>> StepRecord.from_json(record.to_json()).reason
        <SkipReason.LOSS: 'loss'>
    """

    step: int
    scale: float
    skipped: bool
    next_scale: float | None = None
    loss: float | None = None
    reason: SkipReason | None = None
    nonfinite: tuple[NonfiniteTensor, ...] = ()
    steps_skipped: int | None = None
    histograms: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    fidelity: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        step = checked_count("step", self.step)
        skipped = checked_truth("skipped", self.skipped)
        checked: dict[str, Any] = {
            "step": step,
            "scale": checked_above_zero("scale", self.scale),
            "skipped": skipped,
            "reason": _reason(self.reason, skipped),
            "nonfinite": _nonfinite(self.nonfinite),
        }
        if self.next_scale is not None:
            checked["next_scale"] = checked_above_zero("next_scale", self.next_scale)
        if self.loss is not None:
            checked["loss"] = checked_number("loss", self.loss)
        if self.steps_skipped is not None:
            checked["steps_skipped"] = checked_count(
                "steps_skipped", self.steps_skipped, lowest=int(skipped)
            )
        if not isinstance(self.histograms, Mapping) or not all(
            isinstance(name, str) and isinstance(described, Mapping)
            for name, described in self.histograms.items()
        ):
            raise ArgumentError(
                "`histograms` must be a dictionary from the name of a variable to a JSON-ready "
                f"dictionary. Received: {self.histograms!r}."
            )
        if not isinstance(self.fidelity, Mapping) or not all(
            isinstance(found, Mapping) and set(found) == set(FIDELITY_KEYS)
            for found in self.fidelity.values()
        ):
            raise ArgumentError(
                "`fidelity` must be a dictionary from the name of a variable to a dictionary with "
                f"the keys {', '.join(FIDELITY_KEYS)}. Received: {self.fidelity!r}."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def to_json(self) -> dict[str, Any]:
        """Returns the record as a dictionary of strict JSON, without what is not known.

        Strict JSON has no infinities and no NaN, so a loss may be "inf", "-inf" or "nan".
        """
        return _FORM.write(self)

    @classmethod
    def from_json(cls, line: Any) -> StepRecord:
        """Returns the record that `to_json` has described.

        Raises:
            ArgumentError: If it is no such dictionary; the message says what is wrong with it.
        """
        return _FORM.read(line)


def _read_loss(found: Any) -> Any:
    if not isinstance(found, str):
        return found
    if found not in _NOT_FINITE:
        raise ArgumentError(f"`loss` must be a number, 'inf', '-inf' or 'nan', not {found!r}")
    return float(found)


def _read_nonfinite(found: Any) -> list[NonfiniteTensor]:
    try:
        return [NonfiniteTensor(**tensor) for tensor in found]
    except TypeError:
        raise ArgumentError(
            f"`nonfinite` must be a list of objects with `name`, `infs` and `nans`, not {found!r}"
        ) from None


_NOT_FINITE = ("inf", "-inf", "nan")
_FORM = JsonForm(
    cls=StepRecord,
    what="a step",
    subject="a step",
    conversions={
        "loss": Conversion(lambda loss: loss if math.isfinite(loss) else str(loss), _read_loss),
        "reason": Conversion(str, lambda found: found),
        "nonfinite": Conversion(
            lambda tensors: [tensor._asdict() for tensor in tensors], _read_nonfinite
        ),
        "histograms": Conversion(
            lambda found: {name: dict(value) for name, value in found.items()},
            lambda found: found,
        ),
        "fidelity": Conversion(
            lambda found: {name: dict(value) for name, value in found.items()},
            lambda found: found,
        ),
    },
    leaves_out=True,
)


def _reason(reason: Any, skipped: bool) -> SkipReason | None:
    if reason is None:
        return SkipReason.UNKNOWN if skipped else None
    if not skipped:
        raise ArgumentError(
            f"`reason` is for a step that was skipped. Received: skipped=False, reason={reason!r}."
        )
    try:
        return SkipReason(reason)
    except ValueError:
        raise ArgumentError(
            f"`reason` must be one of {', '.join(SkipReason)}. Received: reason={reason!r}."
        ) from None


def _nonfinite(tensors: Iterable[Any]) -> tuple[NonfiniteTensor, ...]:
    try:
        named = [NonfiniteTensor(*tensor) for tensor in tensors]
    except TypeError:
        named = [NonfiniteTensor("", 0, 0)]
    for tensor in named:
        if not isinstance(tensor.name, str) or not tensor.name:
            raise ArgumentError(
                "`nonfinite` must be a list of (name, infs, nans). "
                f"Received: nonfinite={tensors!r}."
            )
    return tuple(
        NonfiniteTensor(
            name, checked_count("infs", infs, lowest=0), checked_count("nans", nans, lowest=0)
        )
        for name, infs, nans in named
    )
