"""The variables that hold a rule's state, as far as the generations of Keras share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lossscale.rules import ScaleRule, ScaleState


class StateBody:
    """A rule and the variables that hold its state.

    Attributes:
        rule: The rule that moves the state.
        first: The first state, as Python numbers.
        variables: A scalar variable for each field that is kept.
    """

    rule: ScaleRule
    first: ScaleState
    variables: dict[str, Any]

    _read: Callable[[Any], Any]

    def read(self) -> ScaleState:
        """Returns the state as tensors."""
        return self.first._replace(
            **{field: self._read(variable) for field, variable in self.variables.items()}
        )


def kind_of_number(value: Any) -> str:
    """Returns "bool", "int" or "float32": what a variable for a field of a state is made of."""
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "float32"
