"""Sets an optimizer of Keras 3 from the numbered arrays of a file.

Files of Keras' own LossScaleOptimizer lack what an optimizer sets as attributes in `build`, such as
Nadam's product: it builds its inner optimizer with attribute tracking off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lossscale.errors import OldFileError
from lossscale.old_formats import kind_of
from lossscale.packages import warn

# Keras' own LossScaleOptimizer writes these before the inner optimizer's variables.
_KERAS_OWN = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


def begins_as_keras_own(arrays: Sequence[Any]) -> bool:
    """Whether numbered arrays begin like those of Keras 3's own LossScaleOptimizer.

    It writes a step count, a learning rate, and another count. In other Keras optimizers the third
    array is a slot, which is a floating-point array.

    Args:
        arrays: The arrays, or anything with their `shape` and `dtype`, in the order of the file.

    Examples:
        >>> import numpy as np
        >>> counts, numbers = np.array(3), np.array(0.5)
        >>> begins_as_keras_own([counts, numbers, counts, numbers])
        True
        >>> begins_as_keras_own([counts, numbers, numbers])
        False
    """
    first = [(tuple(array.shape), array.dtype.kind in "iu") for array in arrays[:3]]
    return first == [((), True), ((), False), ((), True)]


def can_load(optimizer: Any, count: int) -> bool:
    """Whether a file with this many arrays can be one of the inner optimizer."""
    inner, ahead = len(optimizer.inner_optimizer.variables), len(_KERAS_OWN)
    lacking = len(_places_files_may_lack(optimizer, count, 0, ahead))
    return count in (inner, inner + ahead, inner - lacking, inner + ahead - lacking)


def load_arrays(optimizer: Any, arrays: Sequence[Any]) -> None:
    """Sets the inner optimizer's variables, and the loss scale if Keras' own class wrote it.

    Args:
        optimizer: The loss scale optimizer.
        arrays: As many as `can_load` allows.

    Raises:
        OldFileError: If a shape does not fit. Nothing is changed then.
    """
    inner = optimizer.inner_optimizer
    listed, ahead = len(inner.variables), len(_KERAS_OWN) if begins_as_keras_own(arrays) else 0
    lacking = _places_files_may_lack(optimizer, len(arrays), ahead)
    missing = listed + ahead - len(arrays)
    # Several optimizers in one begin alike.
    ahead = ahead if missing in (0, len(lacking)) else 0
    own, arrays = dict(zip(_KERAS_OWN, arrays[:ahead], strict=False)), arrays[ahead:]
    if lacking and missing == len(lacking):
        arrays = _completed(arrays, lacking, inner)
    for variable, value in zip(inner.variables, arrays, strict=True):
        if tuple(variable.shape) != tuple(value.shape):
            raise OldFileError(
                f"The optimizer's variable {variable.name!r} has the shape "
                f"{tuple(variable.shape)}, and {tuple(value.shape)} in the file. Nothing was "
                "changed."
            )
    if own:
        set_scale(optimizer, own)
    inner.load_own_variables({str(number): value for number, value in enumerate(arrays)})


def set_scale(optimizer: Any, values: Mapping[str, Any]) -> None:
    """Sets the state of the rule, moved into its range, from numbers by their names in files."""
    optimizer._state.write(optimizer._state.restored(values))


def nadam_product(beta_1: float, steps: int) -> float:
    """Returns the product of momentums of a new Nadam after a number of applied steps.

    Args:
        beta_1: The setting of the optimizer.
        steps: Number of applied steps.

    Examples:
        >>> nadam_product(0.5, 0), nadam_product(0.5, 1)
        (1.0, 0.26)
    """
    factors = (beta_1 * (1.0 - 0.5 * 0.96**step) for step in range(1, steps + 1))
    return math.prod(factors, start=1.0)


def _places_files_may_lack(optimizer: Any, count: int, *ahead: int) -> list[int]:
    inner = optimizer.inner_optimizer
    whole = count in [len(inner.variables) + more for more in ahead]
    if not optimizer.built or whole or hasattr(inner, "optimizers"):
        return []
    return _places_of_attributes(inner, optimizer._trainable_variables)


def _places_of_attributes(inner: Any, trained: Sequence[Any]) -> list[int]:
    """Returns which of an optimizer's variables its `build` sets as attributes, by their places."""
    # Only `build` shows which attribute lists a variable, so a second optimizer is built.
    twin = type(inner).from_config(inner.get_config())
    added = {id(variable) for variable in twin.variables}
    track = twin._track_variable

    def track_and_note(variable: Any) -> None:
        added.add(id(variable))
        track(variable)

    twin.__dict__["_track_variable"] = track_and_note
    twin.build(list(trained))
    return [place for place, variable in enumerate(twin.variables) if id(variable) not in added]


def _completed(values: Sequence[Any], lacking: list[int], inner: Any) -> list[Any]:
    """Returns the values of a file with those that it lacks."""
    arrays, variables = iter(values), inner.variables
    filled = [
        variable.numpy() if place in lacking else next(arrays)
        for place, variable in enumerate(variables)
    ]
    missing = [variables[place] for place in lacking]
    product = getattr(inner, "_u_product", None)
    if kind_of(inner) == "Nadam" and [id(v) for v in missing] == [id(product)]:
        # These files count applied steps only, so the value can be computed.
        steps = int(filled[0])
        filled[lacking[0]] = np.asarray(nadam_product(float(inner.beta_1), steps), "float32")
    # For a variable with one axis, this is a placeholder that no step reads.
    elif not (type(inner).__name__ == "Adafactor" and not any(len(v.shape) for v in missing)):
        names = sorted({variable.path for variable in missing})
        warn(
            f"The file has no values for the variables {names} of {type(inner).__name__}: Keras' "
            "own LossScaleOptimizer does not write them. They stay as they are."
        )
    return filled
