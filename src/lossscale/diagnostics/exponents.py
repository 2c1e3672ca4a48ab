"""The table of exponents: what is counted of an array, in whole numbers and by its bits.

One row for each binary exponent e, of the elements with 2**e <= |x| < 2**(e + 1), and three rows
for zeros, infinities and NaNs. Its columns are

- the number of elements;
- the sum of their fractions f, in units of 2**-23, where |x| = (1 + f) * 2**e.

A float32 number has a fraction of 23 bits, so both columns are exact; fractions of float64
are rounded to 23 bits. All of it is integers: sums do not depend on the order in which a device
adds, never stall, and are the same on every framework. Numbers are told apart by their bits,
because compiled code may take subnormal ones for zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

FRACTION_BITS = 23
"""How many bits of a fraction are summed."""

ZEROS, INFS, NANS = 0, 1, 2
"""The rows behind the last exponent."""


class Layout(NamedTuple):
    """Where a format keeps its parts, and the rows of its table.

    Attributes:
        fraction_bits: The bits of the fraction.
        exponent_bits: The bits of the exponent.
    """

    fraction_bits: int
    exponent_bits: int

    @property
    def lowest(self) -> int:
        """The exponent of the smallest subnormal number, which has the first row."""
        return 2 - (1 << (self.exponent_bits - 1)) - self.fraction_bits

    @property
    def exponents(self) -> int:
        """How many exponents have a row."""
        return self.fraction_bits + (1 << self.exponent_bits) - 2

    @property
    def rows(self) -> int:
        """The rows of the table."""
        return self.exponents + 3


FLOAT32 = Layout(23, 8)
"""Of every format up to 32 bits: each of their numbers is one of float32."""

FLOAT64 = Layout(52, 11)


class ExponentTable(NamedTuple):
    """The table of an array, and its largest finite magnitude.

    Attributes:
        counts: Integers of shape (rows, 2): `Layout.rows` rows, and the columns above.
        largest: The bits of the largest finite magnitude as an integer, of float64 in a table of
            float64 and otherwise of float32; 0 if there is none above zero.
    """

    counts: Any
    largest: Any


def layout_of(rows: int) -> Layout:
    """Returns the layout whose tables have so many rows."""
    return {layout.rows: layout for layout in (FLOAT32, FLOAT64)}[rows]


def table_of(values: Any) -> ExponentTable:
    """Counts the elements of a NumPy array.

    Args:
        values: float32 or float64 array of any shape.

    Returns:
        int64 counts, of the layout of the array's dtype.
    """
    import numpy as np

    wide = values.dtype == np.float64
    layout = FLOAT64 if wide else FLOAT32
    integer = np.int64 if wide else np.int32
    bits: Any = np.ascontiguousarray(values).ravel().view(integer)
    bits = bits & np.iinfo(integer).max
    counts = np.zeros((layout.rows, 2), np.int64)
    largest = 0
    # A piece at a time: the intermediate arrays stay small, and sums of float64 numbers exact.
    for start in range(0, bits.size, 2**20):
        piece = bits[start : start + 2**20]
        row, fraction = _rows_and_fractions(piece, layout)
        counts[:, 0] += np.bincount(row, minlength=layout.rows)
        counts[:, 1] += np.bincount(row, fraction, layout.rows).astype(np.int64)
        finite = piece[row < layout.exponents]
        largest = max(largest, int(finite.max(initial=0)))
    return ExponentTable(counts, largest)


def _rows_and_fractions(bits: Any, layout: Layout) -> tuple[Any, Any]:
    """The row of each magnitude, and its fraction in units of 2**-23 as float32; 0 of specials."""
    import numpy as np

    fraction_bits, float_type = layout.fraction_bits, np.dtype(f"f{bits.dtype.itemsize}")
    mask = (1 << fraction_bits) - 1
    exponent, fraction = bits >> fraction_bits, bits & mask
    row = exponent + (fraction_bits - 1)
    # As a number of its own the fraction of a subnormal number is normal, and so are its parts.
    subnormal = (exponent == 0) & (fraction != 0)
    own_bits = fraction.astype(float_type).view(bits.dtype)
    bias = 2 ** (layout.exponent_bits - 1) - 1
    row = np.where(subnormal, (own_bits >> fraction_bits) - bias, row)
    fraction = np.where(subnormal, own_bits & mask, fraction)
    special = exponent == 2**layout.exponent_bits - 1
    row = np.where(special, layout.exponents + np.where(fraction == 0, INFS, NANS), row)
    row = np.where(bits == 0, layout.exponents + ZEROS, row)
    fraction = np.where(special, 0, fraction)
    dropped = fraction_bits - FRACTION_BITS
    if dropped:
        fraction = (fraction + (1 << (dropped - 1))) >> dropped
    return row, fraction.astype(np.float32)


def exact_float32(values: Any) -> Any:
    """Returns an array of a narrower format, or of integers, as float32 or float64 without loss.

    Args:
        values: NumPy array of real or complex numbers, also of a dtype of `ml_dtypes`.

    Returns:
        float32 or float64 array, of one dimension; of complex numbers both parts.

    Raises:
        TypeError: If the array does not hold numbers.
    """
    import numpy as np

    if values.dtype.kind == "c":
        values = np.stack([values.real, values.imag])
    if values.dtype.kind in "biu":
        values = values.astype(np.float64)
    # The kind of the dtypes of ml_dtypes is not that of numbers.
    if values.dtype.kind not in "fV" or values.dtype.itemsize > 8 or values.dtype.names:
        raise TypeError(values.dtype.name)
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    return values.astype(values.dtype.newbyteorder("="), copy=False).ravel()
