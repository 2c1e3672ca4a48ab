"""What is known about one training step, and how it is written as a line of JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from lossscale.checks import checked_above_zero, checked_count, checked_number, checked_truth
from lossscale.errors import ArgumentError

_NOT_FINITE = ("inf", "-inf", "nan")
_MOST_STEPS = 2**63 - 1
_EARLIER = ("histograms", "fidelity")
"""What earlier versions wrote besides."""


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

    Args:
        step: The number of the step, counted from 1, skipped steps included.
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
        wrong: The name of the gradient that float16 gets wrong by most at `next_scale`, and by how
            much, as a share of it; None if it was not measured after this step.
        alarms: The (kind, message) of each alarm that this step gave.

    Raises:
        ArgumentError: If a value cannot be used; the message names it. It is a `ValueError`.

    Examples:
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
    wrong: tuple[str, float] | None = None
    alarms: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        step = checked_count("step", self.step)
        if step > _MOST_STEPS:
            raise ArgumentError("`step` must be an integer below 2**63.")
        skipped = checked_truth("skipped", self.skipped)
        checked: dict[str, Any] = {
            "step": step,
            "scale": checked_above_zero("scale", self.scale),
            "skipped": skipped,
            "reason": _reason(self.reason, skipped),
            "nonfinite": _nonfinite(self.nonfinite),
            "alarms": tuple(_texts("alarms", alarm, 2) for alarm in self.alarms),
        }
        if self.next_scale is not None:
            checked["next_scale"] = checked_above_zero("next_scale", self.next_scale)
        if self.loss is not None:
            checked["loss"] = checked_number("loss", self.loss)
        if self.steps_skipped is not None:
            checked["steps_skipped"] = checked_count(
                "steps_skipped", self.steps_skipped, lowest=int(skipped)
            )
        if self.wrong is not None:
            (name,) = _texts("wrong", self.wrong[:1], 1)
            checked["wrong"] = name, checked_number("wrong", *self.wrong[1:])
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def to_json(self) -> dict[str, Any]:
        """Returns the record as a dictionary of strict JSON, without what is not known.

        Strict JSON has no infinities and no NaN, so a loss may be "inf", "-inf" or "nan".
        """
        written = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) not in (None, ())
        }
        if self.loss is not None:
            written["loss"] = _plain(self.loss)
        if self.reason is not None:
            written["reason"] = str(self.reason)
        if self.nonfinite:
            written["nonfinite"] = [tensor._asdict() for tensor in self.nonfinite]
        if self.wrong is not None:
            written["wrong"] = [self.wrong[0], _plain(self.wrong[1])]
        if self.alarms:
            written["alarms"] = [list(alarm) for alarm in self.alarms]
        return written

    @classmethod
    def from_json(cls, line: Any) -> StepRecord:
        """Returns the record that `to_json` has described, of this version or an earlier one.

        Raises:
            ArgumentError: If it is no such dictionary; the message says what is wrong with it.
        """
        if not isinstance(line, Mapping):
            raise ArgumentError(f"a step must be a JSON object, not {line!r}")
        known = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in known[:3] if name not in line]
        unknown = [name for name in line if name not in (*known, *_EARLIER)]
        for names, why in ((missing, "missing"), (unknown, "not known")):
            if names:
                raise ArgumentError(
                    f"a step must have `step`, `scale` and `skipped`, and may have "
                    f"{', '.join(known[3:])}. Received the keys {list(line)}: {names} {why}"
                )
        found = {name: line[name] for name in known if name in line}
        try:
            if "loss" in found:
                found["loss"] = _number(found["loss"])
            if "nonfinite" in found:
                tensors = found["nonfinite"]
                if not isinstance(tensors, list) or any(
                    set(tensor) != set(NonfiniteTensor._fields) for tensor in tensors
                ):
                    raise ArgumentError(
                        "`nonfinite` must be a list of objects with `name`, `infs` and `nans`, not "
                        f"{tensors!r}"
                    )
                found["nonfinite"] = [NonfiniteTensor(**tensor) for tensor in tensors]
            if "wrong" in found:
                name, error = found["wrong"]
                found["wrong"] = name, _number(error)
            elif line.get("fidelity"):
                found["wrong"] = max(
                    ((name, float(each["error"])) for name, each in line["fidelity"].items()),
                    key=lambda each: each[1],
                )
            return cls(**found)
        except ArgumentError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"a step must be as it was written: {error}") from error


def after(record: StepRecord) -> float:
    """Returns the loss scale after a step, or that of the step if it was not read."""
    return record.scale if record.next_scale is None else record.next_scale


def power_of_two(value: float) -> str:
    """Writes a number as a power of two, if it is one, and not one that is read at a glance.

    Args:
        value: A number above 0.

    Examples:
        >>> power_of_two(1024.0), power_of_two(1000.0), power_of_two(0.5)
        ('2**10', '1000', '0.5')
    """
    mantissa, exponent = math.frexp(value)
    is_far = mantissa == 0.5 and abs(exponent - 1) > 3
    return f"2**{exponent - 1}" if is_far else f"{value:g}"


def json_line(value: Any) -> str:
    """Returns strict JSON on one line of ASCII, with its end.

    Raises:
        ArgumentError: If there is something else in it, such as an infinity.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"This cannot be written as strict JSON: {error}.") from error


def parsed(text: bytes) -> Any:
    """Returns what strict JSON in UTF-8 says.

    Raises:
        ArgumentError: If it has numbers that are no JSON, or brackets nested too deep.
        ValueError: If it is no JSON, such as the first half of some.
    """

    def refuse(constant: str) -> NoReturn:
        raise ArgumentError(f"{constant} is no JSON")

    try:
        return json.loads(text.decode("utf-8"), parse_constant=refuse)
    except RecursionError as error:
        raise ArgumentError("the brackets are nested too deep") from error


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _number(found: Any) -> Any:
    if not isinstance(found, str):
        return found
    if found not in _NOT_FINITE:
        raise ArgumentError(f"`loss` must be a number, 'inf', '-inf' or 'nan', not {found!r}")
    return float(found)


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


def _texts(argument: str, texts: Any, count: int) -> tuple[str, ...]:
    found = tuple(texts) if isinstance(texts, (tuple, list)) else ()
    if len(found) != count or not all(isinstance(t, str) and t and is_text(t) for t in found):
        raise ArgumentError(f"`{argument}` must name what it is about. Received: {texts!r}.")
    return found


def is_text(text: str) -> bool:
    """Whether a text can be written: half of a character, which JSON can hold, cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _nonfinite(tensors: Any) -> tuple[NonfiniteTensor, ...]:
    found = []
    for tensor in tensors if isinstance(tensors, (tuple, list)) else [None]:
        if not isinstance(tensor, (tuple, list)) or len(tensor) != 3:
            raise ArgumentError(
                "`nonfinite` must be a list of (name, infs, nans). "
                f"Received: nonfinite={tensors!r}."
            )
        (name,) = _texts("nonfinite", tensor[:1], 1)
        counts = zip(("infs", "nans"), tensor[1:], strict=True)
        found.append(NonfiniteTensor(name, *(checked_count(*each, lowest=0) for each in counts)))
    return tuple(found)
