"""What float16 made of gradients, beside their reference."""

from __future__ import annotations

from typing import Any

from lossscale.checks import checked_count
from lossscale.diagnostics.report import GradientReport
from lossscale.diagnostics.report_text import reported_scales
from lossscale.diagnostics.verdict import share
from lossscale.errors import ArgumentError
from lossscale.plots.labels import legend_below, shortened
from lossscale.plots.style import LINES, axes_or_new

MOST_ROWS = 20
_LONGEST_NAME = 44
_MARKERS = ("X", "o", "s")
_SMALLEST = 1e-6
"""Where errors below it are drawn."""


def fidelity_height(report: GradientReport, rows: int = MOST_ROWS) -> float:
    """Returns how high a drawing of `plot_fidelity` must be for its names to be read, in inches.

    Args:
        report: The report to draw.
        rows: As given to `plot_fidelity`.
    """
    return 1.6 + 0.24 * max(min(len(report.measured_variables), rows), 3)


def plot_fidelity(report: GradientReport, ax: Any | None = None, *, rows: int = MOST_ROWS) -> Any:
    """Draws how wrong the gradient of each variable is in float16, the worst first.

    Args:
        report: The report of `lossscale.diagnostics.diagnose`, not made with `quick=True`.
        ax: The matplotlib Axes to draw on. By default a new pyplot figure.
        rows: How many variables to draw at most: those that are worst.

    Returns:
        The Axes. Its horizontal axis is the relative error ||h - g|| / ||g|| of the gradient h in
        float16 beside its reference g, with a mark for each loss scale; a gradient with elements
        that are not finite has none at that scale. Errors below 1e-6 are drawn there. Behind each
        name is the share of the sum of |g| that is lost to zero without scaling.

    Raises:
        ArgumentError: If fidelity was not measured, or `rows` is no number of rows. It is a
            `ValueError`.
    """
    shown = report.measured_variables[: checked_count("rows", rows)]
    if not shown:
        raise ArgumentError(
            "There is nothing to draw: the report has no fidelity. Make it with diagnose(..., "
            f"quick=False). Received: a report on {report.model!r}."
        )
    ax = axes_or_new(ax)
    for number, (scale, name) in enumerate(reported_scales(report).items()):
        points = [
            (max(variable.at[scale].error, _SMALLEST), row)
            for row, variable in enumerate(shown)
            if not variable.at[scale].nonfinite
        ]
        ax.plot(
            [error for error, _ in points],
            [row for _, row in points],
            linestyle="none",
            marker=_MARKERS[number % len(_MARKERS)],
            color=LINES[number % len(LINES)]["color"],
            # The first, behind the others, can be seen where they are the same.
            markersize=10 - 2.5 * number,
            label=name,
        )
    ax.set_xscale("log")
    ax.set_xlim(_SMALLEST / 2, 3)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    names = shortened([variable.name for variable in shown], _LONGEST_NAME)
    lost = [share(variable.unscaled.lost) for variable in shown]
    ax.set_yticks(
        range(len(shown)),
        [f"{name}  ({part} lost)" for name, part in zip(names, lost, strict=True)],
        fontsize=8,
    )
    ax.grid(axis="x", color="0.85", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_xlabel("relative error of the gradient in float16, by loss scale")
    legend_below(ax, columns=3)
    return ax
