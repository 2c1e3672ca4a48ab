"""The verdict on a measurement, and the report. Four questions, in this order:

1. Is the forward pass not finite, or a gradient at any scale? If so, no loss scale can help.
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
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from lossscale.diagnosis.measurement import (
    MARGIN,
    TARGETS,
    TOLERANCE,
    GradientAccuracy,
    Measurement,
)
from lossscale.explain.text import Cause
from lossscale.rules import DynamicScale

_LARGEST_EXPONENT = 126
_BELOW = 20
"""Bits that a rule may go down if no gradient is too small."""
_WIDTH = 88


_OF_FLOAT16 = (Cause.FORWARD_OVERFLOW, Cause.BACKWARD_OVERFLOW, Cause.SINGULAR)
"""Causes that a dtype with a larger range may remove."""


class Verdict(enum.StrEnum):
    """Whether a loss needs loss scaling.

    Attributes:
        NOT_NEEDED: Every gradient is right without loss scaling, and far from overflow.
        NEEDED: Without loss scaling, float16 loses a part of a gradient, or is near overflow.
        NO_SINGLE_SCALE: At the scale that one gradient needs, another gradient overflows.
        CANNOT_HELP: In float16, the forward pass is not finite, which is not scaled, or a gradient
            is not at any scale.
        UNKNOWN: The loss could not be measured.
    """

    NOT_NEEDED = "not needed"
    NEEDED = "needed"
    NO_SINGLE_SCALE = "no single scale"
    CANNOT_HELP = "cannot help"
    UNKNOWN = "unknown"


class Recommendation(NamedTuple):
    """A verdict, the rule to use if there is one, the reason, and what to do instead of a rule."""

    verdict: Verdict
    rule: DynamicScale | None
    reason: str
    advice: str = ""


def recommend(found: Measurement) -> Recommendation:
    """Returns the verdict on a loss, and the rule that it needs.

    Examples:
        >>> from lossscale.diagnosis.measurement import GradientAccuracy
        >>> lost = GradientAccuracy("w", 1e-6, {0: 0.9, 8: 0.01, 20: 0.001})
        >>> found = recommend(Measurement((lost,), lowest_exponent=4, highest_exponent=27))
        >>> found.verdict.value, found.rule.initial_scale, found.rule.min_scale
        ('needed', 32768.0, 16.0)
    """
    lowest, highest = found.lowest_exponent, found.highest_exponent
    if found.unknown:
        advice = "" if found.explanation is None else found.explanation.advice
        return Recommendation(Verdict.UNKNOWN, None, found.unknown, advice)
    if found.overflows_at:
        return _cannot_help(found)
    if lowest > 0 and lowest > highest - 1:
        return _no_single_scale(found)
    is_right = found.worst_error <= TOLERANCE
    if is_right and highest >= MARGIN:
        reason = f"without scaling, {_accurate(found)} in float16 and far from overflow"
        return Recommendation(Verdict.NOT_NEEDED, None, reason)
    first = highest - MARGIN
    if lowest > 0:
        first = max(lowest, min((lowest + highest) // 2, first))
    scales = [
        2.0 ** max(min(exponent, _LARGEST_EXPONENT), -_LARGEST_EXPONENT)
        for exponent in (first, lowest if lowest > 0 else first - _BELOW)
    ]
    reason = "gradients are near overflow or above it"
    if not is_right:
        reason = f"the gradient of {found.ranked[0].name} is wrong without"
    return Recommendation(Verdict.NEEDED, DynamicScale(scales[0], min_scale=scales[1]), reason)


def _no_single_scale(found: Measurement) -> Recommendation:
    def last_wrong(each: GradientAccuracy) -> int:
        wrong = [e for e in each.errors if TOLERANCE < each.excess_error(e) < math.inf]
        return max(wrong, default=-1)

    small = max(found.ranked, key=last_wrong)
    gap = found.lowest_exponent - found.highest_exponent + 2 * MARGIN
    return Recommendation(
        Verdict.NO_SINGLE_SCALE,
        None,
        f"{small.name} needs 2**{found.lowest_exponent}, {_first_to_overflow(found)} overflows "
        f"above 2**{found.highest_exponent}",
        "give each loss an optimizer of its own, and diagnose them one by one; or raise the part "
        f"of the loss that {small.name} learns from by 2**{gap} and lower its learning rate; or "
        "train in bfloat16",
    )


def _cannot_help(found: Measurement) -> Recommendation:
    where, why = found.overflows_at, found.explanation
    if why is not None:
        advice = why.advice
        if why.cause in _OF_FLOAT16 and why.in_float16:
            advice += "; or train in bfloat16"
        return Recommendation(Verdict.CANNOT_HELP, None, why.reason, advice)
    reason = "the loss is not finite in float16"
    advice = "cast the model's outputs to float32, and compute the loss from them"
    if where == TARGETS:
        reason = "the targets are beyond the range of float16, the dtype of the model's output"
        advice = "normalize the targets, or compute the last layer in float32"
    elif where != "the loss":
        reason = f"{where} is not finite in float16 at any loss scale"
        advice = "compute that part of the model in float32; or train in bfloat16"
    return Recommendation(Verdict.CANNOT_HELP, None, reason, advice)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a diagnosis. Print it, or read `verdict` and `rule`.

    Attributes:
        model: The name of what was diagnosed.
        setting: The framework, device and format.
        measurement: The measurement.
    """

    model: str
    setting: str
    measurement: Measurement

    @property
    def verdict(self) -> Verdict:
        """One of "not needed", "needed", "no single scale", "cannot help" and "unknown"."""
        return recommend(self.measurement).verdict

    @property
    def rule(self) -> DynamicScale | None:
        """The rule to use; None if no rule is needed or none helps."""
        return recommend(self.measurement).rule

    def __str__(self) -> str:
        lines = [_wrapped(self._headline(), 4)]
        lines += [_wrapped(f"  {title:<11} {text}", 14) for title, text in self._details()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Report: {self._headline()}>"

    def _headline(self) -> str:
        verdict, rule, reason, _ = recommend(self.measurement)
        if rule is not None:
            return f"{self.model}: loss scaling is needed. rule = {line_to_copy(rule)}"
        return f"{self.model}: {_TITLES[verdict]}: {reason}."

    def _details(self) -> Iterator[tuple[str, str]]:
        """Yields the lines below the headline: a title and a text each."""
        found, advised = self.measurement, recommend(self.measurement)
        is_measured = not (found.unknown or found.overflows_at)
        if is_measured:
            yield from _of_gradients(found)
        if advised.advice:
            yield "do", advised.advice
        if is_measured:
            yield from _left_out(found)
        if found.reference:
            yield (
                "reference",
                "the model casts to float16 itself, so the float32 gradients were computed at a "
                f"loss scale of 2**{found.reference}",
            )
        yield (
            "measured",
            f"{found.batches} {'batch' if found.batches == 1 else 'batches'}, {found.passes} "
            f"{'pass' if found.passes == 1 else 'passes'}; {self.setting}. It holds for this "
            "batch size and these weights",
        )


def _of_gradients(found: Measurement) -> Iterator[tuple[str, str]]:
    """Yields the lines on the gradients by which a scale is judged."""
    if found.ranked:
        yield (
            "small",
            f"without scaling, the worst gradient, of {found.ranked[0].name}, is wrong by "
            f"{_percent(found.worst_error)} (limit {_percent(TOLERANCE)})",
        )
    if found.lowest_exponent > 0:
        yield "range", f"{_accurate(found)} from a loss scale of 2**{found.lowest_exponent}"
    if found.inaccurate:
        name, error = max(found.inaccurate.items(), key=lambda item: item[1])
        yield (
            "any scale",
            f"the gradient of {name} is wrong by {_percent(error)} at every loss scale: "
            "float16 rounds the forward pass, which is not scaled",
        )
    yield (
        "large",
        f"gradients stay finite up to a loss scale of about 2**{found.highest_exponent}; the "
        f"first to overflow is {_first_to_overflow(found)}",
    )


def _left_out(found: Measurement) -> Iterator[tuple[str, str]]:
    """Yields the lines on the other gradients."""
    small = (
        "wrong in float16 at every scale, and left out, because they are far smaller than others. "
        "The gradient of a bias before a normalization is wrong in float32, too. Adam moves other "
        "such weights at random: compute what reduces their gradients, such as a softmax with "
        "large inputs, in float32, or make its inputs smaller"
    )
    for said, names in (
        ("also 0 in float32, and left out", [e.name for e in found.gradients if not e.errors]),
        (small, [e.name for e in found.gradients if e.errors and e.is_wrong]),
    ):
        if names:
            more = ", ..." if len(names) > 3 else ""
            yield (
                "left out",
                f"{len(names)} of the gradients: {', '.join(names[:3])}{more}: {said}",
            )


_TITLES = {
    Verdict.CANNOT_HELP: "loss scaling cannot help",
    Verdict.NO_SINGLE_SCALE: "no single scale works",
    Verdict.UNKNOWN: "whether loss scaling is needed is unknown",
    Verdict.NOT_NEEDED: "loss scaling is not needed",
}


def line_to_copy(rule: DynamicScale) -> str:
    """Returns the call that makes a rule.

    Examples:
        >>> line_to_copy(DynamicScale(initial_scale=2.0**15, min_scale=2.0**4))
        'DynamicScale(initial_scale=2.0**15, min_scale=2.0**4)'
    """
    first, lowest = (int(math.log2(scale)) for scale in (rule.initial_scale, rule.min_scale))
    return f"DynamicScale(initial_scale=2.0**{first}, min_scale=2.0**{lowest})"


def _accurate(found: Measurement) -> str:
    if not found.inaccurate:
        return "every gradient is accurate"
    return "every gradient is as accurate as at any loss scale"


def _first_to_overflow(found: Measurement) -> str:
    in_float16 = [each for each in found.gradients if not each.is_wide]
    return max(in_float16 or found.gradients, key=lambda each: each.largest).name


def _percent(share: float) -> str:
    if share < 0.001:
        return "under 0.1%"
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, expand_tabs=False
    )
