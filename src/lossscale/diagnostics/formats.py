"""The range of the number formats that gradients are kept in.

The numbers are written out, so that nothing has to be imported to know them. The tests compare
each with what `ml_dtypes` and NumPy round to.
"""

from __future__ import annotations

import dataclasses

from lossscale.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format, seen from the magnitudes that fall out of it.

    Rounding is to the nearest number, and to the even one of two that are equally near.

    Attributes:
        name: Its name in `ml_dtypes`, NumPy and Keras.
        max: The largest finite number.
        min_normal: The smallest number with full precision.
        min_subnormal: The smallest number above zero.
        overflow_edge: The magnitude half a step above `max`.
        edge_overflows: Whether `overflow_edge` itself is rounded out of the format. Where it is
            not, only larger magnitudes are.

    Example:
        >>> FLOAT16.max, FLOAT16.flush_edge == 2**-25, FLOAT16.overflow_edge
        (65504.0, True, 65520.0)
    """

    name: str
    max: float
    min_normal: float
    min_subnormal: float
    overflow_edge: float
    edge_overflows: bool = True

    @property
    def flush_edge(self) -> float:
        """The largest magnitude that is rounded to zero: half of `min_subnormal`."""
        return self.min_subnormal / 2


FLOAT16 = NumberFormat("float16", 65504.0, 2.0**-14, 2.0**-24, overflow_edge=65520.0)

BFLOAT16 = NumberFormat(
    "bfloat16",
    max=(2.0 - 2.0**-7) * 2.0**127,
    min_normal=2.0**-126,
    min_subnormal=2.0**-133,
    overflow_edge=(2.0 - 2.0**-8) * 2.0**127,
)

FLOAT8_E5M2 = NumberFormat("float8_e5m2", 57344.0, 2.0**-14, 2.0**-16, overflow_edge=61440.0)

# 464 lies between 448 and the code of NaN; of the two, 448 is even.
FLOAT8_E4M3FN = NumberFormat(
    "float8_e4m3fn", 448.0, 2.0**-6, 2.0**-9, overflow_edge=464.0, edge_overflows=False
)

FORMATS: dict[str, NumberFormat] = {
    format.name: format for format in (FLOAT16, BFLOAT16, FLOAT8_E5M2, FLOAT8_E4M3FN)
}
"""The known formats by name."""


def number_format(format: str | NumberFormat) -> NumberFormat:
    """Returns the format of this name.

    Args:
        format: A key of `FORMATS`, or a format, which is returned as it is.

    Raises:
        ArgumentError: If the name is not known. It is a `ValueError`.

    Example:
        >>> number_format("float16").max
        65504.0
    """
    if isinstance(format, NumberFormat):
        return format
    try:
        return FORMATS[format]
    except (KeyError, TypeError):
        raise ArgumentError(
            f"`format` must be one of {', '.join(FORMATS)}. Received: format={format!r}."
        ) from None
