"""A few batches of a data set, for whatever has to look at gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from lossscale.errors import ArgumentError

_SEED = 0
"""Of the choice of samples: the same data give the same batches."""


class Batch(NamedTuple):
    """What one training step is given: arrays in the structures that the model takes."""

    x: Any
    y: Any
    sample_weight: Any

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return len(next(leaves(self.x)))


def batches_of(
    x: Any, y: Any, sample_weight: Any, *, batches: int, batch_size: int
) -> Iterator[Batch]:
    """Yields a few batches.

    Args:
        x: Arrays, in a list or dictionary if the model has several inputs, or an iterable of
            batches (x,), (x, y) or (x, y, sample_weight), such as a `tf.data.Dataset`.
        y: Arrays of as many rows, or None.
        sample_weight: The same.
        batches: How many batches at most.
        batch_size: Rows of each batch; of an iterable, its own number.

    Yields:
        Of arrays, batches of rows that are picked at random without repetition, always the same.
        Of an iterable its first batches.

    Raises:
        ArgumentError: If there are no rows or their numbers differ, or an iterable comes with `y`.
    """
    if not _is_arrays(x):
        yield from _from_iterable(x, y, sample_weight, batches)
        return
    data = Batch(x, y, sample_weight)
    lengths = {
        name: sorted({len(_as_array(leaf)) for leaf in leaves(value)})
        for name, value in data._asdict().items()
        if value is not None
    }
    found = {length for each in lengths.values() for length in each}
    if len(found) != 1 or not lengths.get("x") or 0 in found:
        described = ", ".join(f"{name}: {each or 'nothing'}" for name, each in lengths.items())
        raise ArgumentError(
            "`x`, `y` and `sample_weight` must have the same number of rows, at least one. "
            f"Received: rows {described}."
        )
    rows = found.pop()
    order = np.random.default_rng(_SEED).permutation(rows)
    whole = max(rows // batch_size, 1)
    for number in range(min(batches, whole)):
        # Ascending, because files such as those of h5py can be read in no other order.
        chosen = np.sort(order[number * batch_size : (number + 1) * batch_size])

        def pick(leaf: Any, chosen: Any = chosen) -> Any:
            return narrowed(_as_array(leaf)[chosen])

        yield Batch(*(_mapped(pick, part) for part in data))


def narrowed(array: Any) -> Any:
    """Returns a float64 array as float32, as Keras' `fit` does; others as they are."""
    return array.astype(np.float32) if getattr(array, "dtype", None) == np.float64 else array


def _from_iterable(x: Any, y: Any, sample_weight: Any, batches: int) -> Iterator[Batch]:
    if y is not None or sample_weight is not None:
        raise ArgumentError(
            "With an iterable of batches as `x`, `y` and `sample_weight` must be None: the batches "
            f"bring their own. Received: `x` of type {type(x).__name__}."
        )
    empty = True
    for found in itertools.islice(iter(x), batches):
        parts = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if not 1 <= len(parts) <= 3:
            raise ArgumentError(
                "Each batch must be (x,), (x, y) or (x, y, sample_weight). "
                f"Received: {len(parts)} parts."
            )
        arrays = (_mapped(lambda leaf: narrowed(np.asarray(leaf)), part) for part in parts)
        yield Batch(*arrays, *[None] * (3 - len(parts)))
        empty = False
    if empty:
        raise ArgumentError(f"There is no batch in `x`, of type {type(x).__name__}.")


def _is_arrays(x: Any) -> bool:
    if isinstance(x, Mapping):
        return bool(x)
    if isinstance(x, (list, tuple)):
        return True
    return hasattr(x, "shape") or hasattr(x, "iloc")


def _as_array(leaf: Any) -> Any:
    # What is read from a file row by row must not be read as a whole.
    by_row = type(leaf).__module__.partition(".")[0] in ("numpy", "h5py")
    return leaf if by_row and len(leaf.shape) else np.atleast_1d(np.asarray(leaf))


def leaves(structure: Any) -> Iterator[Any]:
    """Yields the arrays in lists and dictionaries, in their order; None is no array."""
    if isinstance(structure, Mapping):
        for part in structure.values():
            yield from leaves(part)
    elif isinstance(structure, (list, tuple)):
        for part in structure:
            yield from leaves(part)
    elif structure is not None:
        yield structure


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    if isinstance(structure, Mapping):
        return {key: _mapped(function, part) for key, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        mapped = [_mapped(function, part) for part in structure]
        return tuple(mapped) if isinstance(structure, tuple) else mapped
    return None if structure is None else function(structure)
