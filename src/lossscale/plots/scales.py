"""The loss scale over the steps of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lossscale.errors import ArgumentError
from lossscale.packages import require
from lossscale.plots.style import axes_or_new, line_style


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
    ax.plot(steps, scales, label=label, drawstyle="steps-mid", linewidth=1.8, **look)
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
    ax.legend()
    return ax
