"""A bin of a histogram: the numbers that have one binary exponent."""

from __future__ import annotations

import math
from typing import NamedTuple

from lossscale.diagnostics.exponents import FRACTION_BITS


class ExponentBin(NamedTuple):
    """The elements x with 2**exponent <= |x| < 2**(exponent + 1).

    Attributes:
        exponent: The exponent.
        elements: How many there are; at least 1.
        fractions: The sum of |x| / 2**exponent - 1 over them, in units of 2**-23. Exact for
            elements of float32 and narrower; each of a wider one is rounded to a unit.
    """

    exponent: int
    elements: int
    fractions: int

    @property
    def mass(self) -> float:
        """The sum of |x|; infinite where float64 cannot hold it.

        Example:
            >>> ExponentBin(3, 2, 2**22).mass  # 8 and 12
            20.0
        """
        return times_power(self._units, self.exponent - FRACTION_BITS)

    @property
    def _units(self) -> int:
        return (self.elements << FRACTION_BITS) + self.fractions


def times_power(number: float, exponent: int) -> float:
    """Returns number * 2**exponent, infinite where float64 cannot hold it."""
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.inf
