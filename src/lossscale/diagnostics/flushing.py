"""Which share of an array a number format turns into zero.

Only an element that was not zero can be flushed. Half of the gradients behind a ReLU are zero in
any format, and do not count.
"""

from __future__ import annotations

from typing import Any

from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.errors import ArgumentError
from lossscale.packages import require


def share_flushed(values: Any, scale: float = 1.0, format: str | NumberFormat = "float16") -> float:
    """Predicts the share of elements that become zero when they are scaled and rounded.

    Args:
        values: Reference gradients, not scaled: an array of any shape whose own format did not
            flush them, such as float32. From gradients that were computed in float16 without
            scaling the answer cannot be known.
        scale: The loss scale, dimensionless.
        format: The format to round to, a key of `FORMATS`.

    Returns:
        The number of elements with 0 < scale * |x| <= `flush_edge`, divided by the number of
        finite elements that are not zero, from 0 to 1. 0 if there is none.

    Raises:
        ArgumentError: If `format` is not known. It is a `ValueError`.

    Example:
        >>> share_flushed([0.0, 2.0**-25, 2.0**-24, 1.0])
        0.3333333333333333
        >>> share_flushed([0.0, 2.0**-25, 2.0**-24, 1.0], scale=2)
        0.0
    """
    require("numpy")
    import numpy as np

    edge = number_format(format).flush_edge
    # The product of two float32 numbers is exact in float64.
    magnitudes = np.abs(np.asarray(values).astype(np.float64))
    counted = magnitudes[np.isfinite(magnitudes) & (magnitudes != 0)]
    if not counted.size:
        return 0.0
    return float(np.count_nonzero(counted * scale <= edge) / counted.size)


def share_zeroed(reference: Any, values: Any) -> float:
    """Measures the share of elements that are zero, and are not zero in a reference.

    Unlike `share_flushed` this sees what was lost on the way as well: a gradient of a weight is
    zero also when the gradients it is computed from were flushed.

    Args:
        reference: The gradients in a format that does not flush them, such as float32; an
            array of any shape.
        values: The same gradients as they were computed in the narrow format; an array of the
            same shape. Their scale does not matter.

    Returns:
        The number of elements that are zero in `values` and not in `reference`, divided by the
        number that are not zero in `reference`, from 0 to 1. 0 if there is none. An element of
        the reference that is not finite is left out.

    Raises:
        ArgumentError: If the shapes differ. It is a `ValueError`.

    Example:
        >>> share_zeroed([0.0, 1e-9, 0.5, 0.25], [0.0, 0.0, 0.5, 0.25])
        0.3333333333333333
    """
    require("numpy")
    import numpy as np

    expected, found = np.asarray(reference), np.asarray(values)
    if expected.shape != found.shape:
        raise ArgumentError(
            "`reference` and `values` must have the same shape. "
            f"Received: shapes {expected.shape} and {found.shape}."
        )
    counted = np.isfinite(expected) & (expected != 0)
    if not counted.any():
        return 0.0
    return float(np.count_nonzero(counted & (found == 0)) / np.count_nonzero(counted))
