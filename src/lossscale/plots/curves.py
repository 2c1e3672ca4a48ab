"""A loss scale over steps; lines are told apart without colour too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lossscale.errors import ArgumentError
from lossscale.packages import require

# Okabe and Ito's colours, which stay apart for colour-blind readers. Their greys differ less
# than the dashes and markers do, so every line has all three.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": ":", "marker": "X"},
    {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    {"color": "#009E73", "linestyle": "-.", "marker": "^"},
)
"""Arguments of `Axes.plot` for the first, second, ... line of a drawing."""


def line_style(index: int) -> dict[str, Any]:
    """Returns the style of line number `index`, counted from 0."""
    return dict(LINES[index % len(LINES)])


def axes_or_new(ax: Any | None) -> Any:
    """Returns `ax`, or the Axes of a new pyplot figure if it is None."""
    if ax is not None:
        return ax
    require("matplotlib")
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


_FEW_POINTS = 10_000
"""With more, to look for the place where a legend covers least takes matplotlib seconds."""


def add_legend(ax: Any, **settings: Any) -> None:
    """Adds a legend, where it covers least unless there are too many points to look for that."""
    points = sum(len(line.get_xdata()) for line in ax.lines)
    ax.legend(loc="best" if points <= _FEW_POINTS else "upper right", **settings)


def level_ends(steps: Sequence[int], scales: Sequence[float]) -> tuple[list[int], list[float]]:
    """Leaves out points in the middle of a level stretch, which a long run has many of."""
    last = len(scales) - 1
    kept = [
        index
        for index, scale in enumerate(scales)
        if index in (0, last) or not scales[index - 1] == scale == scales[index + 1]
    ]
    return [steps[index] for index in kept], [scales[index] for index in kept]


def plot_scales(
    scales: Sequence[float],
    skipped: Sequence[bool] | None = None,
    ax: Any | None = None,
    *,
    steps: Sequence[int] | None = None,
    label: str = "loss scale",
    style: int = 0,
) -> Any:
    """Draws a loss scale over the steps, with a mark on each step that was skipped.

    Args:
        scales: The loss scale that each step was taken with, dimensionless.
        skipped: Whether each step was skipped; as long as `scales`. By default none was.
        ax: The matplotlib Axes to draw on. By default a new pyplot figure. Call the function
            again with the same Axes to compare runs.
        steps: The numbers of the steps, ascending; as long as `scales`. By default 1, 2, ...
        label: The name of the line in the legend.
        style: Number of the line style, counted from 0.

    Returns:
        The Axes. Its vertical axis has a logarithmic scale of base 2.

    Raises:
        ArgumentError: If `skipped` or `steps` differs from `scales` in length. It is a
            `ValueError`.
    """
    require("matplotlib")
    from matplotlib.ticker import MaxNLocator

    for name, beside in (("skipped", skipped), ("steps", steps)):
        if beside is not None and len(beside) != len(scales):
            raise ArgumentError(
                f"`scales` and `{name}` must have the same length. "
                f"Received: lengths {len(scales)} and {len(beside)}."
            )
    ax = axes_or_new(ax)
    # A line of one point would not be seen.
    look = {**line_style(style), **({} if len(scales) == 1 else {"marker": "None"})}
    steps = range(1, len(scales) + 1) if steps is None else steps
    ends = level_ends(steps, scales)
    ax.plot(*ends, label=label, drawstyle="steps-mid", linewidth=1.8, **look)
    marked = [index for index, skip in enumerate(skipped or ()) if skip]
    if marked:
        ax.plot(
            [steps[index] for index in marked],
            [scales[index] for index in marked],
            label="skipped step",
            linestyle="None",
            marker="x",
            markersize=8,
            markeredgewidth=2,
            color="#000000",
            zorder=3,
        )
    ax.set_yscale("log", base=2)
    # One step alone would otherwise be drawn on an axis of hundredths.
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.grid(alpha=0.3)
    add_legend(ax)
    return ax
