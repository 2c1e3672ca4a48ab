"""Arguments that several diagnostics check in the same way."""

from __future__ import annotations

import math
import operator
from typing import Any

from lossscale.errors import ArgumentError


def checked_count(name: str, value: Any, *, lowest: int = 1) -> int:
    """Returns `value` as an int.

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        lowest: The lowest integer that can be used.

    Raises:
        ArgumentError: If it is no integer, or a lower one.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool) or number < lowest:
        raise ArgumentError(
            f"`{name}` must be an integer of at least {lowest}. Received: {name}={value!r}."
        )
    return number


def checked_number(name: str, value: Any) -> float:
    """Returns `value` as a float; it may be infinite or NaN.

    Raises:
        ArgumentError: If it is no number.
    """
    # float() would take "8" and True.
    if not isinstance(value, (bool, str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise ArgumentError(f"`{name}` must be a number. Received: {name}={value!r}.")


def checked_above_zero(name: str, value: Any) -> float:
    """Returns `value` as a float that is finite and above 0.

    Raises:
        ArgumentError: If it is no such number.
    """
    number = checked_number(name, value)
    if not 0 < number < math.inf:
        raise ArgumentError(
            f"`{name}` must be a finite number above 0. Received: {name}={value!r}."
        )
    return number


def checked_probability(value: Any) -> float:
    """Returns `value` as a float that can be a probability.

    Raises:
        ArgumentError: If it is no number from 0 to 1.
    """
    number = checked_number("probability", value)
    if not 0 <= number <= 1:
        raise ArgumentError(
            f"`probability` must be a number from 0 to 1. Received: probability={value!r}."
        )
    return number
