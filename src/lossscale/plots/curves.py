"""The plot of a run; its lines and marks differ in shape, not only in colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lossscale.errors import ArgumentError
from lossscale.monitoring.record import SkipReason, StepRecord
from lossscale.packages import require

# Okabe and Ito's colours, which colour-blind readers can distinguish. In grey they are too similar,
# so each line also has its own dashes.
_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "linestyle": "-"},
    {"color": "#D55E00", "linestyle": ":"},
    {"color": "#0072B2", "linestyle": "--"},
    {"color": "#009E73", "linestyle": "-."},
)
# The last are drawn on top.
_MARKS: dict[SkipReason, tuple[str, dict[str, Any]]] = {
    SkipReason.LOSS: ("loss not finite", {"marker": "|", "markersize": 9, "color": "#000000"}),
    SkipReason.UNKNOWN: ("reason not recorded", {"marker": "+", "color": "#0072B2"}),
    SkipReason.FLOOR: (
        "not finite at min_scale",
        {"marker": "v", "color": "#D55E00", "markerfacecolor": "#FFFFFF"},
    ),
    SkipReason.OVERFLOW: ("gradients overflowed", {"marker": "x", "color": "#000000"}),
}
_ONE_MARK = {"linestyle": "None", "markersize": 7, "markeredgewidth": 1.6, "zorder": 3}
_LOG_AXIS_FROM = 100
# With more points, matplotlib takes seconds to find the best place for the legend.
_FEW_POINTS = 10_000


def axes_or_new(ax: Any | None) -> Any:
    """Returns `ax`, or the Axes of a new pyplot figure if it is None."""
    if ax is not None:
        return ax
    require("matplotlib")
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


def plot_records(
    records: Sequence[StepRecord],
    ax: Any | None = None,
    loss_ax: Any | None = None,
    *,
    label: str = "loss scale",
    style: int = 0,
) -> Any:
    """Draws the loss scale of a run, its skipped steps by reason, and its loss.

    Args:
        records: The records of the run, from `lossscale.monitoring.read_records`.
        ax: The matplotlib Axes for the loss scale and the skips. By default a new pyplot figure,
            with a second Axes below for the loss, if it was recorded. Call the function again with
            the same Axes to compare runs.
        loss_ax: The Axes for the loss. With an `ax` and no `loss_ax` the loss is not drawn.
        label: The name of the line in the legend.
        style: The number of the line's style, counted from 0.

    Returns:
        The Axes of the loss scale. Its vertical axis is logarithmic with base 2. The vertical axis
        of the loss is logarithmic if all losses are positive and their range is wider than 100. A
        loss that is not finite is marked at the upper edge.

    Raises:
        ArgumentError: If there are no records.
    """
    require("matplotlib")
    if not records:
        raise ArgumentError("`records` must contain at least one record. Received: none.")
    has_loss = any(record.loss is not None for record in records)
    if ax is None and has_loss:
        from matplotlib import pyplot

        size = {"figsize": (7, 5.5), "height_ratios": [3, 2]}
        ax, loss_ax = pyplot.subplots(2, sharex=True, layout="constrained", **size)[1]
    ax = axes_or_new(ax)
    _draw_scale(records, ax, {"label": label, **_LINES[style % len(_LINES)]})
    if loss_ax is not None:
        _draw_loss(records, loss_ax)
        if loss_ax in ax.get_shared_x_axes().get_siblings(ax):
            ax.set_xlabel("")
    return ax


def _draw_scale(records: Sequence[StepRecord], ax: Any, line: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    scales, last = [record.scale for record in records], len(records) - 1
    # The ends of a constant stretch are enough; a long run has many steps at one scale.
    ends = [
        index
        for index, scale in enumerate(scales)
        if index in (0, last) or not scales[index - 1] == scale == scales[index + 1]
    ]
    at = [records[index].step for index in ends], [scales[index] for index in ends]
    # A line of one point would be invisible.
    marker = "None" if last else "o"
    ax.plot(*at, drawstyle="steps-mid", linewidth=1.8, marker=marker, **line)
    for reason, (meaning, look) in _MARKS.items():
        marked = [record for record in records if record.reason is reason]
        if marked:
            at = [record.step for record in marked], [record.scale for record in marked]
            ax.plot(*at, label=f"skipped: {meaning} ({len(marked)})", **{**_ONE_MARK, **look})
    ax.set_yscale("log", base=2)
    # Otherwise the axis of a single step would be in hundredths.
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.margins(y=0.12)
    _finish(ax, "loss scale")


def _draw_loss(records: Sequence[StepRecord], ax: Any) -> None:
    known = [(record.step, record.loss) for record in records if record.loss is not None]
    finite = [loss for _, loss in known if math.isfinite(loss)]
    # A NaN interrupts the line; an infinity would stretch the axis.
    drawn = [loss if math.isfinite(loss) else math.nan for _, loss in known]
    around = [math.nan, *drawn, math.nan]
    # A point without neighbours needs a marker to be visible.
    alone = [
        index
        for index, loss in enumerate(drawn)
        if math.isfinite(loss) and math.isnan(around[index]) and math.isnan(around[index + 2])
    ]
    look = {"color": "#0072B2", "marker": "s", "markersize": 4, "linewidth": 1.4}
    ax.plot([step for step, _ in known], drawn, label="loss", markevery=alone, **look)
    lost = [step for step, loss in known if not math.isfinite(loss)]
    if lost:
        look = {"transform": ax.get_xaxis_transform(), "label": f"not finite ({len(lost)})"}
        ax.plot(lost, [0.96] * len(lost), **{**_ONE_MARK, **_MARKS[SkipReason.LOSS][1]}, **look)
    if finite and min(finite) > 0 and max(finite) > _LOG_AXIS_FROM * min(finite):
        ax.set_yscale("log")
    _finish(ax, "loss")


def _finish(ax: Any, name: str) -> None:
    ax.set_xlabel("step")
    ax.set_ylabel(name)
    ax.grid(alpha=0.3)
    points = sum(len(line.get_xdata()) for line in ax.lines)
    ax.legend(loc="best" if points <= _FEW_POINTS else "upper right", fontsize="small")
