"""What is written around a drawing: names of ranges above it, its legend below it, long names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

_SIZE = 8.5
_LINE = 12.0
_LEGEND_BELOW = 34.0
"""In points; the legend is below the numbers and the label of the horizontal axis."""


class Range(NamedTuple):
    """A part of a horizontal axis, and what it is called."""

    start: float
    end: float
    name: str


def write_above(ax: Any, ranges: Sequence[Range]) -> None:
    """Writes the names of ranges above an Axes, in as many lines as they need to stay apart.

    Args:
        ax: The matplotlib Axes, whose limits are set.
        ranges: The ranges, from left to right.
    """
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import offset_copy

    left, right = ax.get_xlim()
    points = ax.get_window_extent().width * 72 / ax.figure.dpi
    # How far each line is written, in points. The layout may still make the axes a third narrower.
    ends: list[float] = []
    for each in ranges:
        middle = 0.67 * points * ((each.start + each.end) / 2 - left) / (right - left)
        width = TextPath((0, 0), each.name, size=_SIZE).get_extents().width + _SIZE
        start = min(max(middle - width / 2, 0.0), 0.67 * points - width)
        line = next((n for n, end in enumerate(ends) if end <= start), len(ends))
        ends[line : line + 1] = [start + width]
        # Names at an edge begin or end there, so that they do not stick out.
        align = "center"
        if start > middle - width / 2:
            align = "left"
        elif start < middle - width / 2:
            align = "right"
        x = {"left": left, "right": right}.get(align, (each.start + each.end) / 2)
        lifted = offset_copy(
            ax.get_xaxis_transform(), fig=ax.figure, y=3 + _LINE * line, units="points"
        )
        ax.text(
            x,
            1,
            each.name,
            transform=lifted,
            horizontalalignment=align,
            verticalalignment="bottom",
            fontsize=_SIZE,
        )


def legend_below(ax: Any, columns: int) -> None:
    """Puts the legend below an Axes, at the same distance whatever the height of the Axes.

    Args:
        ax: The matplotlib Axes.
        columns: How many names stand side by side.
    """
    from matplotlib.transforms import offset_copy

    below = offset_copy(ax.transAxes, fig=ax.figure, y=-_LEGEND_BELOW, units="points")
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=below,
        borderaxespad=0.0,
        ncols=columns,
        frameon=False,
    )


def shortened(names: Sequence[str], length: int) -> list[str]:
    """Returns names without their middles, where they are too long; different ones stay different.

    Args:
        names: Names, such as the paths of variables. The end of a path says most.
        length: How many characters may be left of each.

    Example:
        >>> shortened(["encoder/attention/query/kernel", "head/bias"], 20)
        ['encode…/query/kernel', 'head/bias']
        >>> shortened([f"encoder/block_{n}/attention/query/kernel" for n in (1, 2)], 24)
        ['…/block_1/…/query/kernel', '…/block_2/…/query/kernel']
    """
    short = [_without_middle(name, length, (length - 1) // 3) for name in names]
    for alike in _alike(names, short).values():
        for index in alike:
            tail = _where_they_differ(names[index], [names[other] for other in alike])
            short[index] = _without_middle(tail, length, 0)
    for alike in _alike(names, short).values():
        for number, index in enumerate(alike, start=1):
            mark = f"({number}) "
            short[index] = mark + _without_middle(short[index], length - len(mark), 0)
    return short


def _alike(names: Sequence[str], short: Sequence[str]) -> dict[str, list[int]]:
    """Where different names have become the same text, by that text."""
    places: dict[str, list[int]] = {}
    for index, text in enumerate(short):
        places.setdefault(text, []).append(index)
    return {
        text: found for text, found in places.items() if len({names[index] for index in found}) > 1
    }


def _where_they_differ(name: str, others: Sequence[str]) -> str:
    """The parts of a path that tell it apart from others, and its end."""
    columns = zip_longest(*(other.split("/") for other in others))
    parts = name.split("/")
    kept = [
        part if len(set(column)) > 1 or number >= len(parts) - 2 else ""
        for number, (part, column) in enumerate(zip(parts, columns, strict=False))
    ]
    # An ellipsis stands for the parts that are left out, however many.
    text = "/".join(part or "…" for part in kept)
    while "…/…" in text:
        text = text.replace("…/…", "…")
    return text


def _without_middle(name: str, length: int, front: int) -> str:
    return name if len(name) <= length else f"{name[:front]}…{name[front + 1 - length :]}"
