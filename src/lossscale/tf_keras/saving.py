"""The optimizer in files and copies, and how it is loaded.

In tf_keras' own files (`.keras`, `.weights.h5` and HDF5) the variables of an optimizer stand at one
place, numbered. There the inner optimizer's variables are written exactly as an optimizer without
loss scaling writes its own, and the loss scale beside them. So weights go from a plain Adam into a
wrapped one, and back.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import lossscale.framework_types as ft
from lossscale.errors import GradientsError
from lossscale.keras_common.optimizer import KerasCommonOptimizer, check_shapes
from lossscale.keras_common.state import AttributesOfInner, ValueStore
from lossscale.packages import warn

# What begins the name of a variable that the inner optimizer does not list.
UNLISTED = "inner."

# The variables that optimizers of this process were built with, by the keys that copies name.
_BUILT_WITH: weakref.WeakValueDictionary[str, ft.Variable] = weakref.WeakValueDictionary()
_PROCESS = uuid.uuid4().hex


class SavedAttributes(AttributesOfInner, tf_keras.losses.Loss):
    """The place of the inner optimizer's attributes in a file."""


class LossScaleStore(ValueStore, tf_keras.losses.Loss):
    """The place of the loss scale and the counters in a file."""


def own_values(optimizer: KerasCommonOptimizer) -> dict[str, Any]:
    """Returns the loss scale, the counters, and what the inner optimizer does not list, by name."""
    named = _named_variables(optimizer)
    values = values_of(named.values())
    return {**optimizer._pending_named, **dict(zip(named, values, strict=True))}


def set_own_values(optimizer: KerasCommonOptimizer, values: Mapping[str, Any]) -> None:
    """Sets these, moved into the range of the rule; values without a variable are kept for it."""
    # A dataset of an HDF5 file is not an array yet.
    arrays = {name: np.asarray(values[name][()]) for name in values}
    named = _named_variables(optimizer)
    given = [name for name in named if name in arrays]
    check_shapes([named[name] for name in given], [arrays[name] for name in given])
    state = optimizer._state
    if not arrays.keys().isdisjoint(state.names.values()):
        valid = state.restored(arrays)
        arrays.update({name: getattr(valid, field) for field, name in state.names.items()})
    pairs = [(variable, arrays.pop(name)) for name, variable in named.items() if name in arrays]
    # Variables that `build` makes do not exist before it.
    pending = {name: value for name, value in arrays.items() if name.startswith(UNLISTED)}
    optimizer._pending_named.update(pending)
    tf_keras.backend.batch_set_value(pairs)


def _named_variables(optimizer: KerasCommonOptimizer) -> dict[str, ft.Variable]:
    return {**optimizer._own_variables(), **optimizer._unlisted_variables()}


def load_pending(optimizer: KerasCommonOptimizer) -> None:
    """Sets the inner optimizer's variables that were loaded before they existed."""
    values, weights = optimizer._pending_values, optimizer._inner_weights()
    if values is not None and _shapes(values) != _shapes(weights):
        return
    optimizer._pending_values = optimizer._values_before_load = None
    named, unlisted = optimizer._pending_named, optimizer._unlisted_variables()
    pairs = [(variable, named.pop(name)) for name, variable in unlisted.items() if name in named]
    pairs += zip(weights, values or (), strict=False)
    # The first step of a tf.function may build the optimizer. Traced assignments would set these
    # values again on every step.
    with tf.init_scope():
        tf_keras.backend.batch_set_value(pairs)


def inner_values(optimizer: KerasCommonOptimizer) -> dict[str, Any]:
    """Returns copies of the inner optimizer's variables, as arrays.

    Returns:
        values: The arrays.
        groups: The key and the shape of each variable it was built with, by the calls of `build`.
    """
    pending = optimizer._pending_values
    values = values_of(optimizer._inner_weights()) if pending is None else pending
    groups = [[_key_and_shape(each) for each in group] for group in optimizer._built_groups]
    return {
        "values": [np.array(value) for value in values],
        "groups": groups or optimizer._pending_groups,
    }


def _key_and_shape(variable: ft.Variable) -> tuple[str, tuple[int, ...]]:
    key = f"{_PROCESS} {variable._unique_id}"
    _BUILT_WITH[key] = variable
    return key, tuple(variable.shape)


def set_inner_values(optimizer: KerasCommonOptimizer, saved: dict[str, Any]) -> None:
    """Sets them, or keeps them until their variables exist."""
    values = saved["values"]
    if values:
        optimizer._pending_values = list(values)
        optimizer._pending_groups = saved["groups"]
        # The count is asked for before the variables exist that are trained.
        optimizer._inner_iterations().assign(values[0])
        load_pending(optimizer)


def build_pending(optimizer: KerasCommonOptimizer, variables: ft.Variables) -> None:
    """Builds a copy with the variables of its original, which may be more than `variables`.

    Raises:
        GradientsError: If they are not, and are not as many of the same shapes.
    """
    groups = optimizer._pending_groups
    saved = [each for group in groups for each in group]
    found = [_BUILT_WITH.get(key) for key, _ in saved]
    are_found = all(each is not None for each in found)
    if are_found and {id(each) for each in variables} <= {id(each) for each in found}:
        # A copy within a process: the variables of the original.
        variables = found
    shapes = [shape for _, shape in saved]
    if shapes != [tuple(each.shape) for each in variables]:
        raise GradientsError(
            f"This optimizer is a copy with the state of {len(shapes)} variables of the shapes "
            f"{shapes}. Received: {len(variables)} variables of the shapes "
            f"{[tuple(each.shape) for each in variables]}. Call build(variables) with all of them, "
            "in their order, before a step on some of them."
        )
    optimizer._pending_groups = []
    remaining = iter(variables)
    for group in groups:
        optimizer._build([next(remaining) for _ in group])


def drop_pending(optimizer: KerasCommonOptimizer) -> None:
    """Warns that loaded values do not match the variables of the first step.

    The optimizer continues as if nothing had been loaded.
    """
    loaded, optimizer._pending_values = optimizer._pending_values, None
    before, optimizer._values_before_load = optimizer._values_before_load, None
    optimizer._pending_named.clear()
    with tf.init_scope():
        set_own_values(optimizer, before or {})
    warn(
        "The saved state of the optimizer is not used: it has arrays of the shapes "
        f"{_shapes(loaded or ())}. Expected: {_shapes(optimizer._inner_weights())}. Call "
        "build(variables) with all variables that it was saved with before the first step."
    )


def _shapes(values: Sequence[ft.Array | ft.Variable]) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]


def values_of(variables: Iterable[ft.Variable]) -> list[ft.Array]:
    """Returns the values of variables as NumPy arrays."""
    return [np.asarray(value) for value in tf_keras.backend.batch_get_value(list(variables))]
