"""The names of an optimizer's slots in each release, and their order."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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

# The order in which TensorFlow's new optimizers (not the first ones) create their state: all slots
# of a group for one variable, then for the next variable; then the next group.
_NEW_ORDER: dict[str, tuple[tuple[str, ...], ...]] = {
    "SGD": (("m",),),
    "Lion": (("m",),),
    "Adam": (("m", "v"), ("vhat",)),
    "AdamW": (("m", "v"), ("vhat",)),
    "Nadam": (("m", "v"),),
    "Adamax": (("m", "u"),),
    "RMSprop": (("velocity",), ("momentum",), ("average_gradient",)),
    "Adagrad": (("accumulator",),),
    "Adadelta": (("accumulated_grad", "accumulated_delta_var"),),
    "Ftrl": (("accumulator", "linear"),),
}

_LABELS = {slot for groups in _NEW_ORDER.values() for group in groups for slot in group}
_LABELS |= {"average", "r", "c"}


class ArrayRole(NamedTuple):
    """The meaning of a saved array: the slot of a variable, by its number, or another state."""

    name: str
    variable: int | None = None


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


def split_label(label: str) -> tuple[str, str]:
    """Splits the name of a new optimizer's state into the names of slot and variable.

    Args:
        label: `m/dense/kernel`, or `Adam/m/dense/kernel` if the first step created the state.

    Examples:
        >>> split_label("m/dense/kernel"), split_label("Adam/m/dense/kernel")
        (('m', 'dense/kernel'), ('m', 'dense/kernel'))
    """
    first, _, rest = label.partition("/")
    second, _, last = rest.partition("/")
    if first not in _LABELS and second in _LABELS and last:
        return second, last
    return first, rest


def roles_by_name(names: Sequence[str]) -> list[ArrayRole]:
    """Returns the meaning of each array in an HDF5 file of TensorFlow.

    The first optimizers put the slot's name last (`cond_1/Adam/dense/kernel/m:0`), the new ones
    first (`m/dense/kernel:0`). Variables are numbered, because the names of layers may change.

    Args:
        names: The names of the arrays, in the order of the file.

    Examples:
        >>> roles_by_name(["SGD/iter:0", "SGD/a/momentum:0", "SGD/b/momentum:0"])
        [ArrayRole(name='iterations', variable=None), ArrayRole(name='momentum', variable=0), \
ArrayRole(name='momentum', variable=1)]
    """
    plain = [re.sub(r":\d+$", "", name) for name in names]
    new = any(name.rpartition("/")[2] == "iteration" for name in plain)
    indices: dict[str, int] = {}
    roles = []
    for name in plain:
        parts = name.split("/")
        slot = split_label(name)[0] if new else parts[-1]
        if parts[-1] in ("iter", "iteration"):
            roles.append(ArrayRole("iterations"))
        elif parts[-1] in ("momentum_cache", "learning_rate"):
            roles.append(ArrayRole(parts[-1]))
        else:
            roles.append(ArrayRole(slot, indices.setdefault(slot, 0)))
            indices[slot] += 1
    return roles


def roles_by_number(
    kind: str, settings: Mapping[str, Any], variables: int, count: int
) -> list[ArrayRole] | None:
    """Returns the meaning of each numbered array of a new TensorFlow optimizer.

    Args:
        kind: The optimizer's name.
        settings: Its configuration.
        variables: Number of variables that it trains.
        count: Number of arrays.

    Returns:
        The meanings; None if this optimizer writes another number of arrays.

    Examples:
        >>> [role.name for role in roles_by_number("Adam", {}, 2, 5)]
        ['iterations', 'm', 'v', 'm', 'v']
    """
    groups = list(_NEW_ORDER.get(kind, ()))
    if kind in ("Adam", "AdamW") and not settings.get("amsgrad"):
        groups.remove(("vhat",))
    if kind == "RMSprop" and not settings.get("momentum"):
        groups.remove(("momentum",))
    if kind == "RMSprop" and not settings.get("centered"):
        groups.remove(("average_gradient",))
    if settings.get("use_ema"):
        groups.insert(0, ("average",))
    roles = [ArrayRole("iterations")]
    for group in groups:
        roles += [ArrayRole(slot, number) for number in range(variables) for slot in group]
    if count == 1:
        # It was saved before it had a variable.
        return roles[:1]
    return roles if len(roles) == count else None


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
