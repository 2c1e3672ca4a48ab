"""Exponents of gradients against the range of a number format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lossscale.checks import checked_above_zero
from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.verdict import share
from lossscale.errors import ArgumentError
from lossscale.plots.labels import Range, legend_below, write_above
from lossscale.plots.style import LINES, axes_or_new

_FILLS = ((LINES[1]["color"], "///"), (LINES[2]["color"], "\\\\\\"), (LINES[3]["color"], "..."))


def plot_gradient_range(
    gradients: GradientReport | GradientHistogram | Mapping[str, GradientHistogram],
    ax: Any | None = None,
    *,
    format: str | NumberFormat | None = None,
    scale: float | None = None,
) -> Any:
    """Draws gradients over the range of a number format: what becomes zero, and what overflows.

    Args:
        gradients: A report, of which all gradients are drawn together, or a histogram: without
            scaling and at one loss scale. Or the name of a gradient to its histogram, which are
            drawn as they are; at most three are easily told apart.
        ax: The matplotlib Axes to draw on. By default a new pyplot figure.
        format: The format whose range is drawn, a key of `lossscale.diagnostics.FORMATS`. By
            default that of the report, or float16.
        scale: The loss scale to draw at, a power of two. By default the one that the report, or
            the histogram, recommends. At 1, or if there is none, the gradients are drawn once.

    Returns:
        The Axes. Its horizontal axis is log2 of the magnitude. A bar from e to e + 1 stands for
        the elements with 2**e <= |x| < 2**(e + 1). Its height is their share of the elements
        that are finite and not zero, in percent.

    Raises:
        ArgumentError: If the format is not known, the scale is no power of two, or one is given
            with several histograms. It is a `ValueError`.
    """
    known, histograms = _histograms(gradients, format, scale)
    ax = axes_or_new(ax)
    for index, (name, histogram) in enumerate(histograms.items()):
        color, hatch = _FILLS[index % len(_FILLS)]
        counts = {bin.exponent: bin.elements for bin in histogram.bins}
        exponents = range(min(counts, default=0), max(counts, default=-1) + 1)
        total = max(histogram.nonzeros, 1)
        ax.stairs(
            [100 * counts.get(exponent, 0) / total for exponent in exponents],
            [*exponents, exponents.stop],
            label=name,
            fill=True,
            facecolor=(color, 0.35),
            edgecolor=color,
            hatch=hatch,
            linewidth=1.5,
        )
    _draw_range(ax, known, histograms)
    ax.set_xlabel("log$_2$ of the magnitude of a gradient")
    ax.set_ylabel("share of gradients [%]")
    ax.set_ylim(bottom=0)
    # Inside the axes it would hide a histogram, wherever the histograms are.
    legend_below(ax, columns=3)
    return ax


def _histograms(
    gradients: GradientReport | GradientHistogram | Mapping[str, GradientHistogram],
    format: str | NumberFormat | None,
    scale: float | None,
) -> tuple[NumberFormat, Mapping[str, GradientHistogram]]:
    """The format, and the histograms by their names in the legend."""
    if isinstance(gradients, GradientReport):
        report = gradients if format is None else gradients.with_format(format)
        known = number_format(report.format)
        scale = report.recommended_scale if scale is None else scale
        everything = GradientHistogram.merge(tensor.histogram for tensor in report.ranges)
        return known, _unscaled_and_scaled(everything, known, scale)
    known = number_format("float16" if format is None else format)
    if isinstance(gradients, GradientHistogram):
        scale = gradients.recommended_scale(known) if scale is None else scale
        return known, _unscaled_and_scaled(gradients, known, scale)
    if scale is not None:
        raise ArgumentError(
            "`scale` is for a report or for one histogram. Pass several histograms as they are to "
            "be drawn: histogram.scaled(10) is the one at a loss scale of 2**10. "
            f"Received: scale={scale!r}."
        )
    return known, gradients


def _unscaled_and_scaled(
    histogram: GradientHistogram, known: NumberFormat, scale: float | None
) -> dict[str, GradientHistogram]:
    lost = share(histogram.flushed_count(known))
    drawn = {f"without scaling ({lost} become zero)": histogram}
    if scale is not None:
        mantissa, exponent = math.frexp(checked_above_zero("scale", scale))
        if mantissa != 0.5:
            raise ArgumentError(f"`scale` must be a power of two. Received: scale={scale!r}.")
        power = exponent - 1
        if power:
            lost = share(histogram.flushed_count(known, scale))
            drawn[f"times $2^{{{power}}}$ ({lost} become zero)"] = histogram.scaled(power)
    return drawn


def _draw_range(ax: Any, known: NumberFormat, histograms: Mapping[str, GradientHistogram]) -> None:
    flush, normal = math.log2(known.flush_edge), math.log2(known.min_normal)
    overflow = math.log2(known.overflow_edge)
    occurring = [bin.exponent for histogram in histograms.values() for bin in histogram.bins]
    left = min([flush - 8, *(exponent - 1 for exponent in occurring)])
    right = max([overflow + 4, *(exponent + 2 for exponent in occurring)])
    ranges = (
        Range(left, flush, f"zero in {known.name}"),
        Range(flush, normal, "subnormal"),
        Range(normal, overflow, "normal"),
        Range(overflow, right, "overflow"),
    )
    for (start, end, _), grey in zip(ranges, ("0.80", "0.92", "1.00", "0.80"), strict=True):
        ax.axvspan(start, end, color=grey, zorder=0, linewidth=0)
    for edge in (flush, normal, overflow):
        ax.axvline(edge, color="0.35", linewidth=0.8, zorder=1)
    ax.set_xlim(left, right)
    write_above(ax, ranges)
