"""The documented view of an optimizer's variables: weights and slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from lossscale.errors import ArgumentError
from lossscale.keras.parts import Parts
from lossscale.keras_common.weights import SharedWeights, Slots, check_shapes
from lossscale.members import VariableList
from lossscale.older.slots import kind_of, names_for


class DocumentedWeights(SharedWeights, Parts):
    """`weights`, `get_weights`, `set_weights`, `get_slot`, `add_slot`, `add_weight`."""

    @property
    def weights(self) -> VariableList:
        inner = self.inner_optimizer
        parts = [inner, *getattr(inner, "optimizers", ())]
        left_out = {id(inner._iterations), *(id(part._learning_rate) for part in parts)}
        rest = [variable for variable in inner.variables if id(variable) not in left_out]
        return VariableList([inner._iterations, *rest])

    def get_weights(self) -> list[Any]:
        return [numpy_of(variable) for variable in self.weights]

    def set_weights(self, weights: Sequence[Any]) -> None:
        weights = list(weights)
        counted, everything = self.weights, self._lasting_variables
        if len(weights) == len(counted):
            targets = counted
        elif len(weights) == len(everything):
            targets = everything
        else:
            unbuilt = "" if self.built else " It is not built yet: call build(variables) first."
            raise ArgumentError(
                f"The optimizer has {len(counted)} weights, or {len(everything)} variables with "
                f"the loss scale and the learning rate. Received: {len(weights)} arrays.{unbuilt}"
            )
        check_shapes(targets, [tuple(keras.ops.shape(value)) for value in weights])
        for variable, value in zip(targets, weights, strict=True):
            variable.assign(value)
        self._after_weights_were_set()

    def get_slot_names(self) -> list[str]:
        names = [name for names, _ in self._slots() for name in names]
        return list(dict.fromkeys(names))

    def _new_slot(self, var: Any, slot_name: str, initializer: Any) -> Any:
        return self.inner_optimizer.add_variable_from_reference(
            var, name=slot_name, initializer=initializer
        )

    def add_weight(
        self,
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
                "Keras 3 synchronizes the variables of an optimizer by itself. Leave "
                f"`synchronization` out. Received: synchronization={synchronization!r}."
            )
        variable = self.inner_optimizer.add_variable(
            shape=tuple(shape),
            initializer=initializer,
            dtype=None if dtype is None else keras.backend.standardize_dtype(dtype),
            aggregation=self._backend.aggregation_name(aggregation),
            name=name,
        )
        if trainable:
            variable.trainable = True
        return variable

    def _names_of_slot(self, slot_name: str) -> set[str]:
        return set(names_for(kind_of(self.inner_optimizer), [slot_name]))

    def _slots_of_inner(self) -> Slots:
        inner = self.inner_optimizer
        for part in getattr(inner, "optimizers", None) or [inner]:
            yield from self._slots_of(part)

    def _slots_of(self, inner: Any) -> Slots:
        # Keras optimizers keep each kind of state in an attribute, a list with one variable (or
        # None) for every variable they were built with; the slot's name ends the variable's. The
        # two lists of Keras' base class can be as long, by chance.
        references = inner._trainable_variables
        for attribute, values in vars(inner).items():
            if attribute in ("_trainable_variables", "_variables"):
                continue
            if not isinstance(values, (list, tuple)):
                continue
            slots = {
                self._var_key(reference): (reference, value)
                for reference, value in zip(references, values, strict=False)
                if isinstance(value, keras.Variable)
            }
            if not slots or len(values) != len(references):
                continue
            names = {_slot_name(reference, slot) for reference, slot in slots.values()}
            yield sorted(names), {key: slot for key, (_, slot) in slots.items()}


def numpy_of(variable: Any) -> Any:
    """Returns the value of a Keras variable as a new NumPy array."""
    # NumPy 2 warns when it copies a tf.Variable, not when it copies its value.
    return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(variable))


def _slot_name(reference: Any, slot: Any) -> str:
    # The prefix that Keras' add_variable_from_reference puts before the slot's name.
    path = getattr(reference, "path", None) or str(reference.name).replace(":", "_")
    return str(slot.name).removeprefix(path.replace("/", "_")).lstrip("_")
