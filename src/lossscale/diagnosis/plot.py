"""The picture of a report: the error of each gradient over the loss scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lossscale.diagnosis.measurement import Measurement
from lossscale.diagnosis.report import exponent_of, headline, line_to_copy, percent
from lossscale.errors import ArgumentError
from lossscale.plots.curves import axes_or_new

if TYPE_CHECKING:
    from lossscale.diagnosis.report import Report

_BAD, _GOOD, _DIM = "#b3261e", "#1a7f37", "#8b95a3"
_LOWEST, _HIGHEST = 1e-5, 5.0
_WHITE = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1}


def plot_report(report: Report, ax: Any | None, loss: str | None) -> Any:
    """Draws a report; see `lossscale.diagnosis.report.Report.plot`."""
    name = next(iter(report.recommendations)) if loss is None else loss
    if name not in report.measurements:
        known = ", ".join(map(repr, report.measurements))
        raise ArgumentError(f"`loss` must be one of {known}. Received: loss={loss!r}.")
    found, advised = report.measurements[name], report.recommendations[name]
    drawn = [each for each in found.gradients if each.errors and not each.is_noise]
    if not drawn:
        raise ArgumentError(
            "There is nothing to draw: no gradient was measured in float16. Received: a report "
            f"on {report.model!r} with the verdict {advised.verdict.value!r}."
        )
    ax = axes_or_new(ax)
    line = "" if advised.rule is None else f"\n{line_to_copy(advised.rule)}"
    title = headline(advised).partition(" rule = ")[0]
    subject = report.model if len(report.measurements) == 1 else f"{report.model}, {name}"
    ax.set_title(f"{subject}: {title}{line}", loc="left", fontsize=11)
    tried = {exponent for each in drawn for exponent in each.errors}
    low, high = min(*tried, 0) - 1, max(*tried, found.highest_exponent + 2, 10)
    _draw_areas(ax, found, low, high)
    for each in drawn:
        ax.plot(*_curve(each), color=_DIM, linewidth=1, alpha=0.6, zorder=2)
        over = min((e for e, error in each.errors.items() if math.isinf(error)), default=0)
        if over > 0:
            ax.plot(over, _curve(each)[1][-1], "x", color=_DIM, markersize=6, zorder=3)
    if found.ranked:
        _draw_worst(ax, found)
    if advised.rule is not None:
        marks = {"min_scale": 0.80, "initial_scale": 0.72}
        for setting, height in marks.items():
            exponent = exponent_of(getattr(advised.rule, setting))
            if exponent >= low:
                ax.axvline(exponent, color=_GOOD, linewidth=2)
                text, at = f"{setting} $2^{{{exponent}}}$", (exponent, height)
                _write(ax, text, at, (5, 0), color=_GOOD, xycoords=("data", "axes fraction"))
    _finish(ax, found, low, high)
    return ax


def _curve(gradient: Any) -> tuple[list[int], list[float]]:
    """The scales at which a gradient is finite, and its errors."""
    finite = {e: max(error, _LOWEST) for e, error in gradient.errors.items() if error < math.inf}
    return list(finite), list(finite.values())


def _draw_areas(ax: Any, found: Measurement, low: int, high: int) -> None:
    start, end = found.lowest_exponent or low, found.highest_exponent
    if start < end and (found.lowest_exponent or found.worst_error <= found.tolerance):
        ax.axvspan(start, end, color=_GOOD, alpha=0.13, linewidth=0)
    if not found.highest_is_estimate:
        ax.axvspan(end, high, color=_BAD, alpha=0.13, linewidth=0)
        text = f"overflow above $2^{{{end}}}$,\nfirst {_shortened(found.first_to_overflow, 24)}"
        is_right = end > (low + high) / 2
        side = {"horizontalalignment": "right" if is_right else "left"}
        at, move = (end, 0.02), (-6 if is_right else 6, 0)
        _write(ax, text, at, move, color=_BAD, xycoords=("data", "axes fraction"), **side)


def _draw_worst(ax: Any, found: Measurement) -> None:
    worst = found.ranked[0]
    color = _BAD if found.worst_error > found.tolerance else "black"
    ax.plot(*_curve(worst), color=color, linewidth=2.4, marker="o", zorder=4)
    name, wrong = _shortened(worst.name, 40), percent(found.worst_error)
    at = 0, max(worst.errors[0], _LOWEST)
    _write(ax, f"without scaling {name} is wrong by {wrong}", at, (12, 10), color=color, zorder=5)


def _finish(ax: Any, found: Measurement, low: int, high: int) -> None:
    """Draws the limit and no scaling, and the axes."""
    ax.axvline(0, color="black", linewidth=1.2)
    ax.axhline(found.tolerance, color="black", linewidth=1, linestyle="--")
    limit = f"limit {percent(found.tolerance)}"
    _write(ax, limit, (high, found.tolerance), (-4, 4), horizontalalignment="right")
    ax.set_xlim(low, high)
    ax.set_yscale("log")
    ax.set_ylim(_LOWEST * 0.7, _HIGHEST)
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64) if (high - low) / step <= 10)
    ticks = range(math.ceil(low / step) * step, high + 1, step)
    ax.set_xticks(ticks, [f"$2^{{{tick}}}$" if tick else "1" for tick in ticks])
    ax.set_yticks((1.0, 0.1, 0.01, 0.001, 0.0001), ["100%", "10%", "1%", "0.1%", "0.01%"])
    ax.minorticks_off()
    ax.set_xlabel("loss scale (1: no scaling)")
    ax.set_ylabel("error of a gradient in float16")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _write(ax: Any, text: str, at: Any, move: Any, **style: Any) -> None:
    """Writes a text beside a point."""
    ax.annotate(text, at, xytext=move, textcoords="offset points", fontsize=9, bbox=_WHITE, **style)


def _shortened(name: str, length: int) -> str:
    """The end of a long name: in the path of a variable, it says most."""
    return name if len(name) <= length else f"…{name[1 - length :]}"
