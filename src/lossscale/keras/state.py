"""The variables that hold a rule's state, and those that count steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from lossscale.common.state_names import variable_name
from lossscale.keras.iterations import StepCounter
from lossscale.keras_common.state import StateBody, kind_of_number
from lossscale.rules import ScaleRule, ScaleState, Seen


class State(StateBody):
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
        self.first = rule.init()
        # Keras' order: the counter before the scale.
        fields = sorted(self.first._fields, key=lambda field: field != "good_steps")
        self.variables = {
            field: add_variable(variable_name(field), kind_of_number(value), value)
            for field, value in ((field, getattr(self.first, field)) for field in fields)
        }

    def write(self, state: ScaleState) -> None:
        """Sets the state from tensors, arrays or Python numbers."""
        for field, value in zip(state._fields, state, strict=True):
            self.variables[field].assign(ops.cast(value, self.variables[field].dtype))

    def update(self, seen: Seen) -> None:
        """Moves the state after a step."""
        if seen.finite is True:
            seen = seen._replace(finite=ops.convert_to_tensor(True))
        before = self.read()
        after = self.rule.update(before, seen, xp=self._namespace)
        if after is not before:
            self.write(after)

    def restore(self, values: dict[str, Any]) -> None:
        """Sets the state from numbers of a file, made valid for the rule."""
        state = self.first._replace(**{k: v for k, v in values.items() if k in self.variables})
        self.write(self.rule.restored(state))


class Ledger(NamedTuple):
    """All that a step moves besides what the inner optimizer does.

    Attributes:
        state: The rule's state; None where a loss scale of the older API moves by itself.
        steps_skipped: Integer scalar variable, in steps.
        last_step_skipped: Boolean scalar variable.
        iterations: All steps, skipped ones included.
        known: Returns a verdict as a bool where it is known before the step runs, else None.
    """

    state: State | None
    steps_skipped: Any
    last_step_skipped: Any
    iterations: StepCounter
    known: Callable[[Any], bool | None]

    def move(self, seen: Seen) -> None:
        """Moves the loss scale after a step, and counts the step."""
        if self.state is not None:
            self.state.update(seen)
        if seen.finite is not True:
            known = self.known(seen.finite)
            skipped = ops.logical_not(seen.finite) if known is None else not known
            self.last_step_skipped.assign(skipped)
            if known is None:
                self.steps_skipped.assign_add(ops.cast(skipped, self.steps_skipped.dtype))
            elif skipped:
                self.steps_skipped.assign_add(1)
        self.iterations.follow()
