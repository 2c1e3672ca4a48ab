"""The report of a diagnosis: the verdict, the rule to copy, and the measurement."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from lossscale.diagnosis.gradient_function import GradientFunction
from lossscale.diagnosis.measurement import MARGIN, Measurement, measure
from lossscale.diagnosis.verdict import Recommendation, Verdict, recommend
from lossscale.rules import DynamicScale

_WIDTH = 88
# The worst first.
_TITLES = {
    Verdict.CANNOT_HELP: "loss scaling cannot help.",
    Verdict.NO_SINGLE_SCALE: "no single scale works.",
    Verdict.UNKNOWN: "whether loss scaling is needed is unknown.",
    Verdict.NEEDED: "loss scaling is needed.",
    Verdict.NOT_NEEDED: "loss scaling is not needed.",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a diagnosis. Print it, or read `verdict` and `rule`.

    Attributes:
        model: The name of what was diagnosed.
        setting: What it was computed with.
        measurements: Name of each loss to its measurement.
        seconds: The duration of the measurement.
    """

    model: str
    setting: str
    measurements: Mapping[str, Measurement]
    seconds: float = dataclasses.field(default=0.0, compare=False)

    @property
    def recommendations(self) -> dict[str, Recommendation]:
        """The verdict on each loss, the worst first."""
        found = {name: recommend(each) for name, each in self.measurements.items()}
        order = list(_TITLES)
        return dict(sorted(found.items(), key=lambda item: order.index(item[1].verdict)))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict: one of "not needed", "needed", "no single scale", "cannot help" and
        "unknown"."""
        return next(iter(self.recommendations.values())).verdict

    @property
    def rule(self) -> DynamicScale | None:
        """The rule of the worst verdict; None if no rule is needed or none helps."""
        return next(iter(self.recommendations.values())).rule

    def __str__(self) -> str:
        lines = []
        for name, advised in self.recommendations.items():
            found = self.measurements[name]
            lines.append(_wrapped(self._headline(name), 4))
            lines += [_line(title, text) for title, text in _details(found, advised)]
        batches = _counted(found.batches, "batch", "batches")
        text = (
            f"{batches}, {_counted(found.passes, 'pass', 'passes')}, {self.seconds:.1f} s; "
            f"{self.setting}. It holds for this batch size and these weights"
        )
        return "\n".join([*lines, _line("measured", text)])

    def _headline(self, loss: str) -> str:
        subject = self.model if len(self.measurements) == 1 else f"{self.model}, {loss}"
        return f"{subject}: {headline(self.recommendations[loss])}"

    def __repr__(self) -> str:
        return f"<Report: {self._headline(next(iter(self.recommendations)))}>"

    def _repr_html_(self) -> str:
        """Returns the report for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    def plot(self, ax: Any | None = None, *, loss: str | None = None) -> Any:
        """Draws the error of each gradient in float16 over the loss scale.

        Args:
            ax: The matplotlib Axes to draw on. By default a new pyplot figure.
            loss: Name of the loss to draw, in a report on several losses; by default the loss with
                the worst verdict.

        Returns:
            The Axes; `ax.figure.savefig("report.svg")` writes a file. A line is the gradient of
            one variable, at the scales that were tried: the norm of its difference from float32,
            over the norm. Errors below 0.001% are drawn there, and a cross marks where a gradient
            overflows. In the green area every gradient is right, in the red area one overflows;
            vertical lines mark both scales of the rule.

        Raises:
            ArgumentError: If there is no such loss, or no gradient was measured in float16.
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
    run: GradientFunction, batches: Iterable[Any], *, model: str, setting: str, **options: Any
) -> Report:
    """Measures a model, and returns the report.

    Args:
        run: Computes a pass.
        batches: The batches to measure on.
        model: The name of the model.
        setting: What it is computed with, such as "PyTorch, cpu, autocast to float16".
        **options: `max_batches` and `tolerance`, as for `measure`.
    """
    started = time.perf_counter()
    measurements = measure(run, batches, **options)
    return Report(model, setting, measurements, time.perf_counter() - started)


def headline(advised: Recommendation) -> str:
    """Returns the verdict as a sentence, with the rule to copy or the reason."""
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
    first, lowest = (exponent_of(scale) for scale in (rule.initial_scale, rule.min_scale))
    return f"DynamicScale(initial_scale=2.0**{first}, min_scale=2.0**{lowest})"


def exponent_of(scale: float) -> int:
    """Returns the exponent of a power of two."""
    return math.frexp(scale)[1] - 1


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


def _details(found: Measurement, advised: Recommendation) -> Iterator[tuple[str, str]]:
    """Yields the lines below a headline: a title and a text each."""
    sizes = [each.largest for each in found.gradients if 0 < each.largest < math.inf]
    if found.unknown and sizes:
        low, high = (math.floor(math.log2(size)) for size in (min(sizes), max(sizes)))
        yield (
            "float32",
            f"the largest number in each gradient is between 2**{low} and 2**{high}; float16 would "
            f"overflow above a loss scale of 2**{15 - high} and lose small ones below "
            f"2**{-14 - low}",
        )
    if not found.is_over:
        yield from _range(found, advised)
    if advised.advice:
        yield "do", advised.advice
    if found.operations and not found.overflows_at:
        name, nearest = min(found.operations.items(), key=lambda item: item[1].room)
        yield "forward", f"the largest output, of {name}, is {nearest.room:.0f} bits below overflow"
    if found.ranked:
        worst = max(found.ranked, key=lambda each: each.bfloat16)
        yield (
            "bfloat16",
            f"needs no loss scaling; rounding makes {worst.name} wrong by "
            f"{percent(worst.bfloat16)} (float16 at its best: {percent(worst.best_error)})",
        )
    if not found.is_over:
        zero = [each.name for each in found.gradients if each.is_zero]
        if zero:
            said = _listed(zero, "also 0 in float32, and left out")
            yield "zero", f"{said} (as for a unit that is never active)"
        noise = [each.name for each in found.gradients if each.is_noise and each.errors]
        if noise:
            said = _listed(noise, "wrong at every scale")
            yield (
                "left out",
                f"{said} (for a bias before a normalization, the exact gradient is 0)",
            )
    if found.reference:
        yield (
            "reference",
            "the model casts to float16 itself, so the float32 gradients were computed at a loss "
            f"scale of 2**{found.reference}",
        )


def _range(found: Measurement, advised: Recommendation) -> Iterator[tuple[str, str]]:
    """Yields the lines on the smallest and the largest gradients, and the scales between."""
    highest, lowest, first = found.highest_exponent, found.lowest_exponent, found.first_to_overflow
    wrong = percent(found.worst_error)
    if found.ranked and found.worst_error > found.tolerance:
        name = found.ranked[0].name
        yield "small", f"without scaling, the gradient of {name} is wrong by {wrong}"
    elif found.ranked:
        yield (
            "small",
            f"float16 loses nothing: the worst gradient, {found.ranked[0].name}, is wrong by "
            f"{wrong} beyond rounding (limit {percent(found.tolerance)})",
        )
    if advised.rule is not None and lowest > 0:
        yield (
            "range",
            f"every gradient is accurate from a loss scale of 2**{lowest} and finite up to "
            f"2**{highest}; the rule starts {highest - exponent_of(advised.rule.initial_scale)} "
            f"bits below that and never falls below 2**{exponent_of(advised.rule.min_scale)}",
        )
    if highest >= MARGIN:
        about = "about " if found.highest_is_estimate else ""
        yield (
            "large",
            f"gradients stay finite up to a loss scale of {about}2**{highest}; the first to "
            f"overflow is {first}",
        )
    else:
        bits = _counted(abs(highest), "bit", "bits")
        where = f"{bits} {'below' if highest >= 0 else 'above'} overflow"
        yield (
            "large",
            f"without scaling, gradients are {where}; the first is {first}. Dividing the loss by "
            f"{2 ** (MARGIN - highest):,} does the same as the rule",
        )


def _line(title: str, text: str) -> str:
    return _wrapped(f"  {title:<11} {text}", 14)


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, expand_tabs=False
    )


def _listed(names: list[str], how: str) -> str:
    are = "1 gradient is" if len(names) == 1 else f"{len(names)} gradients are"
    return f"{are} {how}: {', '.join(names[:3] + ['...'] * (len(names) > 3))}"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _plain(value: Any) -> Any:
    """The same value as JSON can hold it: a number that is not finite becomes a text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
