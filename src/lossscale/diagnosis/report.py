"""The report of a diagnosis: the verdict, the line to copy, and the measurement."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from lossscale.diagnosis.measurement import (
    MARGIN,
    TOLERANCE,
    GradientFunction,
    Measurement,
    measure,
)
from lossscale.diagnosis.verdict import Recommendation, Verdict, recommend
from lossscale.rules import DynamicScale

_NAMED = 3
_WIDTH = 88
_ORDER = (
    Verdict.CANNOT_HELP,
    Verdict.NO_SINGLE_SCALE,
    Verdict.UNKNOWN,
    Verdict.NEEDED,
    Verdict.NOT_NEEDED,
)
_TITLES = {
    Verdict.NOT_NEEDED: "loss scaling is not needed.",
    Verdict.NEEDED: "loss scaling is needed.",
    Verdict.NO_SINGLE_SCALE: "no single scale serves.",
    Verdict.CANNOT_HELP: "loss scaling cannot help.",
    Verdict.UNKNOWN: "whether loss scaling is needed is unknown.",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a diagnosis. Print it, or read `verdict` and `rule`.

    Attributes:
        model: What was diagnosed, by name.
        setting: What it was computed with.
        measurements: Name of each loss to what was measured of it.
        seconds: How long it took.
    """

    model: str
    setting: str
    measurements: Mapping[str, Measurement]
    seconds: float = dataclasses.field(default=0.0, compare=False)

    @property
    def recommendations(self) -> dict[str, Recommendation]:
        """The verdict on each loss, the worst first."""
        found = {name: recommend(each) for name, each in self.measurements.items()}
        return dict(sorted(found.items(), key=lambda item: _ORDER.index(item[1].verdict)))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict: one of "not needed", "needed", "no single scale", "cannot help" and
        "unknown"."""
        return next(iter(self.recommendations.values())).verdict

    @property
    def rule(self) -> DynamicScale | None:
        """The rule to use, of the worst verdict; None if none is needed or none helps."""
        return next(iter(self.recommendations.values())).rule

    def __str__(self) -> str:
        lines = []
        for line, (name, advised) in zip(
            self._headlines(), self.recommendations.items(), strict=True
        ):
            lines += [_wrapped(line, 4), *_details(self.measurements[name], advised)]
        found = next(iter(self.measurements.values()))
        batches = _several(found.batches, "batch", "batches")
        counted = f"{batches}, {_several(found.passes, 'pass', 'passes')}"
        lines.append(
            _line(
                "measured",
                f"{counted}, {self.seconds:.1f} s; {self.setting}. It holds for this size of batch "
                "and these weights",
            )
        )
        return "\n".join(lines)

    def _headlines(self) -> list[str]:
        alone = len(self.measurements) == 1
        return [
            f"{self.model}{'' if alone else f', {name}'}: {headline(advised)}"
            for name, advised in self.recommendations.items()
        ]

    def __repr__(self) -> str:
        return f"<Report: {self._headlines()[0]}>"

    def _repr_html_(self) -> str:
        """Returns the report for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    def plot(self, ax: Any | None = None, *, loss: str | None = None) -> Any:
        """Draws how wrong each gradient is in float16, over the loss scale.

        Args:
            ax: The matplotlib Axes to draw on. By default a new pyplot figure.
            loss: Name of the loss to draw, in a report on several; None for the one with the worst
                verdict.

        Returns:
            The Axes; `ax.figure.savefig("report.svg")` writes a file. A line is the gradient of
            one variable, at the scales that were tried: the norm of its difference from float32,
            over the norm. Errors below 0.001% are drawn there, and a cross marks where a gradient
            overflows. The green area is where every gradient is right, the red one where one
            overflows; lines mark both scales of the rule. If the forward pass overflows, bars show
            the largest number that each operation returned.

        Raises:
            ArgumentError: If there is no such loss, or nothing was measured in float16.
        """
        # Imported here, because it imports matplotlib.
        from lossscale.diagnosis.plot import plot_report

        return plot_report(self, ax, loss)

    def to_json(self) -> str:
        """Returns the report as strict JSON, with the numbers of each gradient."""
        described = {
            "verdict": self.verdict,
            "recommendations": {k: dataclasses.asdict(v) for k, v in self.recommendations.items()},
            **dataclasses.asdict(self),
        }
        return json.dumps(_plain(described), allow_nan=False)


def make_report(
    run: GradientFunction,
    batches: Iterable[Any],
    *,
    model: str,
    setting: str,
    tolerance: float = TOLERANCE,
    in_use: float | None = None,
    after_batch: Callable[[int], None] = lambda number: None,
) -> Report:
    """Measures a model, and returns the report.

    Args:
        run: Computes a pass.
        batches: What to measure on.
        model: What the model is called.
        setting: What it is computed with, such as "PyTorch, cpu, autocast to float16".
        tolerance, in_use, after_batch: As for `measure`.
    """
    started = time.perf_counter()
    measurements = measure(
        run, batches, tolerance=tolerance, in_use=in_use, after_batch=after_batch
    )
    return Report(model, setting, measurements, time.perf_counter() - started)


def headline(advised: Recommendation) -> str:
    """Returns the verdict as a sentence, and the line to copy."""
    said = _TITLES[advised.verdict]
    if advised.rule is not None:
        return f"{said} rule = {line_to_copy(advised.rule)}"
    return said if advised.verdict is Verdict.NOT_NEEDED else f"{said[:-1]}: {advised.reason}."


def line_to_copy(rule: DynamicScale) -> str:
    """Returns the call that makes a rule.

    Examples:
        >>> line_to_copy(DynamicScale(initial_scale=2.0**15, min_scale=2.0**4))
        'DynamicScale(initial_scale=2.0**15, min_scale=2.0**4)'
    """
    first, lowest = (_exponent(scale) for scale in (rule.initial_scale, rule.min_scale))
    return f"DynamicScale(initial_scale=2.0**{first}, min_scale=2.0**{lowest})"


def percent(share: float) -> str:
    """Formats a share as a percentage.

    Examples:
        >>> percent(0.0004), percent(0.034), percent(1.12), percent(float("inf"))
        ('under 0.1%', '3.4%', '112%', 'infinitely')
    """
    if math.isinf(share):
        return "infinitely"
    if share < 0.001:
        return "under 0.1%"
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _details(found: Measurement, advised: Recommendation) -> list[str]:
    lines = []
    if advised.verdict is Verdict.UNKNOWN:
        lines.append(_predicted(found))
    elif advised.verdict is not Verdict.CANNOT_HELP:
        lines += [_small(found), _range(found, advised), _large(found)]
    if advised.advice:
        lines.append(_line("do", advised.advice))
    if found.operations and not found.overflows_at:
        nearest = min(found.operations, key=lambda each: each.room)
        room = f"{nearest.room:.0f} bits of room; the largest output is that of {nearest.name}"
        lines.append(_line("forward", room))
    if found.ranked:
        lines.append(_bfloat16(found))
    if not found.is_over:
        lines += [_zero(found), _left_out(found)]
    if found.reference:
        lines.append(
            _line(
                "reference",
                "the model casts to float16 itself, so the float32 gradients were computed at a "
                f"loss scale of 2**{found.reference}",
            )
        )
    if found.in_use is not None:
        scale, name, wrong = found.in_use
        said = f"at the loss scale {_scale(scale)} {name} is wrong by {percent(wrong)}"
        lines.append(_line("in use", said))
    return list(filter(None, lines))


def _small(found: Measurement) -> str:
    if not found.ranked:
        return ""
    worst = found.ranked[0]
    if found.worst_error > found.tolerance:
        how = percent(found.worst_error)
        return _line("small", f"without scaling the gradient of {worst.name} is wrong by {how}")
    return _line(
        "small",
        f"no gradient loses by float16: the worst, {worst.name}, is wrong by "
        f"{percent(found.worst_error)} beyond rounding (limit {percent(found.tolerance)})",
    )


def _range(found: Measurement, advised: Recommendation) -> str:
    if advised.rule is None or found.lowest_exponent <= 0:
        return ""
    highest, lowest = found.highest_exponent, found.lowest_exponent
    return _line(
        "range",
        f"every gradient is right from a loss scale of 2**{lowest} and finite up to 2**{highest}; "
        f"the rule starts {highest - _exponent(advised.rule.initial_scale)} bits below and never "
        f"goes under 2**{_exponent(advised.rule.min_scale)}",
    )


def _large(found: Measurement) -> str:
    highest, first = found.highest_exponent, found.first_to_overflow
    if highest >= MARGIN:
        more = " or more" if found.highest_is_bound else ""
        return _line(
            "large",
            f"gradients stay finite up to a loss scale of 2**{highest}{more}; the first to "
            f"overflow is {first}",
        )
    bits = _several(abs(highest), "bit", "bits")
    where = f"{bits} {'below' if highest >= 0 else 'beyond'} overflow"
    factor = 2 ** (MARGIN - highest)
    return _line(
        "large",
        f"without scaling gradients are {where}; the first is {first}. To divide "
        f"the loss by {factor:,} does the same as the rule",
    )


def _bfloat16(found: Measurement) -> str:
    worst = max(found.ranked, key=lambda each: each.bfloat16)
    return _line(
        "bfloat16",
        f"needs no loss scaling; rounding makes {worst.name} wrong by {percent(worst.bfloat16)}, "
        f"where float16 at its best has {percent(worst.best_error)}",
    )


def _zero(found: Measurement) -> str:
    names = [each.name for each in found.gradients if each.is_zero]
    if not names:
        return ""
    said = f"{_counted(names)} 0 in float32 too, and not judged: {_named(names)}"
    return _line("zero", f"{said} (a unit that is never active has one)")


def _left_out(found: Measurement) -> str:
    names = [each.name for each in found.gradients if each.is_noise and each.errors]
    if not names:
        return ""
    said = f"{_counted(names)} wrong at every scale: {_named(names)}"
    return _line(
        "left out", f"{said} (that of a bias before a normalization is 0 but for rounding)"
    )


def _predicted(found: Measurement) -> str:
    sizes = [each.largest for each in found.gradients if 0 < each.largest < math.inf]
    if not sizes:
        return ""
    low, high = (math.floor(math.log2(size)) for size in (min(sizes), max(sizes)))
    return _line(
        "float32",
        f"the largest number in each gradient is between 2**{low} and 2**{high}; float16 would "
        f"overflow above a loss scale of 2**{15 - high} and lose small ones below 2**{-14 - low}",
    )


def _line(title: str, text: str) -> str:
    return _wrapped(f"  {title:<11} {text}", 14)


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, expand_tabs=False
    )


def _counted(names: list[str]) -> str:
    return "1 gradient is" if len(names) == 1 else f"{len(names)} gradients are"


def _named(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _several(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _scale(scale: float) -> str:
    exponent = math.log2(scale)
    return f"2**{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


def _exponent(scale: float) -> int:
    return math.frexp(scale)[1] - 1


def _plain(value: Any) -> Any:
    """The same with nothing in it that is no JSON: what is not finite is a text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
