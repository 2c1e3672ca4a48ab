"""The loss scale over the steps of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lossscale.errors import ArgumentError
from lossscale.plots.style import axes_or_new, line_style


def plot_scales(
    scales: Sequence[float],
    skipped: Sequence[bool] | None = None,
    ax: Any | None = None,
    *,
    label: str = "loss scale",
    style: int = 0,
) -> Any:
    """Draws a loss scale over the steps, with a mark on each step that was skipped.

    Args:
        scales: The loss scale that step 1, 2, ... was taken with, dimensionless.
        skipped: Whether step 1, 2, ... was skipped; as long as `scales`. By default none was.
        ax: The matplotlib Axes to draw on. By default a new pyplot figure. Call the function
            again with the same Axes to compare runs.
        label: The name of the line in the legend.
        style: Number of the line style, counted from 0.

    Returns:
        The Axes. Its vertical axis has a logarithmic scale of base 2.

    Raises:
        ArgumentError: If `scales` and `skipped` differ in length. It is a `ValueError`.
    """
    if skipped is not None and len(skipped) != len(scales):
        raise ArgumentError(
            "`scales` and `skipped` must have the same length. "
            f"Received: lengths {len(scales)} and {len(skipped)}."
        )
    ax = axes_or_new(ax)
    look = {**line_style(style), "marker": "None"}
    steps = range(1, len(scales) + 1)
    ax.plot(steps, scales, label=label, drawstyle="steps-mid", linewidth=1.8, **look)
    marked = [step for step, skip in zip(steps, skipped or (), strict=False) if skip]
    if marked:
        ax.plot(
            marked,
            [scales[step - 1] for step in marked],
            label="skipped step",
            linestyle="None",
            marker="x",
            markersize=8,
            markeredgewidth=2,
            color="#000000",
            zorder=3,
        )
    ax.set_yscale("log", base=2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.grid(alpha=0.3)
    ax.legend()
    return ax
