"""The variables that hold a rule's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from lossscale.rules import ScaleRule, ScaleState

# The names that Keras 3 uses for the first two; other rules may have more fields.
_VARIABLE_NAMES = {"scale": "dynamic_scale", "good_steps": "step_counter"}


class State:
    """A rule and the variables that hold its state.

    Args:
        rule: The rule that moves the state.
        add_variable: Makes a scalar variable of a name, a dtype and a first value.
        backend: What loss scaling needs of the Keras backend.
    """

    def __init__(
        self,
        rule: ScaleRule,
        add_variable: Callable[[str, str, Any], Any],
        backend: Any,
    ) -> None:
        self.rule = rule
        self._read = backend.read
        self._namespace = backend.namespace
        self._first = rule.init()
        # Keras' order: the counter before the scale.
        fields = sorted(self._first._fields, key=lambda field: field != "good_steps")
        self.variables = {
            field: add_variable(
                _VARIABLE_NAMES.get(field, f"loss_scale_{field}"), _dtype(value), value
            )
            for field, value in ((field, getattr(self._first, field)) for field in fields)
        }

    def read(self) -> ScaleState:
        """Returns the state as tensors."""
        return self._first._replace(
            **{field: self._read(variable) for field, variable in self.variables.items()}
        )

    def write(self, state: ScaleState) -> None:
        """Sets the state from tensors, arrays or Python numbers."""
        for field, value in zip(state._fields, state, strict=True):
            self.variables[field].assign(ops.cast(value, self.variables[field].dtype))

    def update(self, finite: Any) -> None:
        """Moves the state after a step; `finite` is a boolean scalar tensor or True."""
        if finite is True:
            finite = ops.convert_to_tensor(True)
        before = self.read()
        after = self.rule.update(before, finite, xp=self._namespace)
        if after is not before:
            self.write(after)

    def restore(self, values: dict[str, Any]) -> None:
        """Sets the state from numbers of a file, made valid for the rule."""
        state = self._first._replace(**{k: v for k, v in values.items() if k in self.variables})
        self.write(self.rule.restored(state))


def _dtype(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "float32"
