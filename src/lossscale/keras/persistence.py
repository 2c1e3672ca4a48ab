"""Saving, loading, copying and pickling.

In Keras' files the variables of an optimizer stand at one place, numbered. There the inner
optimizer's variables are written exactly as an optimizer without loss scaling writes its own,
and the loss scale beside them. So weights go from a plain Adam into a wrapped one, and back.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from lossscale.errors import LossScaleWarning
from lossscale.keras import older_files
from lossscale.keras.parts import Parts
from lossscale.keras.weights import numpy_of
from lossscale.keras_common.copies import Copies
from lossscale.keras_common.files import SavedBesideInner, StoreOfValues, arrays_in

# Keras' own LossScaleOptimizer writes these before the inner optimizer's variables. The first
# two have no effect there.
_KERAS_OWN_VARIABLES = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


class LossScaleStore(StoreOfValues, keras.losses.Loss):
    """The place in a Keras file where the loss scale and the counters stand, by name."""


class Persistence(Copies, SavedBesideInner, Parts):
    """`save_own_variables`, `load_own_variables`, `__deepcopy__`, `__reduce__`."""

    _hidden = SavedBesideInner._hidden | {"_inner_parts"}
    _waiting: dict[str, Any] | None

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
        self._load_now_or_later(arrays_in(store))

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

    def _build_alike(self, other: Any) -> None:
        if self.built:
            other.build(self._trainable_variables)

    def _inner_values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self.save_own_variables(values)
        return {key: np.array(value) for key, value in values.items()}

    def _take_inner_values(self, values: dict[str, Any]) -> None:
        self._load_now_or_later(values)
