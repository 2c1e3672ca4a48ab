"""Weights and slots of a Keras 3 optimizer, as TensorFlow documented them."""

from __future__ import annotations

from collections.abc import Iterable

import keras

import lossscale.framework_types as ft
from lossscale.errors import ArgumentError
from lossscale.keras_common.optimizer import KerasCommonOptimizer
from lossscale.keras_common.slots import Slots, slots_in
from lossscale.old_formats import kind_of, names_for


def weights_of(inner: ft.KerasOptimizer) -> list[ft.Variable]:
    """Returns the counter of applied steps, then the optimizer's state, without its rate."""
    parts = [inner, *getattr(inner, "optimizers", ())]
    excluded = {id(inner._iterations), *(id(part._learning_rate) for part in parts)}
    rest = [variable for variable in inner.variables if id(variable) not in excluded]
    return [inner._iterations, *rest]


def names_of(inner: ft.KerasOptimizer, variable: ft.Variable, slot_name: str) -> set[str]:
    """Returns all names of a kind of slot, in the optimizer or the one of several with it."""
    key, parts = inner._var_key(variable), getattr(inner, "optimizers", None) or [inner]
    own = [part for part in parts if key in getattr(part, "_trainable_variables_indices", ())]
    return set(names_for(kind_of(own[0] if own else inner), [slot_name]))


def slots_of(inner: ft.KerasOptimizer) -> Slots:
    """Yields the slots of an optimizer, or of each of several."""
    for part in getattr(inner, "optimizers", None) or [inner]:
        references = {inner._var_key(each): each for each in part._trainable_variables}
        for _, slots in slots_in(part, list(references), keras.Variable):
            yield sorted({_slot_name(references[key], slot) for key, slot in slots.items()}), slots


def _slot_name(reference: ft.Variable, slot: ft.Variable) -> str:
    # After the prefix that Keras' add_variable_from_reference adds to the slot's name.
    path = getattr(reference, "path", None) or str(reference.name).replace(":", "_")
    return str(slot.name).removeprefix(path.replace("/", "_")).lstrip("_")


def numpy_of(variable: ft.Variable) -> ft.Array:
    """Returns the value of a Keras variable as a new NumPy array."""
    # NumPy 2 warns when it copies a tf.Variable, not when it copies its value.
    return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(variable))


# Methods of the loss scale optimizer; its base class documents them.


def get_weights(optimizer: KerasCommonOptimizer) -> list[ft.Array]:
    return [numpy_of(variable) for variable in optimizer.weights]


def add_weight(
    optimizer: KerasCommonOptimizer,
    name: str,
    shape: Iterable[int],
    dtype: ft.DType = None,
    initializer: ft.Initializer = "zeros",
    trainable: bool | None = None,
    synchronization: object = None,
    aggregation: object = "none",
) -> ft.Variable:
    if getattr(synchronization, "name", "AUTO") != "AUTO":
        raise ArgumentError(
            "Keras 3 synchronizes the variables of an optimizer automatically. Leave "
            f"`synchronization` out. Received: synchronization={synchronization!r}."
        )
    variable = optimizer.inner_optimizer.add_variable(
        shape=tuple(shape),
        initializer=initializer,
        dtype=None if dtype is None else keras.backend.standardize_dtype(dtype),
        # Keras' own name of an enumeration of TensorFlow.
        aggregation=str(getattr(aggregation, "name", aggregation) or "none").lower(),
        name=name,
    )
    if trainable:
        variable.trainable = True
    return variable
