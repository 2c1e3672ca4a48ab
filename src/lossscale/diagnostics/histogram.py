"""The histogram of a gradient by binary exponents, and what it says about every loss scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from lossscale import registry
from lossscale.checks import checked_number
from lossscale.diagnostics.bins import ExponentBin, times_power
from lossscale.diagnostics.exponents import (
    FLOAT64,
    FRACTION_BITS,
    INFS,
    NANS,
    ZEROS,
    ExponentTable,
    exact_float32,
    layout_of,
    table_of,
)
from lossscale.diagnostics.format_fit import FormatFit
from lossscale.diagnostics.json_forms import Conversion, JsonForm
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.packages import require


@dataclasses.dataclass(frozen=True)
class GradientHistogram(FormatFit):
    """How many elements of a gradient have which binary exponent, and what they sum up to.

    Multiplying by 2**k moves a histogram up by k. So one histogram of gradients that were not
    scaled, taken in a format that did not flush them, answers every question about every loss scale
    and every number format. Answers about powers of two are exact, up to the tie: elements that
    are exactly `flush_edge` of the format (divided by the scale) become zero, and are taken to stay
    unless the largest element is one of them. For other scales the edge lies inside a bin, whose
    elements are then taken to be spread evenly over log2|x|.

    The sums are kept as integers, so `+` is exact, associative and commutative.

    Attributes:
        bins: The bins that have elements, by ascending exponent.
        zeros: How many elements are zero.
        infs: How many are infinite.
        nans: How many are not numbers.
        amax: The largest finite magnitude, exactly; 0.0 if none is above zero.

    Example:
        >>> histogram = GradientHistogram.from_array([0.0, 2.0**-26, 3 * 2.0**-26, 1.0])
        >>> [(bin.exponent, bin.elements) for bin in histogram.bins]
        [(-26, 1), (-25, 1), (0, 1)]
        >>> histogram.flushed_count("float16"), histogram.flushed_count("float16", scale=4.0)
        (0.3333333333333333, 0.0)
    """

    bins: tuple[ExponentBin, ...] = ()
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    amax: float = 0.0

    def __post_init__(self) -> None:
        bins = tuple(ExponentBin(*(_whole(number) for number in bin)) for bin in self.bins)
        exponents = [bin.exponent for bin in bins]
        if exponents != sorted(set(exponents)):
            raise ArgumentError(
                f"`bins` must have ascending exponents, each once. Received: exponents {exponents}."
            )
        for bin in bins:
            # Fractions are below one unit of the exponent, and rounding can bring them up to it.
            most = bin.elements << FRACTION_BITS
            if bin.elements < 1 or not 0 <= bin.fractions <= most:
                raise ArgumentError(
                    "Each bin must have elements from 1 up, and fractions up to elements * 2**23. "
                    f"Received: {bin}."
                )
        object.__setattr__(self, "bins", bins)
        for name in ("zeros", "infs", "nans"):
            count = _whole(getattr(self, name))
            if count < 0:
                raise ArgumentError(f"`{name}` must not be negative. Received: {name}={count}.")
            object.__setattr__(self, name, count)
        amax = checked_number("amax", self.amax)
        top = math.frexp(amax)[1] - 1 if 0 < amax < math.inf else None
        if not amax >= 0 or top != (exponents[-1] if exponents else None):
            raise ArgumentError(
                "`amax` must lie in the last bin, and be 0.0 if there is none. "
                f"Received: amax={self.amax!r}, exponents {exponents}."
            )
        object.__setattr__(self, "amax", amax)

    @classmethod
    def from_array(cls, values: Any) -> GradientHistogram:
        """Counts the elements of an array, on the host.

        Args:
            values: Array of any shape and floating-point dtype up to float64, those of `ml_dtypes`
                included; a tensor of TensorFlow, JAX or PyTorch, or a Keras variable; or nested
                sequences of numbers, as float64. Integers count as float64. Of complex numbers
                both parts count, of sparse gradients the values that are stored.

        Raises:
            ArgumentTypeError: If it does not hold such numbers. It is a `TypeError`.

        Example:
            >>> histogram = GradientHistogram.from_array([0.0, 1.0, -1.5, 8.0, float("inf")])
            >>> histogram.size, histogram.zeros, histogram.infs, histogram.amax
            (5, 1, 1, 8.0)
        """
        require("numpy")
        import numpy as np

        package = type(values).__module__.partition(".")[0]
        if package == "keras":
            return cls.from_array(values.value)
        counting = registry.exponents_for(package)
        if counting is not None:
            return cls.from_table(counting.on_host(counting.count_bins(values)))
        array = np.asarray(values)
        try:
            numbers = exact_float32(array)
        except TypeError:
            raise ArgumentTypeError(
                "A histogram is made from real or complex numbers of at most 64 bits for each "
                f"part. Received: {type(values).__name__} of dtype {array.dtype.name}."
            ) from None
        return cls.from_table(table_of(numbers))

    @classmethod
    def from_table(cls, table: ExponentTable) -> GradientHistogram:
        """Returns the histogram of a table that was counted on the host or on a device.

        Args:
            table: Its counts as a NumPy array or nested lists of integers, its `largest` as an
                integer.

        Example:
            >>> import numpy as np
            >>> from lossscale.diagnostics.exponents import table_of
            >>> GradientHistogram.from_table(table_of(np.float32([4.0, 6.0]))).mass
            10.0
        """
        require("numpy")
        import numpy as np

        counts = np.asarray(table.counts).tolist()
        layout = layout_of(len(counts))
        kinds = np.dtype(np.float64 if layout == FLOAT64 else np.float32)
        amax = np.array(int(table.largest), f"u{kinds.itemsize}").view(kinds)
        zeros, infs, nans = (
            int(counts[layout.exponents + kind][0]) for kind in (ZEROS, INFS, NANS)
        )
        bins = (
            ExponentBin(layout.lowest + row, *(int(number) for number in counts[row]))
            for row in range(layout.exponents)
            if counts[row][0]
        )
        return cls(tuple(bins), zeros, infs, nans, float(amax))

    @classmethod
    def merge(cls, histograms: Iterable[GradientHistogram]) -> GradientHistogram:
        """Returns the histogram of the elements of several gradients together.

        Args:
            histograms: Any number of histograms; of none the result is empty.

        Example:
            >>> merged = GradientHistogram.merge([GradientHistogram.from_array([1.0])] * 3)
            >>> merged.size, merged.mass
            (3, 3.0)
        """
        histograms = list(histograms)
        sums: dict[int, list[int]] = {}
        for histogram in histograms:
            for bin in histogram.bins:
                found = sums.setdefault(bin.exponent, [0, 0])
                for column, number in enumerate(bin[1:]):
                    found[column] += number
        return cls(
            tuple(ExponentBin(exponent, *sums[exponent]) for exponent in sorted(sums)),
            sum(histogram.zeros for histogram in histograms),
            sum(histogram.infs for histogram in histograms),
            sum(histogram.nans for histogram in histograms),
            max((histogram.amax for histogram in histograms), default=0.0),
        )

    def __add__(self, other: GradientHistogram) -> GradientHistogram:
        if not isinstance(other, GradientHistogram):
            return NotImplemented
        return self.merge([self, other])

    def scaled(self, power: int) -> GradientHistogram:
        """Returns the histogram of the same gradient times 2**power, in a format without limits.

        Args:
            power: An integer.

        Raises:
            ArgumentError: If float64 cannot hold the largest element.

        Example:
            >>> GradientHistogram.from_array([1.0, 3.0]).scaled(-3).amax
            0.375
        """
        return dataclasses.replace(
            self,
            bins=tuple(bin._replace(exponent=bin.exponent + power) for bin in self.bins),
            amax=times_power(self.amax, power),
        )

    @property
    def size(self) -> int:
        """How many elements there are."""
        return self.nonzeros + self.zeros + self.infs + self.nans

    @property
    def mass(self) -> float:
        """The sum of |x| over the finite elements."""
        return math.fsum(bin.mass for bin in self.bins)

    def to_json(self) -> str:
        """Returns the histogram as JSON; `from_json` gives back an equal one.

        Example:
            >>> GradientHistogram.from_array([1.0, 0.0]).to_json()
            '{"bins": [[0, 1, 0]], "zeros": 1, "infs": 0, "nans": 0, "amax": 1.0}'
        """
        return _FORM.text(self)

    @classmethod
    def from_json(cls, text: str) -> GradientHistogram:
        """Returns the histogram that `to_json` wrote.

        Raises:
            ArgumentError: If the text is none. It is a `ValueError`.

        Example:
            >>> histogram = GradientHistogram.from_array([1.0, 2.0**-149])
            >>> GradientHistogram.from_json(histogram.to_json()) == histogram
            True
        """
        return _FORM.from_text(text)

    def to_dict(self) -> dict[str, Any]:
        """Returns what `to_json` writes, as a dictionary of lists and numbers."""
        return _FORM.write(self)

    @classmethod
    def from_dict(cls, read: Any) -> GradientHistogram:
        """Returns the histogram that `to_dict` describes.

        Raises:
            ArgumentError: If it does not describe one. It is a `ValueError`.
        """
        return _FORM.read(read)


_FORM = JsonForm(
    cls=GradientHistogram,
    what="a histogram",
    subject="the JSON of a histogram",
    conversions={
        "bins": Conversion(
            lambda bins: [list(bin) for bin in bins],
            lambda bins: tuple(ExponentBin(*bin) for bin in bins),
        )
    },
)


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise ArgumentTypeError(
            f"The numbers of a histogram must be integers. Received: {number!r} of type "
            f"{type(number).__name__}."
        )
    return number
