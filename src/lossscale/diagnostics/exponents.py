"""How many elements of an array have which exponent."""

from __future__ import annotations

from typing import Any, NamedTuple


class ExponentHistogram(NamedTuple):
    """Counts of the elements of an array by exponent.

    An element x belongs to the exponent e with 2**e <= |x| < 2**(e + 1). Multiplying an array
    by 2**k moves its histogram up by k, so one histogram answers for every loss scale that is
    a power of two.

    Attributes:
        exponents: int64 array of shape (n,), ascending; every exponent from the lowest to the
            highest that occurs.
        counts: int64 array of shape (n,), in elements.
        zeros: Number of elements that are zero.
        infs: Number of elements that are infinite.
        nans: Number of elements that are not numbers.
    """

    exponents: Any
    counts: Any
    zeros: int
    infs: int
    nans: int

    def scaled(self, power: int) -> ExponentHistogram:
        """Returns the histogram of the same array times 2**power.

        Example:
            >>> exponent_histogram([1.0, 2.0]).scaled(-3).exponents.tolist()
            [-3, -2]
        """
        return self._replace(exponents=self.exponents + power)


def exponent_histogram(values: Any) -> ExponentHistogram:
    """Counts the elements of an array by floor(log2|x|).

    Args:
        values: Array of any shape, of a floating-point dtype up to float64, or nested
            sequences of numbers.

    Returns:
        The counts. Exponents come from the bits and not from a logarithm, so they are exact,
        also for subnormal numbers.

    Example:
        >>> histogram = exponent_histogram([0.0, 1.0, -1.5, 8.0, float("inf")])
        >>> histogram.exponents.tolist(), histogram.counts.tolist()
        ([0, 1, 2, 3], [2, 0, 0, 1])
        >>> histogram.zeros, histogram.infs, histogram.nans
        (1, 1, 0)
    """
    import numpy as np

    # Every narrower format is exact in float64, and there none of its numbers is subnormal.
    magnitudes = np.abs(np.asarray(values).astype(np.float64)).ravel()
    counted = magnitudes[np.isfinite(magnitudes) & (magnitudes != 0)]
    exponents = np.frexp(counted)[1].astype(np.int64) - 1
    if exponents.size:
        lowest = int(exponents.min())
        counts = np.bincount(exponents - lowest).astype(np.int64)
    else:
        lowest, counts = 0, np.zeros(0, np.int64)
    return ExponentHistogram(
        exponents=np.arange(lowest, lowest + counts.size, dtype=np.int64),
        counts=counts,
        zeros=int(np.count_nonzero(magnitudes == 0)),
        infs=int(np.count_nonzero(np.isinf(magnitudes))),
        nans=int(np.count_nonzero(np.isnan(magnitudes))),
    )
