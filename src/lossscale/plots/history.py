"""A training run: its loss scale, its skipped steps and its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lossscale.monitoring.record import SkipReason, StepRecord
from lossscale.packages import require
from lossscale.plots.curves import LINES, add_legend, plot_scales

# Told apart by their shape; the colours are a help. The last are drawn on top.
_LOSS_MARKER = {"marker": "|", "markersize": 9, "color": "#000000"}
_MARKERS: dict[SkipReason, tuple[str, dict[str, Any]]] = {
    SkipReason.LOSS: ("loss not finite", _LOSS_MARKER),
    SkipReason.UNKNOWN: (
        "reason not recorded",
        {"marker": "+", "markersize": 8, "color": LINES[2]["color"]},
    ),
    SkipReason.FLOOR: (
        "not finite at the lowest scale",
        {"marker": "v", "markersize": 7, "color": LINES[1]["color"], "markerfacecolor": "#FFFFFF"},
    ),
    SkipReason.OVERFLOW: (
        "gradients overflowed",
        {"marker": "x", "markersize": 7, "color": "#000000"},
    ),
}
_LOG_AXIS_FROM = 100


def plot_history(
    records: Sequence[StepRecord], ax: Any | None = None, loss_ax: Any | None = None
) -> Any:
    """Draws the loss scale of a run, its skipped steps by reason, and its loss.

    Args:
        records: Those of the run.
        ax: The matplotlib Axes for the scale and the skips. By default a new pyplot figure, with
            a second Axes below for the loss, if it is known.
        loss_ax: The Axes for the loss. With an `ax` and no `loss_ax` the loss is not drawn.

    Returns:
        The Axes of the scale. Its vertical axis has a logarithmic scale of base 2. That of the
        loss has one of base 10 if all losses are positive and their range is wider than 100. A
        loss that is not finite is marked at the upper edge.
    """
    has_loss = any(record.loss is not None for record in records)
    if ax is None:
        require("matplotlib")
        from matplotlib import pyplot

        _, panels = pyplot.subplots(
            2 if has_loss else 1,
            sharex=True,
            squeeze=False,
            figsize=(7, 5.5 if has_loss else 3.5),
            height_ratios=[3, 2] if has_loss else None,
            layout="constrained",
        )
        ax = panels[0, 0]
        loss_ax = panels[-1, 0] if has_loss else None
    _draw_scale(records, ax)
    if loss_ax is not None:
        _draw_loss(records, loss_ax)
        if loss_ax in ax.get_shared_x_axes().get_siblings(ax):
            ax.set_xlabel("")
    return ax


def _draw_scale(records: Sequence[StepRecord], ax: Any) -> None:
    steps = [record.step for record in records]
    plot_scales([record.scale for record in records], None, ax, steps=steps)
    for reason, (label, look) in _MARKERS.items():
        marked = [record for record in records if record.reason is reason]
        if marked:
            ax.plot(
                [record.step for record in marked],
                [record.scale for record in marked],
                label=f"skipped: {label} ({len(marked)})",
                linestyle="None",
                markeredgewidth=1.6,
                zorder=3,
                **look,
            )
    ax.margins(y=0.12)
    add_legend(ax, fontsize="small")


def _draw_loss(records: Sequence[StepRecord], ax: Any) -> None:
    known = [(record.step, record.loss) for record in records if record.loss is not None]
    finite = [loss for _, loss in known if math.isfinite(loss)]
    look = {**LINES[2], "linestyle": "-", "markersize": 4}
    # A NaN interrupts the line; an infinity would stretch the axis.
    drawn = [loss if math.isfinite(loss) else math.nan for _, loss in known]
    around = [math.nan, *drawn, math.nan]
    # A point without neighbours is no line, and needs a mark to be seen.
    alone = [
        index
        for index in range(len(drawn))
        if math.isnan(around[index]) and math.isnan(around[index + 2])
    ]
    steps = [step for step, _ in known]
    ax.plot(steps, drawn, linewidth=1.4, label="loss", markevery=alone, **look)
    lost = [step for step, loss in known if not math.isfinite(loss)]
    if lost:
        ax.plot(
            lost,
            [0.96] * len(lost),
            transform=ax.get_xaxis_transform(),
            label=f"not finite ({len(lost)})",
            linestyle="None",
            markeredgewidth=1.6,
            **_LOSS_MARKER,
        )
    add_legend(ax, fontsize="small")
    if finite and min(finite) > 0 and max(finite) > _LOG_AXIS_FROM * min(finite):
        ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.grid(alpha=0.3)
