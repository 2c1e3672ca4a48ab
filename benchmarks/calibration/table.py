"""The table of the trainings, and whether it bears the verdicts out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.calibration.training import Row
from lossscale.diagnostics.powers import power_of_two

_WAYS = ("float32", "without scaling", "recommended scale", "dynamic scale")


def table(rows: Sequence[Row]) -> str:
    """Returns a Markdown table, one row for each training."""
    heads = ("training", "outputs", "verdict", "quality", *(way for way in _WAYS))
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        unit = row.quality.removeprefix("sparse_categorical_").replace("_", " ")
        cells = [row.task, _power(row.outputs), row.verdict, unit]
        cells += [_cell(row, way) for way in _WAYS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _power(outputs: int) -> str:
    return power_of_two(outputs) if outputs > 1024 else str(outputs)


def _cell(row: Row, way: str) -> str:
    if way not in row.outcomes:
        return "-"
    outcome = row.outcomes[way]
    shown = f"{outcome.quality:.1%}" if row.higher_is_better else f"{outcome.quality:.3g}"
    if fails(row, way):
        shown = f"**{shown}**"
    if way == "recommended scale" and row.scale is not None:
        shown += f" ({power_of_two(row.scale)})"
    return shown


def fails(row: Row, way: str) -> bool:
    """Whether a way to train ends worse than float32, by more than luck."""
    reached = row.outcomes[way].quality
    worse = row.outcomes["float32"].quality - reached
    # A NaN is worse than anything.
    return math.isnan(reached) or (worse if row.higher_is_better else -worse) > row.noise


def contradictions(rows: Sequence[Row]) -> list[str]:
    """Returns what the trainings say against the verdicts, a sentence each; none if all is well."""
    found = []
    for row in rows:
        name = f"{row.task}, {_power(row.outputs)} outputs"
        trains = not fails(row, "without scaling")
        if row.verdict == "required" and trains:
            found.append(f"{name}: required, but it trains without scaling")
        if row.verdict == "not needed" and not trains:
            found.append(f"{name}: not needed, but it fails without scaling")
        if row.scale is None:
            found.append(f"{name}: {row.verdict}, with no scale")
        found += [
            f"{name}: it fails with the {way}"
            for way in ("recommended scale", "dynamic scale")
            if way in row.outcomes and fails(row, way)
        ]
    return found
