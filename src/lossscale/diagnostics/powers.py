"""Powers of two, as people write them."""

from __future__ import annotations

import math

_PLAIN_UP_TO = 3


def power_of_two(value: float) -> str:
    """Writes a number as a power of two, if it is one, and not one that is read at a glance.

    Args:
        value: A number above 0.

    Example:
        >>> power_of_two(1024.0), power_of_two(1000.0), power_of_two(0.5)
        ('2**10', '1000', '0.5')
    """
    mantissa, exponent = math.frexp(value)
    is_far = mantissa == 0.5 and abs(exponent - 1) > _PLAIN_UP_TO
    return f"2**{exponent - 1}" if is_far else f"{value:g}"
