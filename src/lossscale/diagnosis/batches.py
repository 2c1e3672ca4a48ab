"""The first batches of what a user has, and what is said of a batch that cannot be used."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lossscale.checks import checked_number
from lossscale.errors import ArgumentError, ArgumentTypeError


def check_batches(batches: Any, arrays: tuple[type[Any], ...]) -> None:
    """Checks that there are several batches where one would look alike.

    Args:
        batches: What should be an iterable of batches.
        arrays: What a framework keeps a batch, or a part of one, in.

    Raises:
        ArgumentTypeError: If it is one batch, or nothing to iterate over. It is a `TypeError`.
    """
    one = isinstance(batches, (*arrays, Mapping)) or (
        isinstance(batches, tuple) and any(isinstance(part, arrays) for part in batches)
    )
    if one or not hasattr(batches, "__iter__"):
        shape = f" of shape {tuple(batches.shape)}" if isinstance(batches, arrays) else ""
        raise ArgumentTypeError(
            "`batches` must be an iterable of batches, such as a list or a DataLoader; one batch "
            f"is [batch]. Received: a {type(batches).__name__}{shape}."
        )


def first_batches(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """Yields the first batches.

    Args:
        batches: The batches.
        most: How many at most.

    Raises:
        ArgumentError: If there is none. It is a `ValueError`.
    """
    empty = True
    for batch in itertools.islice(iter(batches), most):
        empty = False
        yield batch
    if empty:
        raise ArgumentError(f"There is no batch in `batches`, of type {type(batches).__name__}.")


def checked_tolerance(tolerance: Any) -> float:
    """Returns how wrong a gradient may be, as a share of it.

    Raises:
        ArgumentError: If it is no number between 0 and 1. It is a `ValueError`.
    """
    number = checked_number("tolerance", tolerance)
    if not 0 < number < 1:
        raise ArgumentError(
            "`tolerance` must be a number between 0 and 1, such as 0.1 for 10 %. "
            f"Received: tolerance={tolerance!r}."
        )
    return number
