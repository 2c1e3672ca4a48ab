"""Where the first value arises that is not finite, where no loss scale helps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lossscale.diagnosis.passes import LOSS, MODEL, Output, Pass, Run

_LOW = 2.0**-24
"""A gradient that overflows at this scale overflows by something else than the scale."""
_FINITE = Output(0.0, True)


def origin(run: Run, batch: Any, scale: float) -> str:
    """Says what gives infinities or NaN that no loss scale takes away.

    A forward pass is the same at every scale. What float16 loses there to infinity is wrong even
    where an operation after it hides that. Gradients are looked at where a scale cannot be to
    blame. Two watched passes, the second in float32.

    Args:
        run: Computes a pass.
        batch: What to look at.
        scale: The loss scale in use.

    Returns:
        Such as "4 (matmul) gives inf in float16"; "" if it is the scale.
    """
    with np.errstate(all="ignore"):
        narrow = run(batch, min(scale, _LOW), True, watch=True)
        wide = run(batch, 1.0, False, watch=True)
    for name, found in narrow.items():
        said = _origin(name, found, wide[name])
        if said:
            return said
    return ""


def _origin(name: str, narrow: Pass, wide: Pass) -> str:
    for operation, output in _operations(narrow).items():
        # What is not finite in both may be a mask of infinities.
        if not output.finite and wide.outputs.get(operation, _FINITE).finite:
            return f"{operation} gives inf in float16"
    said = _end(name, narrow)
    if not said or not _end(name, wide):
        return said and f"{said} in float16"
    first = next((op for op, output in _operations(wide).items() if not output.finite), "")
    return f"{first} is not finite, in float32 too" if first else f"{said}, in float32 too"


def _operations(found: Pass) -> Mapping[str, Output]:
    """What operations returned, and last what the model did."""
    return dict(sorted(found.outputs.items(), key=lambda item: item[0] == MODEL))


def _end(name: str, found: Pass) -> str:
    """What is not finite after the forward pass."""
    if not math.isfinite(found.loss):
        return f"the loss{'' if name == LOSS else f' {name}'} is {found.loss}"
    for variable, gradient in found.gradients.items():
        if gradient is not None and not np.isfinite(gradient).all():
            return f"the gradient of {variable} is not finite at any loss scale"
    return ""
