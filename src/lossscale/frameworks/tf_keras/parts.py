"""What the parts of the shells of tf_keras use of each other and of its base classes, as types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lossscale.frameworks.common.handover import GradientHandover
from lossscale.frameworks.tensorflow.notes import Notes
from lossscale.frameworks.tf_keras.iterations import StepCounter
from lossscale.frameworks.tf_keras.state import State
from lossscale.members import VariableList
from lossscale.rules import ScaleRule


class Parts:
    """The base of each part: attributes that the constructor sets, and methods of other parts."""

    _is_legacy: ClassVar[bool]

    # The inner optimizer.
    _optimizer: Any
    _given_name: str | None
    _rule: ScaleRule
    # None where a loss scale of the older API moves by its user's own code.
    _state: State | None
    _handover: GradientHandover
    _step_counter: StepCounter
    _steps_skipped: Any
    _last_step_skipped: Any
    # Variables of a LossScale object, by name.
    _loose_variables: dict[str, Any]
    _added_slots: dict[Any, Any]
    # What was loaded before the variables exist that it belongs to.
    _waiting: list[Any] | None
    # What the optimizer was built with.
    _trained: tuple[Any, ...]
    _warned_of_none: bool
    # A monitor sets it in the instance's dictionary, past attribute tracking: it is not saved.
    _notes: ClassVar[Notes | None] = None

    if TYPE_CHECKING:
        # Of other parts.
        @property
        def name(self) -> str: ...
        @property
        def iterations(self) -> StepCounter: ...
        @property
        def variables(self) -> VariableList: ...
        @property
        def weights(self) -> VariableList: ...
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
        def _result(self, done: Any) -> Any: ...
        def _load_what_waited(self) -> None: ...
        def _own_variables(self) -> dict[str, Any]: ...
        def _unlisted_variables(self) -> dict[str, Any]: ...
        def _own_values(self) -> dict[str, Any]: ...
        def _set_own_values(self, values: Mapping[str, Any]) -> None: ...
        def _find_slot(self, var: Any, slot_name: str) -> Any: ...

        # What differs between the two families of optimizers.
        def _build(self, variables: list[Any], has_gradient: Sequence[bool] = ()) -> None: ...
        def _inner_weights(self) -> list[Any]: ...
        def _inner_gradients(self, loss: Any, variables: list[Any], tape: Any) -> list[Any]: ...
        def _symbolic_gradients(self, loss: Any, variables: Sequence[Any]) -> list[Any]: ...
        def _aggregated(self, pairs: list[Any]) -> Any: ...
        def _apply_inner(self, pairs: list[Any], name: str | None) -> Any: ...
        def _can_gate(self, gradients: Sequence[Any]) -> bool: ...
        def _written(self, trained: Sequence[Any]) -> list[Any]: ...
