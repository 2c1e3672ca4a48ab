"""The names of an optimizer's slots in each release, and their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# For each optimizer, groups of names of the same slot: first the name in TensorFlow's first
# optimizers, which the documents use, then the names in its new ones, in Keras 3, and of the
# attribute.
_FIRST = ("m", "momentum", "momentums", "_momentums")
_SECOND = ("v", "velocity", "_velocities")
_LARGEST = ("vhat", "velocity_hat", "_velocity_hats")
_MOMENTUM = ("momentum", "m", "momentums", "_momentums")
_ACCUMULATOR = ("accumulator", "_accumulators")
SYNONYMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "SGD": (_MOMENTUM,),
    "Lion": (_MOMENTUM,),
    "Adam": (_FIRST, _SECOND, _LARGEST),
    "AdamW": (_FIRST, _SECOND, _LARGEST),
    "Nadam": (_FIRST, _SECOND),
    "Adamax": (("m", "momentum", "_m"), ("v", "u", "norm", "_u")),
    "RMSprop": (
        ("rms", "velocity", "_velocities"),
        ("momentum", "_momentums"),
        ("mg", "average_gradient", "_average_gradients"),
    ),
    "Adagrad": (_ACCUMULATOR,),
    "Adadelta": (
        ("accum_grad", "accumulated_grad", "_accumulated_grads"),
        ("accum_var", "accumulated_delta_var", "_accumulated_delta_vars"),
    ),
    "Ftrl": (_ACCUMULATOR, ("linear", "_linears")),
}
_AVERAGE = ("average", "_model_variables_moving_average")


def kind_of(optimizer: Any) -> str | None:
    """Returns the name of the known optimizer class of an optimizer or its bases, or None."""
    return next((cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ in SYNONYMS), None)


def names_for(kind: str | None, names: Sequence[str]) -> list[str]:
    """Returns every name that a slot may have, the given ones first.

    Args:
        kind: An optimizer's name, as `kind_of` returns it.
        names: The names of the slot in a file.

    Examples:
        >>> sorted(names_for("Adamax", ["v"]))
        ['_u', 'norm', 'u', 'v']
    """
    found = list(names)
    for group in (*SYNONYMS.get(kind or "", ()), _AVERAGE):
        if set(group) & set(names):
            found += sorted(set(group) - set(found))
    return found


def documented_name(kind: str | None, names: Sequence[str]) -> str | None:
    """Returns the documented name of a slot, or None.

    Args:
        kind: An optimizer's name, as `kind_of` returns it.
        names: Names of the slot in any release.

    Examples:
        >>> documented_name("RMSprop", ["_velocities"])
        'rms'
    """
    groups = SYNONYMS.get(kind or "", ())
    return next((group[0] for group in groups if set(group) & set(names)), None)


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
