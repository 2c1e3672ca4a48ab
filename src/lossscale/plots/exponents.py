"""Exponents of gradients against the range of a number format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lossscale.diagnostics.exponents import ExponentHistogram
from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.plots.style import LINES, axes_or_new

_FILLS = ((LINES[1]["color"], "///"), (LINES[2]["color"], "\\\\\\"), (LINES[3]["color"], "..."))


def plot_exponents(
    histograms: Mapping[str, ExponentHistogram],
    ax: Any | None = None,
    *,
    format: str | NumberFormat = "float16",
) -> Any:
    """Draws histograms of exponents over the range of a number format.

    Args:
        histograms: Name of an array to its histogram; at most three are easily told apart.
        ax: The matplotlib Axes to draw on. By default a new pyplot figure.
        format: The format whose range is drawn, a key of `lossscale.diagnostics.FORMATS`.

    Returns:
        The Axes. Its horizontal axis is log2 of the magnitude. A bar from e to e + 1 stands for
        the elements with 2**e <= |x| < 2**(e + 1). Its height is their share of the elements
        that are not zero, in percent.

    Raises:
        ArgumentError: If `format` is not known. It is a `ValueError`.
    """
    known = number_format(format)
    ax = axes_or_new(ax)
    for index, (name, histogram) in enumerate(histograms.items()):
        color, hatch = _FILLS[index % len(_FILLS)]
        edges = [*histogram.exponents.tolist(), int(histogram.exponents.max(initial=-1)) + 1]
        total = max(int(histogram.counts.sum()), 1)
        ax.stairs(
            [100 * count / total for count in histogram.counts.tolist()],
            edges,
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
    # Below the axes: inside, it would hide a histogram, wherever the histograms are.
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)
    return ax


def _draw_range(ax: Any, known: NumberFormat, histograms: Mapping[str, ExponentHistogram]) -> None:
    flush, normal = math.log2(known.flush_edge), math.log2(known.min_normal)
    overflow = math.log2(known.overflow_edge)
    occurring = [e for h in histograms.values() for e in h.exponents.tolist()]
    left = min([flush - 8, *(e - 1 for e in occurring)])
    right = max([overflow + 4, *(e + 2 for e in occurring)])
    bands = (
        (left, flush, f"zero in {known.name}", "0.80"),
        (flush, normal, "subnormal", "0.92"),
        (normal, overflow, "normal", "1.00"),
        (overflow, right, "overflow", "0.80"),
    )
    for start, end, name, grey in bands:
        ax.axvspan(start, end, color=grey, zorder=0, linewidth=0)
        ax.text(
            (start + end) / 2,
            1.01,
            name,
            transform=ax.get_xaxis_transform(),
            horizontalalignment="center",
            verticalalignment="bottom",
            fontsize="small",
        )
    for edge in (flush, normal, overflow):
        ax.axvline(edge, color="0.35", linewidth=0.8, zorder=1)
    ax.set_xlim(left, right)
