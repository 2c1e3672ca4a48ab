"""Checks of a batch against the model that it is for, with one sentence for each mistake."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lossscale.diagnostics.batches import Batch, leaves
from lossscale.errors import ArgumentError, LossScaleError

_NO_NUMBERS = "OSUTMm"
"""The kinds of NumPy's dtypes for objects, texts and times."""


class Input(NamedTuple):
    """One of the inputs of a model.

    Attributes:
        name: Its name.
        shape: Its shape, that of the batch included; None where any number will do.
        dtype: Its dtype, as a text.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


def inputs_of(model: Any) -> list[Input]:
    """Returns the inputs of a model; none if it does not say what it takes."""
    found = []
    for tensor in getattr(model, "inputs", None) or ():
        if tensor.shape is None or getattr(tensor.shape, "rank", 0) is None:
            return []
        dtype = getattr(tensor.dtype, "name", tensor.dtype)
        found.append(Input(tensor.name, tuple(tensor.shape), str(dtype)))
    return found


def check_batch(batch: Batch, inputs: Sequence[Input], *, needs_targets: bool) -> None:
    """Checks what a model is going to be given.

    Args:
        batch: What it is given.
        inputs: What it says that it takes; none if that is not known.
        needs_targets: Whether its loss compares with targets.

    Raises:
        ArgumentError: If it cannot be given that; the message names the argument.
    """
    texts = any(each.dtype == "string" for each in inputs)
    for name, value in batch._asdict().items():
        for array in leaves(value):
            if array.dtype.kind in _NO_NUMBERS and not (name == "x" and texts):
                raise ArgumentError(
                    f"`{name}` must hold numbers. Received: an array of dtype {array.dtype}."
                )
    if batch.y is None and needs_targets:
        raise ArgumentError(
            "`y` is missing: the loss of the model compares what it returns with targets. Pass "
            "them as `y`, or in batches (x, y)."
        )
    for each, array in _paired(batch.x, inputs):
        if not fits(array.shape, each.shape):
            shape = ", ".join(str(size) for size in ("rows", *each.shape[1:]))
            raise ArgumentError(
                f"`x` must have the shape ({shape}) for the input {each.name!r}. "
                f"Received: {tuple(array.shape)}."
            )


def fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Whether Keras takes an array for an input; the first number of both is that of the rows."""
    found, wanted = tuple(shape)[1:], tuple(expected)[1:]
    # Keras adds or takes away a last dimension of 1.
    shapes = [wanted, (*wanted, 1), *([wanted[:-1]] if wanted[-1:] == (1,) else [])]
    return any(
        len(found) == len(each)
        and all(want in (None, got) for want, got in zip(each, found, strict=True))
        for each in shapes
    )


def _paired(x: Any, inputs: Sequence[Input]) -> Iterable[tuple[Input, Any]]:
    if not inputs:
        return []
    if isinstance(x, Mapping):
        # What other keys mean is for the model to say.
        return [(each, x[each.name]) for each in inputs if hasattr(x.get(each.name), "shape")]
    arrays = list(leaves(x))
    if len(arrays) != len(inputs):
        names = ", ".join(repr(each.name) for each in inputs)
        raise ArgumentError(
            f"`x` must have one array for each input of the model: {names}. "
            f"Received: {len(arrays)}."
        )
    return zip(inputs, arrays, strict=True)


@contextlib.contextmanager
def naming_targets(y: Any, y_pred: Any) -> Iterator[None]:
    """Says of an error within it that the targets do not fit, the same for every framework."""
    try:
        yield
    except LossScaleError:
        raise
    except Exception as error:
        raise ArgumentError(
            "`y` does not fit what the model returns, or not its loss. Received: "
            f"{_shapes(y)}, for outputs of {_shapes(y_pred)}."
        ) from error


def _shapes(value: Any) -> str:
    shapes = [str(tuple(leaf.shape)) for leaf in leaves(value)]
    return f"the shape{'s' * (len(shapes) > 1)} {', '.join(shapes) or 'of nothing'}"
