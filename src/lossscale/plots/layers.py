"""The gradients of a model, one row for each."""

from __future__ import annotations

import math
from typing import Any

from lossscale.checks import checked_count
from lossscale.diagnostics.formats import number_format
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.tensor_ranges import TensorKind
from lossscale.errors import ArgumentError
from lossscale.packages import require
from lossscale.plots.labels import Range, legend_below, shortened, write_above

MOST_ROWS = 40
_LONGEST_NAME = 44
_SMALLEST_TEXT, _LARGEST_TEXT = 5.0, 9.0
"""Of the names of the rows, in points."""

_ROW = 0.2
"""How high a row of a new figure is, in inches."""


def figure_height(report: GradientReport, rows: int = MOST_ROWS) -> float:
    """Returns how high a drawing of `plot_layers` must be for its names to be read, in inches.

    Args:
        report: The report to draw.
        rows: As given to `plot_layers`.
    """
    return 1.8 + _ROW * max(min(len(report.ranges), rows + 1), 6)


def plot_layers(report: GradientReport, ax: Any | None = None, *, rows: int = MOST_ROWS) -> Any:
    """Draws the exponents of each gradient of a model as a heat map, without scaling.

    The range of the report's number format is marked as it is without loss scaling, with solid
    lines where it becomes zero, where it is subnormal, and where it overflows; and with dashed
    lines as it is at the recommended scale, where it becomes zero and where it overflows.

    Args:
        report: The report of `lossscale.diagnostics.diagnose`.
        ax: The matplotlib Axes to draw on. By default a new pyplot figure, as high as its rows.
        rows: How many gradients have a row of their own, at most: those that are worst. The rest
            is added up in the last row.

    Returns:
        The Axes. Its horizontal axis is log2 of the magnitude. Its rows are the variables in the
        order of the model, below them what its layers return, and what it returns itself. A cell
        from e to e + 1 stands for the elements with 2**e <= |x| < 2**(e + 1). Its darkness is
        their number, in percent of that of the fullest cell in its row; fainter cells are drawn
        darker than in proportion.

    Raises:
        ArgumentError: If the report has no such gradient, or `rows` is no number of rows. It is a
            `ValueError`.
    """
    require("matplotlib")
    from matplotlib.colors import PowerNorm

    shown = _rows(report, checked_count("rows", rows))
    exponents = [bin.exponent for _, histogram in shown for bin in histogram.bins]
    if not exponents:
        raise ArgumentError(
            "There is nothing to draw: the report has no gradient that is not zero. "
            f"Received: a report on {report.model!r} with {len(shown)} rows."
        )
    if ax is None:
        from matplotlib import pyplot

        size = (8, figure_height(report, rows))
        ax = pyplot.subplots(figsize=size, layout="constrained")[1]
    lowest, highest = min(exponents), max(exponents) + 1
    cells = [[0.0] * (highest - lowest) for _ in shown]
    for (_, histogram), line in zip(shown, cells, strict=True):
        fullest = max((bin.elements for bin in histogram.bins), default=1)
        for bin in histogram.bins:
            line[bin.exponent - lowest] = 100 * bin.elements / fullest
    mesh = ax.pcolormesh(
        list(range(lowest, highest + 1)),
        range(len(shown) + 1),
        cells,
        cmap="Greys",
        norm=PowerNorm(0.5, vmin=0, vmax=100),
    )
    label = "share of the row's fullest cell [%]"
    ax.figure.colorbar(mesh, ax=ax, label=label, pad=0.02, ticks=[0, 5, 25, 50, 75, 100])
    _draw_edges(ax, report, lowest, highest)
    ax.set_ylim(len(shown), 0)
    height = ax.get_window_extent().height * 72 / ax.figure.dpi
    text = min(_LARGEST_TEXT, max(_SMALLEST_TEXT, 0.8 * height / len(shown)))
    ax.set_yticks([number + 0.5 for number in range(len(shown))])
    names = shortened([name for name, _ in shown], _LONGEST_NAME)
    ax.set_yticklabels(names, fontsize=text)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("log$_2$ of the magnitude of a gradient, without scaling")
    return ax


def _rows(report: GradientReport, most: int) -> list[tuple[str, GradientHistogram]]:
    ordered = [
        row
        for kind in (TensorKind.VARIABLE, TensorKind.ACTIVATION, TensorKind.OUTPUT)
        for row in report.ranges
        if row.kind is kind
    ]
    # One gradient alone needs no more room than a row for the rest.
    if len(ordered) <= most + 1:
        return [(row.name, row.histogram) for row in ordered]
    worst = {tensor.name for tensor in report.tensors[:most]}
    rest = [row.histogram for row in ordered if row.name not in worst]
    named = [(row.name, row.histogram) for row in ordered if row.name in worst]
    return [*named, (f"{len(rest)} others together", GradientHistogram.merge(rest))]


def _draw_edges(ax: Any, report: GradientReport, lowest: int, highest: int) -> None:
    """Draws the edges of the format, and sets the limits to show them."""
    known = number_format(report.format)
    flush, normal, overflow = (
        math.log2(edge) for edge in (known.flush_edge, known.min_normal, known.overflow_edge)
    )
    groups = [("-", f"range of {known.name}", [flush, normal, overflow])]
    scale = report.recommended_scale
    if scale is not None and scale != 1:
        shift = round(math.log2(scale))
        label = f"range of {known.name} at a loss scale of $2^{{{shift}}}$"
        groups.append(("--", label, [flush - shift, overflow - shift]))
    for style, label, edges in groups:
        lines = [ax.axvline(x, linestyle=style, color="#D55E00", linewidth=1.6) for x in edges]
        lines[0].set_label(label)
    marked = [edge for _, _, edges in groups for edge in edges]
    left, right = min(lowest, *marked) - 2, max(highest, *marked) + 2
    ax.set_xlim(left, right)
    write_above(
        ax,
        [
            Range(left, flush, f"zero in {known.name}"),
            Range(flush, normal, "subnormal"),
            Range(normal, overflow, "normal"),
        ],
    )
    legend_below(ax, columns=2)
