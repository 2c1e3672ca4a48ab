"""Compares the training runs of a model with its verdict, for every framework."""

from __future__ import annotations

import math
from typing import Any

WAYS = ("unscaled", "default", "advised")
"""The ways to train in float16."""
FAILS = 0.05
"""A training has failed whose quality has lost this share of what float32 gained."""


def regret(row: dict[str, Any], way: str) -> float:
    """The share of what float32 gained that a way to train has lost; NaN is infinite."""
    lost = row[way] - row["float32"]
    found = lost / abs(row["untrained"] - row["float32"])
    return math.inf if math.isnan(found) else found


def contradiction(row: dict[str, Any]) -> str:
    """The contradiction of the training runs to the verdict; "alarm" for an unneeded scale."""
    fails = {way: regret(row, way) > FAILS for way in WAYS if way in row}
    if row["verdict"] == "not needed":
        return "WRONG" if fails["unscaled"] else ""
    if row["verdict"] == "needed":
        return "WRONG" if fails["advised"] else "" if fails["unscaled"] else "alarm"
    if row["verdict"] == "unknown":
        return ""
    return "" if fails["unscaled"] and fails["default"] else "WRONG"
