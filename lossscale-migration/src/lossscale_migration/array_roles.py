"""The meaning of each array that an optimizer of TensorFlow wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
