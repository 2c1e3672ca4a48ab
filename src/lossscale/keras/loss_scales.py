"""What a loss scale object needs of Keras before it meets an optimizer."""

from __future__ import annotations

from typing import Any

import keras

from lossscale.keras import backends
from lossscale.keras.state import State
from lossscale.keras_common.contract import ArrayCode
from lossscale.keras_common.loss_scales import SharedSupport
from lossscale.rules import ScaleRule


class LossScaleSupport(SharedSupport):
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

    @classmethod
    def _array_code(cls) -> ArrayCode:
        return backends.load()
