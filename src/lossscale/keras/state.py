"""The variables of the rule's state, and the step counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

import lossscale.framework_types as ft
import lossscale.keras.backends as backends
from lossscale.keras_common.state import ScaleVariables
from lossscale.rules import ScaleRule

# The names that Keras' own class writes into files; other rules may have more fields.
_NAMES = {"scale": "dynamic_scale", "good_steps": "step_counter"}


class KerasScaleVariables(ScaleVariables):
    """A rule and the variables that hold its state, one for each field.

    Args:
        rule: The rule that moves the state.
    """

    def __init__(self, rule: ScaleRule) -> None:
        backend = backends.load()
        self._read, self._namespace = backend.read, backend.namespace
        # Keras' order: the counter before the scale.
        fields = sorted(rule.init()._fields, key=lambda field: field != "good_steps")
        names = {field: _NAMES.get(field, f"loss_scale_{field}") for field in fields}
        super().__init__(rule, names, new_variable)

    def write(self, state: ft.RuleState) -> None:
        """Sets the state from tensors, arrays or Python numbers."""
        for field, value in zip(state._fields, state, strict=True):
            self.variables[field].assign(ops.cast(value, self.variables[field].dtype))

    def update(self, finite: ft.Scalar) -> None:
        """Updates the state after a step."""
        super().update(ops.convert_to_tensor(finite) if isinstance(finite, bool) else finite)


class OwnVariable(keras.Variable):
    """A scalar variable that every replica updates alike, and that is a number outside of them."""

    def __init__(self, name: str, dtype: str, value: ft.Scalar) -> None:
        super().__init__(
            # An initializer of Keras would be looked up by its name, and compute.
            initializer=lambda shape, dtype: np.full(shape, value, dtype),
            shape=(),
            dtype=dtype,
            trainable=False,
            aggregation="only_first_replica",
            name=name,
        )

    def _number(self) -> ft.Scalar:
        # TensorFlow's mirrored variables are no numbers; a tensor is that of one replica.
        return ops.convert_to_numpy(ops.convert_to_tensor(self)).item()

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __bool__(self) -> bool:
        return bool(self._number())


def new_variable(name: str, dtype: ft.DType, value: ft.Scalar) -> OwnVariable:
    """Returns a new scalar variable of loss scaling.

    Args:
        name: Its name.
        dtype: Its dtype or the name; None stands for that of `value`.
        value: Its first value.
    """
    if dtype is None:
        dtype = ops.convert_to_tensor(value).dtype
    variable = OwnVariable(name, keras.backend.standardize_dtype(dtype), value)
    backends.load().prepare_own_variable(variable)
    return variable


class StepCounter(OwnVariable):
    """Counts applied and skipped steps; an assignment also sets the inner optimizer's counter.

    TensorFlow's documents count every call of `apply_gradients`, including skipped steps. The inner
    optimizer must not count these: Adam's bias correction and learning rate schedules use its
    counter, and would run ahead of the updates (Adam's first step after ten skipped ones would be
    0.48 of its size). So there are two counters, `inner.iterations` (applied steps) and this one
    (all steps), and their difference is the number of skipped steps.

    Args:
        inner: The optimizer whose counter is followed.
        skipped: The number of skipped steps, an integer scalar variable.
        when_plain: Called when the counter of an optimizer without loss scaling is restored.
    """

    def __init__(
        self, inner: ft.KerasOptimizer, skipped: ft.Variable, when_plain: Callable[[], None]
    ) -> None:
        super().__init__("iteration", "int", 0)
        self._when_plain = when_plain
        self._applied, self._skipped = inner._iterations, skipped

    def assign(self, value: ft.Scalar) -> ft.Tensor:
        """Sets the number of steps, and the inner optimizer's counter to it minus the skips.

        A number below the number of skips lowers that too: no optimizer works with a negative
        counter (Adam's bias correction becomes NaN).
        """
        value = super().assign(value)
        skipped = ops.minimum(self._skipped, value)
        self._skipped.assign(skipped)
        self._applied.assign(value - skipped)
        return value

    def follow(self) -> None:
        """Sets the number of steps from the inner optimizer's counter and the skips."""
        super().assign(self._applied + self._skipped)

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> None:
        """Restores the counter from TensorFlow's checkpoint of an optimizer without loss scaling.

        Keras' own class has a counter in this place too, which stays 0, and a learning rate of 0.
        """
        (value,) = restored_tensors.values()
        if value > 0:
            self._skipped.assign(0)
            self.assign(value)
            self._when_plain()
