"""The verdict on a measurement: four questions, in this order.

1. Does something overflow in the forward pass? Then no loss scale can help.
2. Does one gradient need a scale at which another overflows? Then no single one serves.
3. Is every gradient right without scaling, and far enough from overflow? Then none is needed.
4. Otherwise one is needed, and its rule starts below overflow and stays where gradients are right.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from lossscale.diagnosis.measurement import MARGIN, TARGETS, Gradient, Measurement
from lossscale.rules import DynamicScale

_LARGEST_EXPONENT = 126
_BELOW = 20
"""How many bits a rule may go down where no gradient is known to be too small."""


class Kind(enum.StrEnum):
    """Whether a loss needs loss scaling.

    Attributes:
        NOT_NEEDED: Float16 loses nothing that a loss scale would keep.
        NEEDED: Without loss scaling float16 loses a part of a gradient, or is near to overflow.
        NO_SINGLE_SCALE: The scale that one gradient needs makes another overflow.
        CANNOT_HELP: The forward pass, which is not scaled, overflows in float16.
        UNKNOWN: It could not be measured.
    """

    NOT_NEEDED = "not needed"
    NEEDED = "needed"
    NO_SINGLE_SCALE = "no single scale"
    CANNOT_HELP = "cannot help"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on one loss, with the reason and what to do.

    Attributes:
        kind: The verdict.
        rule: The rule to use; None if none is needed or none helps.
        reason: Why, as the end of a sentence.
        advice: What to do in place of a rule; "" with one.
    """

    kind: Kind
    rule: DynamicScale | None = None
    reason: str = ""
    advice: str = ""


def judge(found: Measurement) -> Verdict:
    """Returns the verdict on a loss.

    Args:
        found: The measurement of the loss.

    Examples:
        >>> from lossscale.diagnosis.measurement import Gradient
        >>> lost = Gradient("w", 10, 1e-6, {0: 0.9, 8: 0.01, 20: 0.001}, 0.002)
        >>> verdict = judge(Measurement((lost,), bottom=4, top=27))
        >>> verdict.kind.value, verdict.rule.initial_scale, verdict.rule.min_scale
        ('needed', 32768.0, 16.0)
    """
    if found.unknown:
        return Verdict(Kind.UNKNOWN, reason=found.unknown)
    if found.ends_at:
        return _cannot_help(found)
    if found.bottom > 0 and found.bottom > found.top - 1:
        return _no_single_scale(found)
    is_right = found.wrong <= found.tolerance
    if is_right and found.top >= MARGIN:
        return Verdict(
            Kind.NOT_NEEDED,
            reason="every gradient is right in float16 as it is, and far from overflow",
        )
    if found.bottom > 0:
        middle = (found.bottom + found.top) // 2
        first = max(found.bottom, min(middle, found.top - MARGIN))
        lowest = found.bottom
    else:
        first = found.top - MARGIN
        lowest = first - _BELOW
    reason = (
        f"the gradient of {found.voting[0].name} is wrong without"
        if not is_right
        else "gradients are near to overflow, or beyond"
    )
    return Verdict(Kind.NEEDED, rule=_rule(first, lowest), reason=reason)


def _rule(first: int, lowest: int) -> DynamicScale:
    first, lowest = (
        max(min(exponent, _LARGEST_EXPONENT), -_LARGEST_EXPONENT) for exponent in (first, lowest)
    )
    return DynamicScale(initial_scale=2.0**first, min_scale=2.0**lowest)


def _no_single_scale(found: Measurement) -> Verdict:
    def last_wrong(each: Gradient) -> int:
        wrong = [e for e in each.errors if found.tolerance < each.wrong_at(e) < math.inf]
        return max(wrong, default=-1)

    small = max(found.voting, key=last_wrong)
    gap = found.bottom - found.top + 2 * MARGIN
    return Verdict(
        Kind.NO_SINGLE_SCALE,
        reason=f"{small.name} needs 2**{found.bottom}, {found.first_to_overflow} overflows above "
        f"2**{found.top}",
        advice="give each loss an optimizer of its own, and diagnose with a dictionary of losses; "
        f"or raise the part of the loss that {small.name} learns from by 2**{gap} and lower its "
        "learning rate; or train in bfloat16",
    )


def _cannot_help(found: Measurement) -> Verdict:
    reason, advice = (
        f"{found.ends_at} overflows in float16",
        f"scale down the input of {found.ends_at}, or compute it in float32; or train in bfloat16",
    )
    if found.ends_at == TARGETS:
        reason = "the targets are beyond the range of float16, in which the model's output is"
        advice = "normalize the targets, or compute the last layer in float32"
    elif found.ends_at == "the loss":
        reason = "the loss is not finite in float16"
        advice = "cast the model's outputs to float32, and compute the loss of these"
    return Verdict(Kind.CANNOT_HELP, reason=reason, advice=advice)
