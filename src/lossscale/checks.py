"""Checks of arguments that several functions have."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable
from typing import TypeVar

from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleError
from lossscale.framework_types import Scalar

_R = TypeVar("_R")

LARGEST_SCALE = 2.0**126
"""Largest loss scale: above it the reciprocal is not a normal float32 number."""

SMALLEST_SCALE = 2.0**-126
"""Smallest loss scale: the smallest normal float32 number."""

LONGEST_INTERVAL = 2**31 - 1
"""Longest growth interval: the largest number of a 32-bit counter."""


def checked_parameters(parameters: Iterable[object] | None, trained: Iterable[_R]) -> list[_R]:
    """Returns the trained parameters that are among some, in their order.

    Args:
        parameters: The parameters that an optimizer trains; None for all.
        trained: All parameters of the model that can be trained.

    Raises:
        ArgumentTypeError: If `parameters` is not an iterable.
        ArgumentError: If none of them is one of the model.

    Examples:
        >>> one, other = object(), object()
        >>> checked_parameters([other], [one, other]) == [other]
        True
    """
    if parameters is None:
        return list(trained)
    wanted = "`parameters` must be trainable parameters of the model, such as those of a layer."
    if not hasattr(parameters, "__iter__"):
        raise ArgumentTypeError(f"{wanted} Received: a {type(parameters).__name__}.")
    given = list(parameters)
    owned = set(map(id, given))
    found = [each for each in trained if id(each) in owned]
    if not found:
        kinds = " and ".join(sorted({type(each).__name__ for each in given})) or "nothing"
        raise ArgumentError(f"{wanted} Received: {kinds}, and none of them is one.")
    return found


def checked_count(name: str, value: Scalar, *, lowest: int = 1) -> int:
    """Returns `value` as an int.

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        lowest: The lowest valid integer.

    Raises:
        ArgumentError: If it is not an integer, or below `lowest`.
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


def checked_number(name: str, value: Scalar) -> float:
    """Returns `value` as a float; it may be infinite or NaN.

    Raises:
        ArgumentError: If it is not a number.
    """
    # float() would accept "8" and True.
    if not isinstance(value, (bool, str, bytes)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise ArgumentError(
        f"`{name}` must be a number. Received: {name}={value!r} of type {type(value).__name__}."
    )


def checked_above_zero(name: str, value: Scalar) -> float:
    """Returns `value` as a float that is finite and above 0.

    Raises:
        ArgumentError: If it is not such a number.
    """
    number = checked_number(name, value)
    if not 0 < number < math.inf:
        raise ArgumentError(
            f"`{name}` must be a finite number above 0. Received: {name}={value!r}."
        )
    return number


def checked_scale(name: str, value: Scalar) -> float:
    """Returns `value` as a float that can be a loss scale.

    Args:
        name: The argument's name, for the message.
        value: The value to check.

    Raises:
        ArgumentError: If it is not a number in [2**-126, 2**126].
    """
    number = checked_number(name, value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ArgumentError(
            f"`{name}` must be a positive number from 2**-126 to 2**126. Received: "
            f"{name}={value!r}. It and its reciprocal must be normal float32 numbers."
        )
    return number


def checked_interval(name: str, value: Scalar) -> int:
    """Returns `value` as an int that can be a growth interval.

    Raises:
        ArgumentError: If it is not a whole number from 1 to 2**31 - 1.
    """
    try:
        # A whole number may be written as a float, such as 2e3.
        is_whole = getattr(value, "is_integer", bool)
        number = int(value) if is_whole() else operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or not 1 <= number <= LONGEST_INTERVAL:
        raise ArgumentError(
            f"`{name}` must be an integer number of steps from 1 to 2**31 - 1. "
            f"Received: {name}={value!r} of type {type(value).__name__}."
        )
    return number


def checked_truth(name: str, value: object, error: type[LossScaleError] = ArgumentError) -> bool:
    """Returns `value` as a bool; accepts NumPy's booleans too.

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        error: The class of the error.

    Raises:
        LossScaleError: If it is neither True nor False.
    """
    # 1 and 0 are not accepted.
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise error(
        f"`{name}` must be True or False. Received: {name}={value!r} of type "
        f"{type(value).__name__}."
    )
