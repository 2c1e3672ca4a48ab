"""How far gradients as they were computed in a narrow format are from a reference, in sums.

The sums of several batches, and of several variables, add up. So no gradient is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from lossscale.errors import ArgumentError

_PIECE = 2**20


class Deviation(NamedTuple):
    """What a narrow format made of one gradient h, beside the reference g; both without scale.

    Elements that are not finite, in one or the other, are counted and are in no sum.

    Attributes:
        elements: How many elements were compared.
        largest: The largest |g|.
        mass: The sum of |g|.
        lost_mass: The sum of |g| where h is exactly 0.
        square: The sum of g**2.
        found_square: The sum of h**2.
        product: The sum of g * h.
        error_square: The sum of (h - g)**2.
        nonfinite: How many elements of h are not finite where g is.
        reference_nonfinite: How many elements of g are not finite.

    Example:
        >>> both = deviation([1.0, 3.0], [0.0, 4.0 * 2], scale=2)
        >>> both.lost, round(both.error, 3), round(both.cosine, 3)
        (0.25, 0.447, 0.949)
    """

    elements: int = 0
    largest: float = 0.0
    mass: float = 0.0
    lost_mass: float = 0.0
    square: float = 0.0
    found_square: float = 0.0
    product: float = 0.0
    error_square: float = 0.0
    nonfinite: int = 0
    reference_nonfinite: int = 0

    @property
    def lost(self) -> float:
        """The share of the sum of |g| where h is exactly 0, from 0 to 1."""
        return self.lost_mass / self.mass if self.mass else 0.0

    @property
    def error(self) -> float:
        """||h - g|| / ||g||, from 0; 0 if g is zero."""
        return math.sqrt(self.error_square / self.square) if self.square else 0.0

    @property
    def cosine(self) -> float:
        """The cosine of the angle between h and g, from -1 to 1; 0 if one of them is zero."""
        length = math.sqrt(self.square) * math.sqrt(self.found_square)
        return max(-1.0, min(1.0, self.product / length)) if length else 0.0

    @classmethod
    def total(cls, several: Iterable[Deviation]) -> Deviation:
        """Returns the deviation of several batches, or of several variables, together."""
        found = list(several)
        sums = {name: sum(getattr(each, name) for each in found) for name in cls._fields}
        largest = max((each.largest for each in found), default=0.0)
        return cls(**sums)._replace(largest=largest)


def deviation(
    reference: Any, found: Any, *, scale: float = 1.0, reference_scale: float = 1.0
) -> Deviation:
    """Compares a gradient in a narrow format with its reference.

    Args:
        reference: The gradient of the loss times `reference_scale`, in float32 or wider; an array
            of any shape. None if the loss does not depend on the variable.
        found: The gradient of the loss times `scale`, in the dtype in which it was formed; an
            array of the same shape, also of a dtype of `ml_dtypes`. None counts as zeros.
        scale: The loss scale of `found`. It is divided by in float32.
        reference_scale: That of `reference`, mostly 1.

    Raises:
        ArgumentError: If the shapes differ. It is a `ValueError`.
    """
    import numpy as np

    from lossscale.diagnostics.exponents import exact_float32

    if reference is None:
        return Deviation()
    wanted = np.asarray(reference)
    given = np.zeros_like(wanted) if found is None else np.asarray(found)
    if wanted.shape != given.shape:
        raise ArgumentError(
            "A gradient must have the shape of its reference. "
            f"Received: {given.shape}, and {wanted.shape} as the reference."
        )
    expected, computed = exact_float32(wanted), exact_float32(given)
    pieces = []
    for start in range(0, expected.size, _PIECE):
        g: Any = expected[start : start + _PIECE].astype(np.float64) / reference_scale
        h: Any = computed[start : start + _PIECE]
        h = (h / h.dtype.type(scale)).astype(np.float64)
        usable, there = np.isfinite(h), np.isfinite(g)
        nonfinite = int(np.count_nonzero(there & ~usable))
        if nonfinite or not there.all():
            g, h = g[usable & there], h[usable & there]
        size = np.abs(g)
        pieces.append(
            Deviation(
                elements=int(there.size),
                largest=float(size.max(initial=0.0)),
                mass=float(size.sum()),
                lost_mass=float(size[h == 0].sum()),
                square=float(g @ g),
                found_square=float(h @ h),
                product=float(g @ h),
                error_square=float((h - g) @ (h - g)),
                nonfinite=nonfinite,
                reference_nonfinite=int(there.size - np.count_nonzero(there)),
            )
        )
    return Deviation.total(pieces)
