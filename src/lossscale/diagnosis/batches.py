"""Takes the first batches of the user's data, and checks them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from lossscale.checks import checked_number
from lossscale.errors import ArgumentError, ArgumentTypeError

NO_NUMBERS = "OSUTMm"
"""The kinds of NumPy's dtypes for objects, texts and times."""
_SEED = 0
"""Of the choice of samples: the same data give the same batches."""


class Batch(NamedTuple):
    """A batch of one Keras training step: arrays in the structures of the model's inputs."""

    x: Any
    y: Any = None
    sample_weight: Any = None


def check_batches(batches: Any, arrays: tuple[type[Any], ...]) -> None:
    """Checks that an iterable has batches, and is not a batch itself.

    Args:
        batches: What should be an iterable of batches.
        arrays: What a framework keeps a batch, or a part of one, in.

    Raises:
        ArgumentTypeError: If it is one batch, or nothing to iterate over.
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
        ArgumentError: If there is none.
    """
    empty = True
    for batch in itertools.islice(iter(batches), most):
        empty = False
        yield batch
    if empty:
        raise ArgumentError(
            "`batches` must contain at least one batch. Received: an empty "
            f"{type(batches).__name__}."
        )


def batches_of(
    x: Any,
    y: Any,
    sample_weight: Any,
    class_weight: Mapping[int, float] | None = None,
    *,
    batches: int,
    batch_size: int,
) -> Iterator[Batch]:
    """Yields a few batches of what `fit` of Keras takes.

    Args:
        x: Arrays, in a list or dictionary if the model has several inputs; or an iterable of
            batches (x,), (x, y) or (x, y, sample_weight), such as a `tf.data.Dataset` or a list of
            tuples; or, without `y`, one such batch, a tuple.
        y: Arrays of as many rows, or None.
        sample_weight: The same.
        class_weight: Number of a class to the weight of its samples, 1 for others; or None.
        batches: How many batches at most.
        batch_size: Rows of each batch; of an iterable, its own number.

    Yields:
        Of arrays, batches of rows that are picked at random without repetition, always the same.
        Of an iterable its first batches.

    Raises:
        ArgumentError: If there are no rows or their numbers differ, or an iterable comes with `y`.
    """
    alone = y is None and sample_weight is None
    if alone and type(x) is tuple and 2 <= len(x) <= 3:
        found: Iterable[Batch] = _given([x])
    elif type(x) is list and x and all(type(each) is tuple for each in x):
        found = _given(first_batches(x, batches))
    elif isinstance(x, (list, tuple)) or (isinstance(x, Mapping) and x) or _is_array(x):
        found = _picked(Batch(x, y, sample_weight), batches, batch_size)
    elif alone:
        found = _given(first_batches(x, batches))
    else:
        raise ArgumentError(
            "If `x` is an iterable of batches, `y` and `sample_weight` must be None. Received: "
            f"`x` of type {type(x).__name__}. Put them into the batches: (x, y, sample_weight)."
        )
    for batch in found:
        yield batch if class_weight is None else _weighted(batch, class_weight)


def leaves(structure: Any) -> Iterator[Any]:
    """Yields the arrays in lists and dictionaries, in their order; None is left out."""
    if isinstance(structure, Mapping):
        structure = list(structure.values())
    if isinstance(structure, (list, tuple)):
        for part in structure:
            yield from leaves(part)
    elif structure is not None:
        yield structure


def _picked(data: Batch, batches: int, batch_size: int) -> Iterator[Batch]:
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
    for number in range(min(batches, max(rows // batch_size, 1))):
        # Ascending, because h5py reads rows in no other order.
        chosen = np.sort(order[number * batch_size : (number + 1) * batch_size])

        def pick(leaf: Any, chosen: Any = chosen) -> Any:
            return _narrowed(_as_array(leaf)[chosen])

        yield Batch(*(_mapped(pick, part) for part in data))


def _given(batches: Iterable[Any]) -> Iterator[Batch]:
    for found in batches:
        parts = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if not 1 <= len(parts) <= 3:
            raise ArgumentError(
                "Each batch must be (x,), (x, y) or (x, y, sample_weight). "
                f"Received: {len(parts)} parts."
            )
        yield Batch(*(_mapped(lambda leaf: _narrowed(np.asarray(leaf)), part) for part in parts))


def _weighted(batch: Batch, class_weight: Mapping[int, float]) -> Batch:
    """A batch with the sample weights that `fit` makes of the weights of classes."""
    if not hasattr(batch.y, "shape"):
        raise ArgumentError(
            "`class_weight` needs a model with one output and class targets. Received: targets of "
            f"type {type(batch.y).__name__}."
        )
    y = batch.y
    if y.ndim > 1:
        y = y.argmax(axis=-1) if y.shape[-1] != 1 else y.squeeze(-1)
    weights = np.vectorize(lambda each: class_weight.get(int(each), 1.0))(np.round(y))
    own = 1.0 if batch.sample_weight is None else batch.sample_weight
    return batch._replace(sample_weight=(weights * own).astype(np.float32))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") or hasattr(x, "iloc")


def _as_array(leaf: Any) -> Any:
    # Data that is read from a file row by row must not be loaded whole.
    by_row = type(leaf).__module__.partition(".")[0] in ("numpy", "h5py")
    return leaf if by_row and len(leaf.shape) else np.atleast_1d(np.asarray(leaf))


def _narrowed(array: Any) -> Any:
    """A float64 array as float32, as Keras' `fit` does; others as they are."""
    if getattr(array, "dtype", None) != np.float64:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32)


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    if isinstance(structure, Mapping):
        return {key: _mapped(function, part) for key, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        mapped = [_mapped(function, part) for part in structure]
        return tuple(mapped) if isinstance(structure, tuple) else mapped
    return None if structure is None else function(structure)


def checked_tolerance(tolerance: Any) -> float:
    """Returns the largest accepted relative error of a gradient.

    Raises:
        ArgumentError: If it is not a number between 0 and 1.
    """
    number = checked_number("tolerance", tolerance)
    if not 0 < number < 1:
        raise ArgumentError(
            "`tolerance` must be a number between 0 and 1, such as 0.1 for 10%. "
            f"Received: tolerance={tolerance!r}."
        )
    return number
