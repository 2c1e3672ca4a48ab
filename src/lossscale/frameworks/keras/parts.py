"""What the parts of the shell of Keras 3 use of each other and of Keras' base class, as types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from lossscale.frameworks.common.handover import GradientHandover
from lossscale.frameworks.common.notes import NotesOfVariables
from lossscale.frameworks.keras.backends.contract import Backend
from lossscale.frameworks.keras.iterations import StepCounter
from lossscale.frameworks.keras.state import State
from lossscale.members import VariableList
from lossscale.rules import ScaleRule


class Parts:
    """The base of each part: attributes that the constructor sets, and methods of other parts."""

    name: str
    built: bool
    inner_optimizer: Any

    _rule: ScaleRule
    # None where a loss scale of the older API moves by its user's own code.
    _state: State | None
    _backend: Backend
    _handover: GradientHandover
    _iterations: StepCounter
    _steps_skipped: Any
    _last_step_skipped: Any
    # What was loaded before the variables exist that it belongs to.
    _waiting: dict[str, Any] | None
    _added_slots: dict[tuple[str, Any], Any]
    _variables: list[Any]
    _trainable_variables: list[Any]
    # A monitor sets it in the instance's dictionary, past attribute tracking: it is not saved.
    _notes: ClassVar[NotesOfVariables | None] = None

    if TYPE_CHECKING:
        # Of other parts.
        @property
        def dynamic(self) -> bool: ...
        @property
        def iterations(self) -> Any: ...
        @property
        def _lasting_variables(self) -> VariableList: ...
        @property
        def variables(self) -> VariableList: ...
        def apply_gradients(
            self,
            grads_and_vars: Iterable[tuple[Any, Any]],
            name: str | None = None,
            skip_gradients_aggregation: bool = False,
            experimental_aggregate_gradients: bool = True,
        ) -> Any: ...
        def _current_scale(self) -> Any: ...
        def _scaled(self, loss: Any) -> Any: ...
        def _decide(self, unscaled: list[Any]) -> Any: ...
        def _load_what_waited(self) -> None: ...
        def _after_weights_were_set(self) -> None: ...

        # Of Keras' base class.
        @property
        def learning_rate(self) -> Any: ...
        @learning_rate.setter
        def learning_rate(self, value: Any) -> None: ...
        def _var_key(self, variable: Any) -> Any: ...
