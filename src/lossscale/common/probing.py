"""Fidelity during training: measured now and then on one batch, at the scale in use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lossscale.diagnostics.deviation import Deviation

Probe = Callable[[float], dict[str, dict[str, float]]]
"""Given a loss scale, returns what float16 makes of each variable's gradient, for a record."""

_AROUND = ("Exception encountered", "in user code", "File ", "Arguments received", "Call arguments")


def described(
    found: Mapping[str, Deviation], layers: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Returns what was found of each variable, for a record.

    Args:
        found: The deviation of each variable.
        layers: The name of each variable to that of its layer.
    """
    largest: dict[str, float] = {}
    for name, layer in layers.items():
        largest[layer] = max(largest.get(layer, 0.0), found[name].largest)
    return {
        name: {
            "lost": found[name].lost,
            "error": found[name].error,
            "cosine": found[name].cosine,
            "nonfinite": found[name].nonfinite,
            "share": found[name].largest / (largest[layer] or 1.0),
        }
        for name, layer in layers.items()
    }


def said_by(error: BaseException) -> str:
    """The line of an error that says what is wrong, and not where."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # What AutoGraph and Keras put around an error of a layer.
    inner = [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    plain = [line for line in lines if not line.startswith(_AROUND)]
    said = (inner[-1:] or plain[:1] or [type(error).__name__])[0][:200]
    return said if said.endswith(".") else f"{said}."
