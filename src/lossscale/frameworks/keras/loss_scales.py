"""What a loss scale object needs of Keras before it meets an optimizer."""

from __future__ import annotations

from typing import Any

import keras

from lossscale.frameworks.keras import backends
from lossscale.frameworks.keras.state import State
from lossscale.rules import ScaleRule


class LossScaleSupport:
    """Makes variables, constants and finite checks without an optimizer."""

    @staticmethod
    def _new_variable(name: str, dtype: Any, value: Any) -> Any:
        return keras.Variable(
            value,
            dtype=None if dtype is None else keras.backend.standardize_dtype(dtype),
            trainable=False,
            aggregation="only_first_replica",
            name=name,
        )

    @classmethod
    def _new_state(cls, rule: ScaleRule) -> State:
        return State(rule, cls._new_variable, backends.load())

    @staticmethod
    def _constant(value: float) -> Any:
        return keras.ops.convert_to_tensor(value, dtype="float32")

    @staticmethod
    def _operation(done: Any) -> Any:
        """What a caller has to run for something to be done: nothing."""
        return None

    @staticmethod
    def _after(done: Any, value: Any) -> Any:
        """Returns a value that is there once something was done."""
        return value

    @staticmethod
    def _flat_gradients(gradients: Any) -> list[Any]:
        flat: list[Any] = backends.load().flat_gradients(gradients)
        return flat

    @staticmethod
    def _all_finite(gradients: list[Any]) -> Any:
        return backends.load().all_finite(gradients)
