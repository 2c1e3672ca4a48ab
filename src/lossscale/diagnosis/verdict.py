"""The verdict on a measurement: four questions, in this order.

1. Does something overflow in the forward pass? If so, no loss scale can help.
2. Does one gradient need a scale at which another overflows? If so, no single scale works.
3. Is every gradient right without scaling, and far enough from overflow? If so, no loss scale is
   needed.
4. Otherwise a loss scale is needed. Its rule starts below overflow and stays in the range in which
   gradients are right.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from lossscale.diagnosis.gradient_function import TARGETS
from lossscale.diagnosis.measurement import MARGIN, GradientAccuracy, Measurement
from lossscale.rules import DynamicScale

_LARGEST_EXPONENT = 126
_BELOW = 20
"""Bits that a rule may go down if no gradient is too small."""


class Verdict(enum.StrEnum):
    """Whether a loss needs loss scaling.

    Attributes:
        NOT_NEEDED: Every gradient is right without loss scaling, and far from overflow.
        NEEDED: Without loss scaling, float16 loses a part of a gradient, or is near overflow.
        NO_SINGLE_SCALE: At the scale that one gradient needs, another gradient overflows.
        CANNOT_HELP: The forward pass, which is not scaled, overflows in float16.
        UNKNOWN: The loss could not be measured.
    """

    NOT_NEEDED = "not needed"
    NEEDED = "needed"
    NO_SINGLE_SCALE = "no single scale"
    CANNOT_HELP = "cannot help"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The verdict on one loss, with the reason and what to do.

    Attributes:
        verdict: The verdict.
        rule: The rule to use; None if no rule is needed or none helps.
        reason: The reason, as the end of a sentence.
        advice: What to do instead of using a rule; "" with a rule.
    """

    verdict: Verdict
    rule: DynamicScale | None = None
    reason: str = ""
    advice: str = ""


def recommend(found: Measurement) -> Recommendation:
    """Returns the verdict on a loss, and the rule that it needs.

    Args:
        found: The measurement of the loss.

    Examples:
        >>> from lossscale.diagnosis.measurement import GradientAccuracy
        >>> lost = GradientAccuracy("w", 10, 1e-6, {0: 0.9, 8: 0.01, 20: 0.001}, 0.002)
        >>> found = recommend(Measurement((lost,), lowest_exponent=4, highest_exponent=27))
        >>> found.verdict.value, found.rule.initial_scale, found.rule.min_scale
        ('needed', 32768.0, 16.0)
    """
    if found.unknown:
        return Recommendation(Verdict.UNKNOWN, reason=found.unknown)
    if found.overflows_at:
        return _cannot_help(found)
    if found.lowest_exponent > 0 and found.lowest_exponent > found.highest_exponent - 1:
        return _no_single_scale(found)
    is_right = found.worst_error <= found.tolerance
    if is_right and found.highest_exponent >= MARGIN:
        return Recommendation(
            Verdict.NOT_NEEDED,
            reason="without scaling, every gradient is accurate in float16 and far from overflow",
        )
    if found.lowest_exponent > 0:
        middle = (found.lowest_exponent + found.highest_exponent) // 2
        first = max(found.lowest_exponent, min(middle, found.highest_exponent - MARGIN))
        lowest = found.lowest_exponent
    else:
        first = found.highest_exponent - MARGIN
        lowest = first - _BELOW
    reason = (
        f"the gradient of {found.ranked[0].name} is wrong without"
        if not is_right
        else "gradients are near overflow or above it"
    )
    return Recommendation(Verdict.NEEDED, rule=_rule(first, lowest), reason=reason)


def _rule(first: int, lowest: int) -> DynamicScale:
    first, lowest = (
        max(min(exponent, _LARGEST_EXPONENT), -_LARGEST_EXPONENT) for exponent in (first, lowest)
    )
    return DynamicScale(initial_scale=2.0**first, min_scale=2.0**lowest)


def _no_single_scale(found: Measurement) -> Recommendation:
    def last_wrong(each: GradientAccuracy) -> int:
        wrong = [e for e in each.errors if found.tolerance < each.excess_error(e) < math.inf]
        return max(wrong, default=-1)

    small = max(found.ranked, key=last_wrong)
    gap = found.lowest_exponent - found.highest_exponent + 2 * MARGIN
    return Recommendation(
        Verdict.NO_SINGLE_SCALE,
        reason=f"{small.name} needs 2**{found.lowest_exponent}, {found.first_to_overflow} "
        f"overflows above 2**{found.highest_exponent}",
        advice="give each loss an optimizer of its own, and diagnose with a dictionary of losses; "
        f"or raise the part of the loss that {small.name} learns from by 2**{gap} and lower its "
        "learning rate; or train in bfloat16",
    )


def _cannot_help(found: Measurement) -> Recommendation:
    where = found.overflows_at
    reason = f"{where} overflows in float16"
    advice = f"scale down the input of {where}, or compute it in float32; or train in bfloat16"
    if where == TARGETS:
        reason = "the targets are beyond the range of float16, the dtype of the model's output"
        advice = "normalize the targets, or compute the last layer in float32"
    elif where == "the loss":
        reason = "the loss is not finite in float16"
        advice = "cast the model's outputs to float32, and compute the loss from them"
    return Recommendation(Verdict.CANNOT_HELP, reason=reason, advice=advice)
