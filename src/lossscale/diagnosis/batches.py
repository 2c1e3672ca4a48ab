"""Takes batches from the data that `fit` of Keras accepts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from lossscale.checks import checked_count
from lossscale.errors import ArgumentError

_SEED = 0
"""Of the choice of rows: the same data give the same batches."""


class Batch(NamedTuple):
    """A batch of one Keras training step: arrays in the structures of the model's inputs."""

    x: Any
    y: Any = None
    sample_weight: Any = None


def batches_of(x: Any, y: Any, sample_weight: Any, batch_size: int) -> Iterable[Batch]:
    """Returns batches of the arguments of `diagnose`, which describes them.

    Returns:
        From arrays, batches of rows that are picked at random without repetition, always the same
        ones. From an iterable, its batches.

    Raises:
        ArgumentError: If there are no rows or their numbers differ, or an iterable comes with `y`.
    """
    checked_count("batch_size", batch_size)
    are_batches = type(x) is list and x and all(type(each) is tuple for each in x)
    if (isinstance(x, (list, tuple, Mapping)) and not are_batches) or hasattr(x, "shape"):
        return _picked(Batch(x, y, sample_weight), batch_size)
    if y is not None or sample_weight is not None:
        raise ArgumentError(
            "If `x` is an iterable of batches, `y` and `sample_weight` must be None. Received: "
            f"`x` of type {type(x).__name__}. Put them into the batches: (x, y, sample_weight)."
        )
    return map(_given, x)


def _picked(data: Batch, batch_size: int) -> Iterator[Batch]:
    data = _mapped(np.atleast_1d, data)
    lengths = {
        name: sorted({len(leaf) for leaf in keras.tree.flatten(part) if leaf is not None})
        for name, part in data._asdict().items()
        if part is not None
    }
    found = {length for each in lengths.values() for length in each}
    if len(found) != 1 or not lengths["x"] or 0 in found:
        described = ", ".join(f"{name}: {each or 'nothing'}" for name, each in lengths.items())
        raise ArgumentError(
            "`x`, `y` and `sample_weight` must have the same number of rows, at least one. "
            f"Received: rows {described}."
        )
    order = np.random.default_rng(_SEED).permutation(found.pop())
    for start in range(0, max(len(order) - batch_size, 0) + 1, batch_size):
        rows = order[start : start + batch_size]
        yield _mapped(functools.partial(_rows_of, rows), data)


def _rows_of(rows: Any, array: Any) -> Any:
    return _narrowed(array[rows])


def _given(batch: Any) -> Batch:
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise ArgumentError(
            "Each batch must be (x,), (x, y) or (x, y, sample_weight). "
            f"Received: {len(parts)} parts."
        )
    return _mapped(lambda leaf: _narrowed(np.asarray(leaf)), Batch(*parts))


def _mapped(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """Applies a function to each array of a batch."""
    mapped: Batch = keras.tree.map_structure(
        lambda leaf: None if leaf is None else function(leaf), batch
    )
    return mapped


def _narrowed(array: Any) -> Any:
    """A float64 array as float32, as `fit` of Keras makes it; other arrays unchanged."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32) if array.dtype == np.float64 else array
