"""Weights and slots of the optimizers of Keras 3 and tf_keras."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

import lossscale.framework_types as ft
from lossscale.errors import ArgumentError, UnknownSlotError
from lossscale.old_formats import kind_of, names_for
from lossscale.wrapper import VariableList, Wrapper

Key: TypeAlias = Any
"""What an optimizer knows a variable by."""
Slots = Iterator[tuple[list[str], dict[Key, ft.Variable]]]
"""The names of each kind of slot, and its variables by the key of the reference variable."""


class WithSlots(Wrapper):
    """Weights and slots, as TensorFlow documented them."""

    # By name, those that `add_slot` has made.
    _added_slots: dict[str, dict[Key, ft.Variable]]

    # --- What a subclass for one Keras defines ------------------------------------------------

    # Returns the variables of the inner optimizer, as the documents list them.
    _inner_weights: Callable[[], list[ft.Variable]]
    # Sets variables to arrays.
    _assign: Callable[[ft.Variables, Sequence[ft.Array]], None]

    @property
    @abc.abstractmethod
    def variables(self) -> VariableList:
        """The wrapper's variables, then the inner optimizer's: a list that can also be called.

        On JAX a monitor adds variables, because a compiled step can change only those in this list.
        """

    @abc.abstractmethod
    def get_weights(self) -> list[ft.Array]:
        """Returns the values of `weights` as a list of NumPy arrays."""

    @abc.abstractmethod
    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots, such as `momentum`; empty before the first step."""

    @abc.abstractmethod
    def add_weight(
        self,
        name: str,
        shape: Any,
        dtype: ft.DType = None,
        initializer: ft.Initializer = "zeros",
        trainable: bool | None = None,
        synchronization: Any = None,
        aggregation: Any = "none",
    ) -> ft.Variable:
        """Adds a state variable that does not belong to a model variable, and returns it.

        Args:
            name: Its name.
            shape: Its shape, a tuple.
            dtype: Its dtype; None means Keras' float type.
            initializer: A Keras initializer or its name, or a callable of shape and dtype.
            trainable: The `trainable` flag of the variable.
            synchronization: None or `tf.VariableSynchronization.AUTO`.
            aggregation: A `tf.VariableAggregation`, or Keras' name of one.

        Returns:
            The new variable. It is saved with the optimizer.

        Raises:
            ValueError: If `synchronization` has another value, which Keras 3 does not support.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD())
            >>> int(optimizer.add_weight("seen", (), dtype="int64"))
            0
        """

    # Legacy optimizers have none of the rest: they keep slots and files themselves.

    # Yields the inner optimizer's slots.
    _slots_of_inner: Callable[[], Slots]
    # Makes a slot of a variable, with a name and a first value.
    _new_slot: Callable[[ft.Variable, str, ft.Initializer], ft.Variable]

    # --- Weights and slots --------------------------------------------------------------------

    @property
    def weights(self) -> VariableList:
        """The inner optimizer's counter of applied steps, then its state variables.

        As in TensorFlow, the loss scale and the learning rate are not among them. They are in the
        order of creation.
        """
        return VariableList(self._inner_weights())

    @property
    def _lasting_variables(self) -> VariableList:
        """All variables that are saved."""
        return self.variables

    def set_weights(self, weights: Sequence[ft.Array]) -> None:
        """Sets the values of `weights`, or of `variables`.

        Args:
            weights: Arrays from `get_weights`; or one array for each of `variables`, in that order.

        Raises:
            ValueError: If their number or a shape does not match. Nothing is changed then.

        Examples:
            >>> inner = keras.optimizers.SGD(0.5, momentum=0.9)
            >>> optimizer = lossscale.LossScaleOptimizer(inner)
            >>> optimizer.build([keras.Variable([1.0, 2.0])])
            >>> optimizer.set_weights([10, [0.5, 0.25]])
            >>> optimizer.get_weights()
            [array(10), array([0.5 , 0.25], dtype=float32)]
        """
        values = list(weights)
        weights, everything = self.weights, self._lasting_variables
        if len(values) not in (len(weights), len(everything)):
            raise ArgumentError(
                f"Expected {len(weights)} weights, or all {len(everything)} variables, with the "
                f"loss scale. Received: {len(values)} arrays. An optimizer that is not built has "
                "no state yet: call build(variables) first."
            )
        targets = weights if len(values) == len(weights) else everything
        check_shapes(targets, values)
        self._assign(targets, values)

    def get_slot(self, var: ft.Variable, slot_name: str) -> ft.Variable:
        """Returns the state variable that the inner optimizer keeps for a variable.

        Args:
            var: A variable that the optimizer was built with.
            slot_name: `momentum`, `velocity`, ..., or TensorFlow's older names (`m` and `v` of
                Adam, `rms` of RMSprop).

        Returns:
            The state variable; in most optimizers it has the shape of `var`.

        Raises:
            KeyError: If there is no such slot, or the optimizer does not know the variable.

        Examples:
            >>> inner = keras.optimizers.SGD(0.5, momentum=0.9)
            >>> optimizer = lossscale.LossScaleOptimizer(inner)
            >>> weight = tf.Variable(1.0)
            >>> steps = optimizer.minimize(lambda: weight * 2.0, [weight])
            >>> optimizer.get_slot_names(), float(optimizer.get_slot(weight, "momentum"))
            (['momentum'], -1.0)
        """
        slot = self._find_slot(var, slot_name)
        if slot is None:
            raise UnknownSlotError(
                f"{type(self.inner_optimizer).__name__} has no slot {slot_name!r} for the "
                f"variable {var.name!r}. Its slots are {self.get_slot_names()}; they exist for "
                "the variables it was built with."
            )
        return slot

    def add_slot(
        self, var: ft.Variable, slot_name: str, initializer: ft.Initializer = "zeros"
    ) -> ft.Variable:
        """Adds a state variable for a variable, and returns it.

        Args:
            var: The variable it belongs to. The new one has its shape and dtype.
            slot_name: The name of the slot. If it exists, it is returned unchanged.
            initializer: A Keras initializer or its name, or a callable of shape and dtype.

        Returns:
            The new state variable. It is saved with the optimizer.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD())
            >>> optimizer.add_slot(tf.Variable([1.0, 2.0]), "average").shape.as_list()
            [2]
        """
        slot = self._find_slot(var, slot_name)
        if slot is None:
            slot = self._new_slot(var, slot_name, initializer)
            self._added_slots.setdefault(slot_name, {})[self.inner_optimizer._var_key(var)] = slot
        return slot

    def _find_slot(self, var: ft.Variable, slot_name: str) -> ft.Variable | None:
        wanted = self._names_of_slot(var, slot_name)
        key = self.inner_optimizer._var_key(var)
        for names, slots in self._slots():
            if wanted & set(names) and key in slots:
                return slots[key]
        return None

    def _names_of_slot(self, var: ft.Variable, slot_name: str) -> set[str]:
        """Returns all names of a kind of slot of a variable."""
        return set(names_for(kind_of(self.inner_optimizer), [slot_name]))

    def _slots(self) -> Slots:
        yield from self._slots_of_inner()
        for name, slots in self._added_slots.items():
            yield [name], slots


def slots_in(
    optimizer: ft.KerasOptimizer, keys: Sequence[Key], kind: ft.Class
) -> Iterator[tuple[str, dict[Key, ft.Variable]]]:
    """Yields the attributes that hold a kind of slot, and its variables by the given keys.

    Keras' optimizers keep each kind in a list, with one variable (or None) for every variable they
    were built with. Two lists of the base class can be as long, by chance.

    Args:
        optimizer: The optimizer.
        keys: A key for each variable that it was built with.
        kind: The class of its variables.
    """
    for attribute, values in vars(optimizer).items():
        if attribute in ("_trainable_variables", "_variables"):
            continue
        if isinstance(values, (list, tuple)) and len(values) == len(keys):
            pairs = zip(keys, values, strict=True)
            if slots := {key: value for key, value in pairs if isinstance(value, kind)}:
                yield attribute, slots


def check_shapes(variables: ft.Variables, values: Iterable[ft.Array]) -> None:
    """Checks that arrays fit variables, before any is set.

    Raises:
        ArgumentError: If one does not.
    """
    for variable, value in zip(variables, values, strict=True):
        shape = tuple(np.shape(value))
        if tuple(variable.shape) != shape:
            raise ArgumentError(
                f"The weight {variable.name!r} has the shape {tuple(variable.shape)}. "
                f"Received: an array of shape {shape}. Nothing was changed."
            )
