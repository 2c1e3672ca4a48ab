"""The variables of a rule's state, and their place in a model file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import lossscale.framework_types as ft
from lossscale.common.arrays import Arrays
from lossscale.packages import warn
from lossscale.rules import ScaleRule, changed_fields


class ScaleVariables:
    """A rule and the variables that hold its state.

    Args:
        rule: The rule that moves the state.
        names: The fields that are kept, and their names in files.
        new_variable: Makes a scalar variable of a name, a kind of number and a first value.

    Attributes:
        arrays: The functions of the framework.
        namespace: The array functions for `ScaleRule.update`.
        first: The first state, as Python numbers.
        variables: A variable for each field that is kept.
    """

    # Whether to apply the gradients of a step; None where they need only be finite.
    decide: Callable[[list[ft.Gradient]], ft.Scalar] | None = None
    arrays: Arrays
    namespace: Any
    # Makes a tensor of a bool.
    _tensor: Callable[[bool], ft.Tensor]

    def __init__(
        self, rule: ScaleRule, names: dict[str, str], new_variable: Callable[..., ft.Variable]
    ) -> None:
        self.rule, self.names, self.variables = rule, names, dict[str, ft.Variable]()
        self.first: ft.RuleState = rule.init()
        for field, name in names.items():
            value = getattr(self.first, field)
            whole = "bool" if isinstance(value, bool) else "int"
            kind = whole if isinstance(value, int) else "float32"
            self.variables[field] = new_variable(name, kind, value)

    def read(self) -> ft.RuleState:
        """Returns the state as tensors; of a fixed scale, as Python numbers of the program."""
        if not self.rule.is_dynamic:
            # A restored file must not override the number in the program.
            return self.first
        return self.read_by(self.arrays.read)

    def scale(self) -> ft.Scalar:
        """Returns the loss scale as `read` does."""
        if not self.rule.is_dynamic:
            return self.first.scale
        return self.arrays.read(self.variables["scale"])

    def read_by(self, read: Callable[[ft.Variable], ft.Scalar]) -> ft.RuleState:
        """Returns the state with the values that a function reads of its variables."""
        return self.first._replace(**{field: read(v) for field, v in self.variables.items()})

    def write(self, state: ft.RuleState) -> ft.Operation:
        """Sets the state from tensors, arrays or Python numbers; returns what `assign` does."""
        values = state._asdict()
        return [self.arrays.assign(each, values[f]) for f, each in self.variables.items()]

    def update(self, finite: ft.Scalar) -> ft.Operation:
        """Updates the state after a step; returns what `assign` does, None if nothing changes."""
        if not self.rule.is_dynamic:
            return None
        read_number = self.arrays.host_reader()
        if self.rule.exact_on_host and read_number is not None:
            changed = changed_fields(self.rule, self.read_by(read_number), bool(finite))
            return [self.arrays.assign(self.variables[f], value) for f, value in changed.items()]
        before = self.read()
        known = self._tensor(finite) if isinstance(finite, bool) else finite
        after = self.rule.update(before, known, xp=self.namespace)
        return None if after is before else self.write(after)

    @property
    def named(self) -> dict[str, ft.Variable]:
        """The variables by their names in files."""
        return {name: self.variables[field] for field, name in self.names.items()}

    def restored(self, values: Mapping[str, Any]) -> ft.RuleState:
        """Returns a state of Python numbers from a file, brought into the rule's range.

        Args:
            values: Arrays by name; a missing field is that of the first state.
        """
        saved = {f: values[name].item() for f, name in self.names.items() if name in values}
        state = self.rule.restored(self.first._replace(**saved))
        scale = saved.get("scale", state.scale)
        if self.rule.is_dynamic and np.float32(scale) != np.float32(state.scale):
            warn(
                f"The saved loss scale, {scale}, is outside the range of {self.rule}. Training "
                f"continues with {state.scale}."
            )
        return state


def parts_of(attribute: object) -> list[Any]:
    """The objects in a dictionary, list, tuple or set; of anything else the object itself."""
    if isinstance(attribute, dict):
        return list(attribute.values())
    return list(attribute) if isinstance(attribute, (list, tuple, set)) else [attribute]
