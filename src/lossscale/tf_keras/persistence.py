"""Copying, pickling, and the values of all variables by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from lossscale.errors import LossScaleWarning
from lossscale.keras_common.copies import Copies
from lossscale.tf_keras.parts import Parts
from lossscale.tf_keras.state import State

# What begins the name of a variable that the inner optimizer does not list.
UNLISTED = "inner."


class Persistence(Copies, Parts):
    """The values of all variables by name; some wait for the variables they belong to."""

    _waiting: list[Any] | None
    _later: dict[str, Any]

    def _own_variables(self) -> dict[str, Any]:
        """The variables of the loss scale and of the skips, by their names in files."""
        return {
            **(self._state.named if self._state is not None else self._loose_variables),
            "steps_skipped": self._steps_skipped,
            "last_step_skipped": self._last_step_skipped,
        }

    def _unlisted_variables(self) -> dict[str, Any]:
        """Variables that the inner optimizer does not list, by their names in files."""
        return {}

    def _named_variables(self) -> dict[str, Any]:
        return {**self._own_variables(), **self._unlisted_variables()}

    def _own_values(self) -> dict[str, Any]:
        named = self._named_variables()
        return {**self._later, **dict(zip(named, values_of(named), strict=True))}

    def _set_own_values(self, values: Mapping[str, Any]) -> None:
        # A dataset of an HDF5 file is no array yet.
        given = {name: np.asarray(values[name][()]) for name in values}
        pairs = [
            (variable, given.pop(name))
            for name, variable in self._named_variables().items()
            if name in given
        ]
        # Before `build` there is no place for what it makes.
        self._later.update({n: value for n, value in given.items() if n.startswith(UNLISTED)})
        tf_keras.backend.batch_set_value(pairs)
        if self._state is not None and any(name in values for name in self._state.named):
            self._make_valid(self._state)

    def _make_valid(self, state: State) -> None:
        fields = list(state.variables)
        found = [v.item() for v in values_of(state.variables)]
        read = dict(zip(fields, found, strict=True))
        valid = self._rule.restored(state.first._replace(**read))._asdict()
        pairs = zip(state.variables.values(), fields, strict=True)
        tf_keras.backend.batch_set_value(
            [
                (variable, np.asarray(valid[f], variable.dtype.as_numpy_dtype))
                for variable, f in pairs
            ]
        )
        if np.float32(valid["scale"]) != np.float32(read["scale"]):
            warnings.warn(
                f"The saved loss scale, {read['scale']}, is outside the range of {self._rule}. "
                f"Training goes on with {valid['scale']}.",
                LossScaleWarning,
                stacklevel=2,
            )

    def _load_what_waited(self) -> None:
        """Sets the inner optimizer's variables that were loaded before they existed."""
        found = {name: v for name, v in self._unlisted_variables().items() if name in self._later}
        if found:
            with tf.init_scope():
                tf_keras.backend.batch_set_value(
                    [(variable, self._later.pop(name)) for name, variable in found.items()]
                )
        values = self._waiting
        if values is None or len(values) != len(self._inner_weights()):
            return
        self._waiting = None
        # The first step of a tf.function may be what builds the optimizer. Traced, these values
        # would be set again on every step.
        with tf.init_scope():
            tf_keras.backend.batch_set_value(list(zip(self._inner_weights(), values, strict=True)))

    def _build_alike(self, other: Any) -> None:
        if self._trained:
            other._build(*self._trained)

    def _inner_values(self) -> list[Any]:
        waiting = self._waiting
        values = values_of(self._inner_weights()) if waiting is None else waiting
        return [np.array(value) for value in values]

    def _take_inner_values(self, values: Sequence[Any]) -> None:
        if values:
            self._waiting = list(values)
            # The count is asked for before the variables exist that are trained.
            self._inner_iterations().assign(values[0])
            self._load_what_waited()


def values_of(variables: Any) -> list[Any]:
    """Returns the values of variables as NumPy arrays.

    Args:
        variables: A sequence, or a mapping whose values they are.
    """
    if isinstance(variables, Mapping):
        variables = list(variables.values())
    return [np.asarray(value) for value in tf_keras.backend.batch_get_value(list(variables))]
