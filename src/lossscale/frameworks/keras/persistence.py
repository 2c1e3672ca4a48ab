"""Saving, loading, copying and pickling.

In Keras' files the variables of an optimizer stand at one place, numbered. There the inner
optimizer's variables are written exactly as an optimizer without loss scaling writes its own,
and the loss scale beside them. So weights go from a plain Adam into a wrapped one, and back.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from keras.src.saving.keras_saveable import KerasSaveable

from lossscale.errors import LossScaleWarning
from lossscale.frameworks.keras import older_files
from lossscale.frameworks.keras.parts import Parts
from lossscale.frameworks.keras.weights import numpy_of

# Keras' own LossScaleOptimizer writes these before the inner optimizer's variables. The first
# two have no effect there.
_KERAS_OWN_VARIABLES = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


class LossScaleStore(KerasSaveable):
    """The place in a Keras file where the loss scale and the counters stand, by name.

    Args:
        read: Returns the values to write, by name.
        write: Takes the values that were read, by name.
    """

    def __init__(
        self, read: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]
    ) -> None:
        # Callables and not the optimizer: Keras walks into every attribute that can be saved.
        self._read = read
        self._write = write

    def _obj_type(self) -> str:
        return "Optimizer"

    def save_own_variables(self, store: Any) -> None:
        """Writes the values into a place of a Keras file."""
        for name, value in self._read().items():
            store[name] = value

    def load_own_variables(self, store: Any) -> None:
        """Reads them; a file of an optimizer without loss scaling has none."""
        values = _arrays(store)
        if values:
            self._write(values)


class Persistence(Parts):
    """`save_own_variables`, `load_own_variables`, `__deepcopy__`, `__reduce__`."""

    _waiting: dict[str, Any] | None

    def __dir__(self) -> list[str]:
        # Keras saves every object that dir() names and that can be saved. The inner optimizer's
        # variables are written by this class; named here, they would stand in the file twice,
        # and a file of a plain optimizer would be missing the second copy. TensorFlow asks dir()
        # for get_slot_names, and writes no checkpoint if slots are attributes as well.
        hidden = {"inner_optimizer", "_inner_parts", "get_slot_names"}
        return [name for name in super().__dir__() if name not in hidden]

    def save_own_variables(self, store: Any) -> None:
        """Writes the inner optimizer's variables as an optimizer without loss scaling does."""
        if self._waiting:
            for key, value in self._waiting.items():
                store[key] = value
        else:
            self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Reads the inner optimizer's variables from a file of any of these optimizers.

        Args:
            store: A place of a Keras file that was written by this class, by an optimizer
                without loss scaling, or by Keras' own LossScaleOptimizer. Before `build` the
                values wait for it, unless they come from before `build` too.
        """
        self._load_now_or_later(_arrays(store))

    def _load_now_or_later(self, values: dict[str, Any]) -> None:
        self._waiting = values
        if self.built or len(values) == len(self.inner_optimizer.variables):
            self._load_what_waited()

    def _load_what_waited(self) -> None:
        values, self._waiting = self._waiting, None
        if not values:
            return
        # The first step of a tf.function may be what builds the optimizer. Traced, these values
        # would be set again on every step.
        with self._backend.outside_traces():
            self._load_inner(values)

    def _can_load(self, count: int) -> bool:
        """Whether a file with this many arrays can be one of this inner optimizer."""
        inner, ahead = len(self.inner_optimizer.variables), len(_KERAS_OWN_VARIABLES)
        lacking = len(self._variables_files_may_lack(count))
        return count in (inner, inner + ahead, inner - lacking, inner + ahead - lacking)

    def _variables_files_may_lack(self, count: int) -> list[int]:
        inner, ahead = self.inner_optimizer, len(_KERAS_OWN_VARIABLES)
        listed = len(inner.variables)
        if not self.built or count in (listed, listed + ahead) or hasattr(inner, "optimizers"):
            return []
        return older_files.places_of_attributes(inner, self._trainable_variables)

    def _load_inner(self, values: dict[str, Any]) -> None:
        ahead = len(_KERAS_OWN_VARIABLES)
        lacking = self._variables_files_may_lack(len(values))
        listed = len(self.inner_optimizer.variables)
        if lacking and len(values) in (listed - len(lacking), listed - len(lacking) + ahead):
            before = len(values) - (listed - len(lacking))
            values = older_files.completed(values, before, lacking, self.inner_optimizer)
        if len(values) == listed + ahead:
            own = {name: values[str(i)] for i, name in enumerate(_KERAS_OWN_VARIABLES)}
            inner = {str(int(key) - ahead): value for key, value in values.items()}
            values = {key: value for key, value in inner.items() if int(key) >= 0}
            self._restore_scale(own)
        self.inner_optimizer.load_own_variables(values)
        self._iterations.follow()

    def _own_values(self) -> dict[str, Any]:
        return {v.name: numpy_of(v) for v in self._variables}

    def _set_own_values(self, values: Mapping[str, Any]) -> None:
        self._restore_scale(values)
        moved = [] if self._state is None else self._state.variables.values()
        apart = {id(variable) for variable in (self._iterations, *moved)}
        for variable in self._variables:
            if id(variable) not in apart and variable.name in values:
                variable.assign(values[variable.name])
        if self.built or "iteration" not in values:
            self._iterations.follow()
        else:
            # The inner optimizer's own count waits with its other variables.
            self._iterations.assign(values["iteration"])

    def _restore_scale(self, values: Mapping[str, Any]) -> None:
        if self._state is None:
            return
        named = self._state.variables.items()
        found = {f: values[v.name].item() for f, v in named if v.name in values}
        self._state.restore(found)
        scale = self._state.read().scale
        if self.dynamic and "scale" in found and float(scale) != np.float32(found["scale"]):
            warnings.warn(
                f"The saved loss scale, {found['scale']}, is outside the range of {self._rule}. "
                f"Training goes on with {float(scale)}.",
                LossScaleWarning,
                stacklevel=2,
            )

    def _after_weights_were_set(self) -> None:
        self._restore_scale(self._own_values())
        self._iterations.follow()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy trains the same variables: an optimizer knows them by identity.
        rebuild, arguments = self.__reduce__()
        other = rebuild(*copy.deepcopy(arguments, memo))
        if self.built:
            other.build(self._trainable_variables)
        memo[id(self)] = other
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        inner = self.inner_optimizer
        values: dict[str, Any] = {}
        self.save_own_variables(values)
        return _rebuild, (
            _written_class(type(self)),
            type(inner),
            inner.get_config(),
            self._constructor_arguments(),
            {key: np.array(value) for key, value in values.items()},
            self._own_values(),
            {name: getattr(self, name) for name in self.__dict__.get("_names_of_the_user", ())},
        )

    def _constructor_arguments(self) -> dict[str, Any]:
        return {"rule": self._rule, "name": self.name}


def _rebuild(
    cls: type[Any],
    inner_class: type[Any],
    inner_config: dict[str, Any],
    arguments: dict[str, Any],
    inner_values: dict[str, Any],
    own_values: dict[str, Any],
    attributes: dict[str, Any],
) -> Any:
    optimizer = cls(inner_class.from_config(inner_config), **arguments)
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    optimizer._set_own_values(own_values)
    # The inner optimizer's variables exist once the optimizer meets the variables it trains.
    optimizer._load_now_or_later(inner_values)
    return optimizer


def _written_class(cls: type[Any]) -> type[Any]:
    """The class as it stands in a module, for one that was combined with a shell."""
    return cls.__mro__[1] if vars(cls).get("_is_combined") else cls


def _arrays(store: Any) -> dict[str, Any]:
    # A place in an HDF5 file is no Mapping and yields no items.
    return {key: np.array(store[key]) for key in store.keys()}  # noqa: SIM118
