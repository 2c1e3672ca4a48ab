"""Accuracy per epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lossscale.packages import require
from lossscale.plots.style import axes_or_new, line_style


def plot_accuracy(curves: Mapping[str, Sequence[float]], ax: Any | None = None) -> Any:
    """Draws the accuracy of several runs, one line each.

    Args:
        curves: Name of a run to its accuracy after epoch 1, 2, ..., as shares from 0 to 1.
        ax: The matplotlib Axes to draw on. By default a new pyplot figure.

    Returns:
        The Axes.
    """
    require("matplotlib")
    from matplotlib.ticker import MaxNLocator

    ax = axes_or_new(ax)
    for index, (name, accuracy) in enumerate(curves.items()):
        epochs = range(1, len(accuracy) + 1)
        percent = [100 * share for share in accuracy]
        # The first line is the reference. It is drawn wide, so that it shows behind the others.
        width = 3.5 if index == 0 else 1.6
        ax.plot(epochs, percent, label=name, linewidth=width, markersize=5, **line_style(index))
    ax.set_xlabel("epoch")
    ax.set_ylabel("test accuracy [%]")
    ax.set_ylim(0, 102)
    # One epoch alone would otherwise be drawn on an axis of thousandths.
    ax.set_xlim(0.5, max((len(accuracy) for accuracy in curves.values()), default=1) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.grid(alpha=0.3)
    ax.legend()
    return ax
