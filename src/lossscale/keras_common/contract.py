"""What a shell of Keras has to offer to the rest of the library, as types.

`lossscale.LossScaleOptimizer` picks a shell by the framework of the optimizer to wrap. The members
that users see are declared in `lossscale.members`; these are the others. A class that offers them
all is a shell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from lossscale.common.handover import Place
from lossscale.common.notes import NotesOfVariables
from lossscale.rules import ScaleRule, ScaleState, Seen


class StateVariables(Protocol):
    """A rule and the variables that hold its state.

    Attributes:
        rule: The rule that moves it.
        variables: A scalar variable for each field of the state that is kept, by field.
        first: The first state, as Python numbers.
    """

    rule: ScaleRule
    variables: dict[str, Any]
    first: ScaleState

    def read(self) -> ScaleState:
        """Returns the state as tensors."""

    def write(self, state: ScaleState) -> Any:
        """Sets the state from tensors, arrays or Python numbers."""

    def update(self, seen: Seen) -> Any:
        """Moves the state after a step."""


class ArrayCode(Protocol):
    """What the shared parts need of a framework's arrays and variables."""

    def current_place(self) -> Place:
        """The function being traced, and the replica."""

    def is_variable(self, value: Any) -> bool:
        """Whether a gradient can be applied to it."""

    def flat_variables(self, variables: Any) -> list[Any]:
        """Returns a list of variables from one variable or a nest of them."""

    def read(self, variable: Any) -> Any:
        """The value of a variable now, as a tensor that does not change with it."""

    def scaled(self, loss: Any, scale: Any) -> Any:
        """Multiplies a loss by the scale, in float32 or wider."""

    def unscaled(self, gradients: Sequence[Any], scale: Any, powers_of_two: bool) -> list[Any]:
        """Divides gradients by the scale, in float32 or wider; sparse stays sparse."""

    def all_finite(self, gradients: Sequence[Any]) -> Any:
        """Whether gradients are finite, a boolean scalar tensor."""

    def flat_gradients(self, gradients: Any) -> list[Any]:
        """The gradients in a nest, without None."""

    def replica_count(self) -> int:
        """How many replicas train together."""


class ShellClass(Protocol):
    """What is asked of the class itself, before there is an optimizer."""

    _framework: ClassVar[str | None]

    # For configurations and files.

    @classmethod
    def _registered_name(cls, named: type[Any]) -> str:
        """Returns the name by which a configuration can name a class."""

    @classmethod
    def _with_class_named(cls, described: Any, custom_objects: Any) -> dict[str, Any]:
        """Returns `custom_objects` and the class that `described` names, if it is registered."""

    @classmethod
    def _register(cls, combined: type[Any], written: type[Any]) -> None:
        """Lets files name a class that was combined with the shell."""

    @classmethod
    def _inner_from_config(cls, config: Any, custom_objects: Any) -> Any:
        """Returns the inner optimizer that a configuration of any release describes."""

    # For `LossScale` objects of the older API, which may be used without an optimizer.

    @staticmethod
    def _new_variable(name: str, dtype: Any, value: Any) -> Any:
        """Returns a new scalar variable that every replica moves alike."""

    @classmethod
    def _new_state(cls, rule: ScaleRule) -> StateVariables:
        """Returns the first state of a rule in new variables."""

    @staticmethod
    def _constant(value: float) -> Any:
        """Returns a float32 scalar tensor."""

    @classmethod
    def _flat_gradients(cls, gradients: Any) -> list[Any]:
        """Returns the gradients in a nest, without None."""

    @classmethod
    def _all_finite(cls, gradients: list[Any]) -> Any:
        """Returns whether gradients are finite, a boolean scalar tensor."""

    @staticmethod
    def _operation(done: Any) -> Any:
        """Returns what a caller has to run for something to be done; None if it is done."""

    @staticmethod
    def _after(done: Any, value: Any) -> Any:
        """Returns a value that is there once something was done."""


class Shell(ShellClass, Protocol):
    """What is asked of an optimizer."""

    _rule: ScaleRule
    _notes: ClassVar[NotesOfVariables | None]
    # Scalar variables: in steps, and whether.
    _steps_skipped: Any
    _last_step_skipped: Any

    @property
    def _state(self) -> StateVariables | None:
        """The state; None where a loss scale of the older API moves by its user's own code."""

    # For the older API, whose `LossScale` may take the place of a rule.

    def _current_scale(self) -> Any:
        """Returns the loss scale of the next step, a float32 scalar tensor."""

    def _constructor_arguments(self) -> dict[str, Any]:
        """Returns the arguments besides the inner optimizer that make this one again."""

    # For a monitor.

    def _keep_notes(self, histograms_every: int | None) -> None:
        """Lets steps note what a monitor reads."""

    # For saving, copying and migration.

    def _own_values(self) -> dict[str, Any]:
        """Returns the values of the loss scale's variables and the counters, by name."""

    def _set_own_values(self, values: Any) -> None:
        """Sets them, made valid for the rule."""


class ShellOfKeras3(Shell, Protocol):
    """What is asked besides of an optimizer of Keras 3: by the monitor, and by migration."""

    @property
    def _iterations(self) -> Any:
        """The variable that counts every step, where `iterations` may be divided."""

    def _can_load(self, count: int) -> bool:
        """Whether a file with this many arrays can be one of the inner optimizer."""

    def _load_inner(self, values: dict[str, Any]) -> None:
        """Sets the inner optimizer's variables from the arrays of a file, by number."""

    def _restore_scale(self, values: Mapping[str, Any]) -> None:
        """Sets the state from numbers of a file by the names of its variables."""


class ShellOfTFKeras(Shell, Protocol):
    """What is asked besides of an optimizer of tf_keras: by the monitor, and by migration."""

    _is_legacy: ClassVar[bool]

    @property
    def _trained(self) -> tuple[Any, ...]:
        """The list of variables that it was built with; empty before it is."""

    def _build(self, variables: list[Any], has_gradient: Sequence[bool] = ()) -> None:
        """Creates the inner optimizer's variables for these."""

    def _build_notes(self, variables: Sequence[Any]) -> None:
        """Makes room in the notes for the gradients of these variables."""
