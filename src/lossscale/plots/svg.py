"""Small drawings as SVG, without a library: axes, lines, markers, words."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720.0, 64.0, 12.0, 12.0, 28.0
_SHAPES = {
    "x": "M-4,-4 4,4 M-4,4 4,-4",
    "+": "M-5,0 5,0 M0,-5 0,5",
    "v": "M-5,-4 5,-4 0,5 Z",
    "|": "M0,-6 0,6",
    "o": "M-3,0 A3,3 0 1 0 3,0 A3,3 0 1 0 -3,0",
}


class Panel:
    """One pair of axes.

    Args:
        x: The lowest and the highest number of the horizontal axis.
        y: Those of the vertical one, above 0 if it is logarithmic.
        height: In pixels.
        log2: Whether the vertical axis is logarithmic, of base 2.
    """

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], height: float, *, log2: bool
    ) -> None:
        self._log2 = log2
        low, high = (math.log2(each) for each in y) if log2 else y
        margin = max(0.05 * (high - low), 0.5 if log2 else 1e-12 + 0.01 * abs(high))
        self._x, self._y = x, (low - margin, high + margin)
        self._height = height
        self._parts: list[str] = []
        self._draw_axes()

    def line(self, points: Sequence[tuple[float, float]], color: str, dash: str = "") -> None:
        """Draws a line through points."""
        drawn = " ".join(f"{self._across(x):.1f},{self._up(y):.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="1.5"'
            f' stroke-dasharray="{dash}"/>'
        )

    def marks(self, points: Sequence[tuple[float, float | None]], shape: str, color: str) -> None:
        """Draws a mark at each point; without a height at the upper edge."""
        for x, y in points:
            height = TOP + 8 if y is None else self._up(y)
            self._parts.append(
                f'<path d="{_SHAPES[shape]}" transform="translate({self._across(x):.1f},'
                f'{height:.1f})" fill="none" stroke="{color}" stroke-width="1.6"/>'
            )

    def text(self) -> str:
        """Returns the drawing."""
        return (
            f'<svg viewBox="0 0 {WIDTH:g} {self._height:g}" role="img">{"".join(self._parts)}</svg>'
        )

    def _across(self, x: float) -> float:
        low, high = self._x
        return LEFT + (x - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def _up(self, y: float) -> float:
        low, high = self._y
        share = ((math.log2(y) if self._log2 else y) - low) / (high - low)
        return self._height - BOTTOM - share * (self._height - BOTTOM - TOP)

    def _draw_axes(self) -> None:
        bottom = self._height - BOTTOM
        low, high = self._y
        step = max(1, math.ceil((high - low) / 6)) if self._log2 else (high - low) / 4
        at = math.ceil(low / step) * step
        while at <= high:
            y = self._up(2.0**at if self._log2 else at)
            words = f"2^{at:g}" if self._log2 else f"{at:.3g}"
            self._parts.append(
                f'<path d="M{LEFT:g},{y:.1f} H{WIDTH - RIGHT:g}" stroke="#ddd"/>'
                f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{escape(words)}</text>'
            )
            at += step
        for each, anchor in zip(self._x, ("start", "end"), strict=True):
            self._parts.append(
                f'<text x="{self._across(each):.1f}" y="{bottom + 18:.1f}" '
                f'text-anchor="{anchor}">{each:g}</text>'
            )


def legend_mark(shape: str, color: str) -> str:
    """Returns a mark or, for "-", a piece of a line, to stand in a legend."""
    path = "M-8,0 8,0" if shape == "-" else _SHAPES[shape]
    return (
        '<svg class="mark" viewBox="-9 -9 18 18" width="16" height="16">'
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.8"/></svg>'
    )


def escape(words: object) -> str:
    """Returns words as they stand in HTML."""
    return html.escape(str(words))
