"""The gradients of a model, one row for each."""

from __future__ import annotations

import math
from typing import Any

from lossscale.diagnostics.formats import number_format
from lossscale.diagnostics.report import GradientReport, TensorKind
from lossscale.errors import ArgumentError
from lossscale.plots.style import axes_or_new

_SMALLEST_TEXT, _LARGEST_TEXT = 3.0, 9.0
"""Of the names of the rows, in points."""

_TEXT_OF_ALL = 320.0
"""How high all names together may be, in points."""


def plot_layers(report: GradientReport, ax: Any | None = None) -> Any:
    """Draws the exponents of each gradient of a model as a heat map, without scaling.

    The range of the report's number format is marked as it is without loss scaling, with solid
    lines where it becomes zero, where it is subnormal, and where it overflows; and with dashed
    lines as it is at the recommended scale, where it becomes zero and where it overflows.

    Args:
        report: The report of `lossscale.diagnostics.diagnose`.
        ax: The matplotlib Axes to draw on. By default a new pyplot figure.

    Returns:
        The Axes. Its horizontal axis is log2 of the magnitude. Its rows are the variables in the
        order of the model, below them what its layers return, and what it returns itself. A cell
        from e to e + 1 stands for the elements with 2**e <= |x| < 2**(e + 1). Its darkness is
        their number, in percent of that of the fullest cell in its row; fainter cells are drawn
        darker than in proportion.

    Raises:
        ArgumentError: If the report has no such gradient. It is a `ValueError`.
    """
    from matplotlib.colors import PowerNorm

    rows = [
        row
        for kind in (TensorKind.VARIABLE, TensorKind.ACTIVATION, TensorKind.OUTPUT)
        for row in report.ranges
        if row.kind is kind
    ]
    exponents = [bin.exponent for row in rows for bin in row.histogram.bins]
    if not exponents:
        raise ArgumentError(
            "There is nothing to draw: the report has no gradient that is not zero. "
            f"Received: a report on {report.model!r} with {len(rows)} rows."
        )
    ax = axes_or_new(ax)
    lowest, highest = min(exponents), max(exponents) + 1
    cells = [[0.0] * (highest - lowest) for _ in rows]
    for row, line in zip(rows, cells, strict=True):
        fullest = max((bin.elements for bin in row.histogram.bins), default=1)
        for bin in row.histogram.bins:
            line[bin.exponent - lowest] = 100 * bin.elements / fullest
    mesh = ax.pcolormesh(
        list(range(lowest, highest + 1)),
        range(len(rows) + 1),
        cells,
        cmap="Greys",
        norm=PowerNorm(0.5, vmin=0, vmax=100),
    )
    label = "share of the row's fullest cell [%]"
    ax.figure.colorbar(mesh, ax=ax, label=label, pad=0.02, ticks=[0, 5, 25, 50, 75, 100])
    marked = _draw_edges(ax, report)
    ax.set_xlim(min(lowest, *marked) - 2, max(highest, *marked) + 2)
    ax.set_ylim(len(rows), 0)
    size = min(_LARGEST_TEXT, max(_SMALLEST_TEXT, _TEXT_OF_ALL / len(rows)))
    ax.set_yticks([number + 0.5 for number in range(len(rows))])
    ax.set_yticklabels([row.name for row in rows], fontsize=size)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("log$_2$ of the magnitude of a gradient, without scaling")
    return ax


def _draw_edges(ax: Any, report: GradientReport) -> list[float]:
    """Draws the edges of the format, and returns where they are."""
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
    for start, end, name in ((flush, normal, "subnormal"), (normal, overflow, "normal")):
        _write_above(ax, (start + end) / 2, name)
    _write_above(ax, flush, f"zero in {known.name} ", align="right")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    return [edge for _, _, edges in groups for edge in edges]


def _write_above(ax: Any, x: float, text: str, align: str = "center") -> None:
    ax.text(
        x,
        1.01,
        text,
        transform=ax.get_xaxis_transform(),
        horizontalalignment=align,
        verticalalignment="bottom",
        fontsize="small",
    )
