"""What the drawings have in common: a style per line, told apart without colour too."""

from __future__ import annotations

from typing import Any

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
