"""The variables of the rule's state, and the step counter."""

from __future__ import annotations

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
        self.arrays, self.namespace = backend.arrays, backend.namespace
        # Keras' order: the counter before the scale.
        fields = sorted(rule.init()._fields, key=lambda field: field != "good_steps")
        names = {field: _NAMES.get(field, f"loss_scale_{field}") for field in fields}
        super().__init__(rule, names, new_variable)

    @staticmethod
    def _tensor(value: bool) -> ft.Tensor:
        return ops.convert_to_tensor(value)


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
    """The step counter of the documents, which counts skipped steps: the sum of two variables.

    The inner optimizer must not count these: Adam's bias correction and learning rate schedules use
    its counter. The sum is computed when it is read, and is right at once after any load.

    Args:
        inner: The optimizer that counts the applied steps.
        skipped: The number of skipped steps, an integer scalar variable.
    """

    def __init__(self, inner: ft.KerasOptimizer, skipped: ft.Variable) -> None:
        super().__init__("iteration", "int", 0)
        self._inner, self._skipped = inner, skipped

    @property
    def value(self) -> ft.Tensor:
        """The number of steps."""
        # In this order: without a value, the second would not say why.
        return self._skipped.value + self._inner._iterations.value

    def assign(self, value: ft.Scalar) -> ft.Tensor:
        """Sets the number of steps, and the inner optimizer's counter to it minus the skips.

        A number below the number of skips lowers that too: no optimizer works with a negative
        counter (Adam's bias correction becomes NaN).
        """
        value = ops.cast(value, self.dtype)
        stored = self._skipped._value
        is_gone = stored is None or getattr(stored, "is_deleted", bool)()
        if is_gone and not backends.in_stateless_scope():
            # On JAX the trainer, or a loop whose step got the old arrays as donated ones, gives all
            # variables their values again, of which this is the first.
            return value
        skipped = self._skipped.assign(ops.minimum(self._skipped.value, value))
        self._inner._iterations.assign(value - skipped)
        return value

    def _number(self) -> ft.Scalar:
        return ops.convert_to_numpy(self.value).item()

    # For TensorFlow's `Checkpoint(step=optimizer.iterations)`. Of an optimizer that is in it too, a
    # restore sets the skips before the inner optimizer's counter, so this may come at any time.

    _shared_name = "iteration"

    def _serialize_to_tensors(self) -> dict[str, ft.Tensor]:
        return {"VARIABLE_VALUE": self.value}

    def _restore_from_tensors(self, restored_tensors: dict[str, ft.Tensor]) -> None:
        self.assign(restored_tensors["VARIABLE_VALUE"])

    def __repr__(self) -> str:
        return f"<StepCounter value={self.value}>"
