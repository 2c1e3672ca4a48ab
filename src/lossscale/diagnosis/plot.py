"""The one picture of a report: how wrong each gradient is at each loss scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lossscale.diagnosis.measurement import Measurement
from lossscale.diagnosis.report import headline, line_to_copy, percent
from lossscale.errors import ArgumentError
from lossscale.plots.curves import axes_or_new

if TYPE_CHECKING:
    from lossscale.diagnosis.report import Report

_BAD, _GOOD, _DIM = "#b3261e", "#1a7f37", "#8b95a3"
_LOWEST, _HIGHEST = 1e-5, 5.0
_LONGEST_NAME, _BARS = 40, 10


def plot_report(report: Report, ax: Any | None, loss: str | None) -> Any:
    """Draws a report; see `lossscale.diagnosis.report.Report.plot`."""
    name = next(iter(report.recommendations)) if loss is None else loss
    if name not in report.measurements:
        known = ", ".join(map(repr, report.measurements))
        raise ArgumentError(f"`loss` must be one of {known}. Received: loss={loss!r}.")
    found, advised = report.measurements[name], report.recommendations[name]
    drawn = [each for each in found.gradients if each.errors and not each.is_noise]
    if not drawn and not found.operations:
        raise ArgumentError(
            "There is nothing to draw: this report has no float16 measurement. Received: a report "
            f"on {report.model!r} with the verdict {advised.verdict.value!r}."
        )
    ax = axes_or_new(ax)
    line = "" if advised.rule is None else f"\n{line_to_copy(advised.rule)}"
    title = headline(advised).partition(" rule = ")[0]
    subject = report.model if len(report.measurements) == 1 else f"{report.model}, {name}"
    ax.set_title(f"{subject}: {title}{line}", loc="left", fontsize=11)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if not drawn:
        return _outputs(ax, found)
    tried = {exponent for each in drawn for exponent in each.errors}
    low, high = min(*tried, 0) - 1, max(*tried, found.highest_exponent + 2, 10)
    _areas(ax, found, low, high)
    for each in drawn:
        points = [(e, max(error, _LOWEST)) for e, error in each.errors.items() if error < math.inf]
        ax.plot(*zip(*points, strict=True), color=_DIM, linewidth=1, alpha=0.6, zorder=2)
        over = min((e for e, error in each.errors.items() if math.isinf(error)), default=None)
        if over is not None and points and over > 0:
            ax.plot(over, points[-1][1], "x", color=_DIM, markersize=6, zorder=3)
    if found.ranked:
        _worst(ax, found)
    ax.axvline(0, color="black", linewidth=1.2)
    ax.axhline(found.tolerance, color="black", linewidth=1, linestyle="--")
    ax.annotate(
        f"limit {percent(found.tolerance)}",
        (high, found.tolerance),
        xytext=(-4, 4),
        textcoords="offset points",
        horizontalalignment="right",
        fontsize=9,
    )
    if advised.rule is not None:
        _rule(ax, advised.rule, low)
    ax.set_xlim(low, high)
    ax.set_yscale("log")
    ax.set_ylim(_LOWEST * 0.7, _HIGHEST)
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64) if (high - low) / step <= 10)
    ticks = range(math.ceil(low / step) * step, high + 1, step)
    ax.set_xticks(ticks, [f"$2^{{{tick}}}$" if tick else "1" for tick in ticks])
    errors = (1.0, 0.1, 0.01, 0.001, 0.0001)
    ax.set_yticks(errors, ["100%", "10%", "1%", "0.1%", "0.01%"])
    ax.minorticks_off()
    ax.set_xlabel("loss scale (1: no scaling)")
    ax.set_ylabel("error of a gradient in float16")
    return ax


def _outputs(ax: Any, found: Measurement) -> Any:
    """Draws what the operations have returned, those with the least room."""
    nearest = sorted(found.operations, key=lambda each: (each.finite, each.room))[:_BARS]
    end = math.log2(65504)
    for row, each in enumerate(nearest):
        size = end - each.room if each.finite else end + 2
        ax.barh(row, size + 24, left=-24, color=_DIM if each.finite else _BAD, height=0.6)
    ax.axvspan(end, end + 2, color=_BAD, alpha=0.13, linewidth=0)
    ax.set_yticks(range(len(nearest)), [_shortened(each.name, _LONGEST_NAME) for each in nearest])
    ax.invert_yaxis()
    ticks = range(-24, 17, 8)
    ax.set_xlim(-24, end + 2)
    ax.set_xticks(ticks, [f"$2^{{{tick}}}$" if tick else "1" for tick in ticks])
    ax.set_xlabel("largest number that an operation returns; float16 ends at $2^{16}$")
    return ax


def _areas(ax: Any, found: Measurement, low: int, high: int) -> None:
    start = found.lowest_exponent if found.lowest_exponent > 0 else low
    if start < found.highest_exponent and (
        found.lowest_exponent > 0 or found.worst_error <= found.tolerance
    ):
        ax.axvspan(start, found.highest_exponent, color=_GOOD, alpha=0.13, linewidth=0)
    if not found.highest_is_bound:
        ax.axvspan(found.highest_exponent, high, color=_BAD, alpha=0.13, linewidth=0)
        first = _shortened(found.first_to_overflow, 24)
        right = found.highest_exponent > (low + high) / 2
        ax.annotate(
            f"overflow above $2^{{{found.highest_exponent}}}$,\nfirst {first}",
            (found.highest_exponent, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(-6 if right else 6, 0),
            textcoords="offset points",
            horizontalalignment="right" if right else "left",
            color=_BAD,
            fontsize=9,
        )


def _worst(ax: Any, found: Measurement) -> None:
    worst = found.ranked[0]
    points = [(e, max(error, _LOWEST)) for e, error in worst.errors.items() if error < math.inf]
    bad = found.worst_error > found.tolerance
    color = _BAD if bad else "black"
    ax.plot(*zip(*points, strict=True), color=color, linewidth=2.4, marker="o", zorder=4)
    name = _shortened(worst.name, _LONGEST_NAME)
    ax.annotate(
        f"without scaling {name} is wrong by {percent(found.worst_error)}",
        (0, max(worst.errors[0], _LOWEST)),
        xytext=(12, 10),
        textcoords="offset points",
        color=color,
        fontsize=10,
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
        zorder=5,
    )


def _rule(ax: Any, rule: Any, low: int) -> None:
    marks = (("min_scale", rule.min_scale, 0.80), ("initial_scale", rule.initial_scale, 0.72))
    for name, scale, height in marks:
        exponent = math.frexp(scale)[1] - 1
        if exponent < low:
            continue
        ax.axvline(exponent, color=_GOOD, linewidth=2)
        ax.annotate(
            f"{name} $2^{{{exponent}}}$",
            (exponent, height),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            color=_GOOD,
            fontsize=9,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
        )


def _shortened(name: str, length: int) -> str:
    """The end of a long name: in the path of a variable, it says most."""
    return name if len(name) <= length else f"…{name[1 - length :]}"
