"""Weights and slots of a Keras 3 optimizer, as TensorFlow documented them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.keras_common.optimizer import Slots, check_shapes, slots_in
from lossscale.old_formats import kind_of, names_for


def weights_of(inner: Any) -> list[Any]:
    """Returns the counter of applied steps, then the optimizer's state, without its rate."""
    parts = [inner, *getattr(inner, "optimizers", ())]
    excluded = {id(inner._iterations), *(id(part._learning_rate) for part in parts)}
    rest = [variable for variable in inner.variables if id(variable) not in excluded]
    return [inner._iterations, *rest]


def names_of(inner: Any, variable: Any, slot_name: str) -> set[str]:
    """Returns all names of a kind of slot, in the optimizer or the one of several with it."""
    key, parts = inner._var_key(variable), getattr(inner, "optimizers", None) or [inner]
    own = [part for part in parts if key in getattr(part, "_trainable_variables_indices", ())]
    return set(names_for(kind_of(own[0] if own else inner), [slot_name]))


def slots_of(inner: Any, key_of: Callable[[Any], Any]) -> Slots:
    """Yields the slots of an optimizer, or of each of several.

    Args:
        inner: The optimizer.
        key_of: Returns the key of a reference variable.
    """
    for part in getattr(inner, "optimizers", None) or [inner]:
        references = {key_of(reference): reference for reference in part._trainable_variables}
        for _, slots in slots_in(part, list(references), keras.Variable):
            yield sorted({_slot_name(references[key], slot) for key, slot in slots.items()}), slots


def _slot_name(reference: Any, slot: Any) -> str:
    # After the prefix that Keras' add_variable_from_reference adds to the slot's name.
    path = getattr(reference, "path", None) or str(reference.name).replace(":", "_")
    return str(slot.name).removeprefix(path.replace("/", "_")).lstrip("_")


def numpy_of(variable: Any) -> Any:
    """Returns the value of a Keras variable as a new NumPy array."""
    # NumPy 2 warns when it copies a tf.Variable, not when it copies its value.
    return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(variable))


# Methods of the loss scale optimizer; `lossscale.members` documents them.


def get_weights(optimizer: Any) -> list[Any]:
    return [numpy_of(variable) for variable in optimizer.weights]


def set_weights(optimizer: Any, weights: Sequence[Any]) -> None:
    values = list(weights)
    weights, all_variables = optimizer.weights, optimizer._lasting_variables
    if len(values) == len(weights):
        targets = weights
    elif len(values) == len(all_variables):
        targets = all_variables
    else:
        unbuilt = "" if optimizer.built else " It is not built yet: call build(variables) first."
        raise ArgumentError(
            f"Expected {len(weights)} weights, or {len(all_variables)} with the loss scale and the "
            f"learning rate. Received: {len(values)} arrays.{unbuilt}"
        )
    check_shapes(targets, [tuple(keras.ops.shape(value)) for value in values])
    for variable, value in zip(targets, values, strict=True):
        variable.assign(value)
    optimizer._restore_scale(optimizer._own_values())
    optimizer._iterations.follow()


def add_weight(
    optimizer: Any,
    name: str,
    shape: Any,
    dtype: Any = None,
    initializer: Any = "zeros",
    trainable: bool | None = None,
    synchronization: Any = None,
    aggregation: Any = "none",
) -> Any:
    if getattr(synchronization, "name", "AUTO") != "AUTO":
        raise ArgumentError(
            "Keras 3 synchronizes the variables of an optimizer automatically. Leave "
            f"`synchronization` out. Received: synchronization={synchronization!r}."
        )
    variable = optimizer.inner_optimizer.add_variable(
        shape=tuple(shape),
        initializer=initializer,
        dtype=None if dtype is None else keras.backend.standardize_dtype(dtype),
        aggregation=_aggregation_name(aggregation),
        name=name,
    )
    if trainable:
        variable.trainable = True
    return variable


def _aggregation_name(aggregation: Any) -> str:
    """Returns Keras' name of an aggregation over replicas, given the name or an enumeration."""
    name = getattr(aggregation, "name", aggregation)
    if isinstance(name, str) or name is None:
        return (name or "none").lower()
    raise ArgumentTypeError(
        "`aggregation` must be a tf.VariableAggregation or its name, such as 'none' or 'mean'. "
        f"Received: aggregation={aggregation!r}."
    )
