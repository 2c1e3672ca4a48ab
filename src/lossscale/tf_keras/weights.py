"""The documented view of the new optimizers' variables, which tf_keras itself has lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from lossscale.errors import ArgumentError
from lossscale.keras_common.weights import SharedWeights, Slots, check_shapes
from lossscale.older.slots import documented_name, kind_of
from lossscale.tf_keras.parts import Parts
from lossscale.tf_keras.persistence import values_of


class DocumentedWeights(SharedWeights, Parts):
    """`get_weights`, `set_weights`, `get_slot`, `add_slot`, `add_weight`."""

    def get_weights(self) -> list[Any]:
        return values_of(self.weights)

    def set_weights(self, weights: Sequence[Any]) -> None:
        # Datasets of an HDF5 file are no arrays yet.
        weights = [np.asarray(weight) for weight in weights]
        counted, everything = self.weights, self.variables
        named = {**self._own_variables(), **self._unlisted_variables()}
        # Files of older releases of this class have no others.
        own = len(counted) + len(self._own_variables())
        if len(weights) not in (len(counted), own, len(everything)):
            raise ArgumentError(
                f"The optimizer has {len(counted)} weights, or {len(everything)} variables with "
                f"the loss scale. Received: {len(weights)} arrays. Before build(variables) it has "
                "no state."
            )
        targets = everything[: len(weights)]
        check_shapes(targets, [value.shape for value in weights])
        tf_keras.backend.batch_set_value(list(zip(counted, weights, strict=False)))
        if len(weights) > len(counted):
            names = {id(variable): name for name, variable in named.items()}
            found = zip(targets[len(counted) :], weights[len(counted) :], strict=True)
            self._set_own_values({names[id(variable)]: value for variable, value in found})

    def get_slot_names(self) -> list[str]:
        return list(dict.fromkeys(names[0] for names, _ in self._slots()))

    def _new_slot(self, var: Any, slot_name: str, initializer: Any) -> Any:
        first = initializer
        if isinstance(initializer, str) or callable(initializer):
            first = tf_keras.initializers.get(initializer)(var.shape, _dtype_of(var))
        with tf.init_scope():
            slot = self._optimizer.add_variable_from_reference(var, slot_name, initial_value=first)
        self._children_have_changed()
        return slot

    def add_weight(
        self,
        name: str,
        shape: Any,
        dtype: Any = None,
        initializer: Any = "zeros",
        trainable: bool | None = None,
        synchronization: Any = tf.VariableSynchronization.AUTO,
        aggregation: Any = tf.VariableAggregation.NONE,
    ) -> Any:
        if trainable and synchronization == tf.VariableSynchronization.ON_READ:
            raise ArgumentError(
                "A variable that is synchronized on reading cannot be trainable. Received: "
                f"trainable={trainable!r}, synchronization={synchronization!r}."
            )
        dtype = tf.as_dtype(dtype or tf.float32)
        with tf.init_scope():
            variable = tf.Variable(
                tf_keras.initializers.get(initializer)(tuple(shape), dtype),
                name=name,
                trainable=bool(trainable),
                synchronization=synchronization,
                aggregation=aggregation,
            )
        self._optimizer._variables.append(variable)
        self._children_have_changed()
        return variable

    def _children_have_changed(self) -> None:
        # The first checkpoint left a list of children.
        self._optimizer.__dict__.pop("_coalesced_children", None)

    def _slots_of_inner(self) -> Slots:
        inner = self._optimizer
        # The new optimizers keep each kind of state in an attribute, a list with one variable (or
        # None) for every variable they were built with.
        keys = list(getattr(inner, "_index_dict", ()))
        for attribute, values in vars(inner).items():
            if attribute == "_variables" or not isinstance(values, (list, tuple)):
                continue
            slots = {
                key: value
                for key, value in zip(keys, values, strict=False)
                if isinstance(value, tf.Variable)
            }
            if slots and len(values) == len(keys):
                yield _slot_names(inner, attribute, slots), slots


def _slot_names(inner: Any, attribute: str, slots: dict[Any, Any]) -> list[str]:
    """The names of a kind of slot, the one that the documents use first."""
    # tf_keras puts the slot's name before that of the reference variable.
    prefixes = {str(slot.name).partition("/")[0] for slot in slots.values()}
    plural = attribute.lstrip("_")
    singular = f"{plural[:-3]}y" if plural.endswith("ies") else plural.removesuffix("s")
    names = [*sorted(prefixes), singular]
    documented = documented_name(kind_of(inner), [attribute])
    names = [*([] if documented is None else [documented]), *names]
    return list(dict.fromkeys(names))


def _dtype_of(variable: Any) -> Any:
    # Under a mixed precision policy a variable shows the dtype that it is cast to.
    return getattr(variable, "true_dtype", variable.dtype)
