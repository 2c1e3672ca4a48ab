"""What the parts of a shell of Keras use of each other, whatever the generation, as types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from lossscale.common.handover import GradientHandover
from lossscale.common.notes import NotesOfVariables
from lossscale.keras_common.contract import ArrayCode, StateVariables
from lossscale.members import VariableList
from lossscale.rules import ScaleRule

if TYPE_CHECKING:
    # A part may ask for what the contract has and another part gives. mypy then counts each shell
    # as abstract that lacks some of it.
    from lossscale.keras_common.contract import Shell as _Contract
else:
    _Contract = object


class SharedParts(_Contract):
    """The base of each part: attributes that the constructor sets, and methods of other parts."""

    # The module `keras` or `tf_keras`.
    _library: ClassVar[Any]

    _backend: ArrayCode
    _rule: ScaleRule
    _handover: GradientHandover
    _steps_skipped: Any
    _last_step_skipped: Any
    # None where a loss scale of the older API moves by its user's own code.
    _state: StateVariables | None
    # By the name of the slot and the key of its variable.
    _added_slots: dict[tuple[str, Any], Any]
    # A monitor sets it in the instance's dictionary, past attribute tracking: it is not saved.
    _notes: ClassVar[NotesOfVariables | None] = None

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...
        @property
        def inner_optimizer(self) -> Any: ...
        @property
        def iterations(self) -> Any: ...
        @property
        def variables(self) -> VariableList: ...
        @property
        def weights(self) -> VariableList: ...
        @classmethod
        def _array_code(cls) -> ArrayCode: ...
        def apply_gradients(
            self,
            grads_and_vars: Iterable[tuple[Any, Any]],
            name: str | None = None,
            skip_gradients_aggregation: bool = False,
            experimental_aggregate_gradients: bool = True,
        ) -> Any: ...
        def _scaled(self, loss: Any) -> Any: ...
        def _decide(self, unscaled: list[Any]) -> Any: ...
        def _load_what_waited(self) -> None: ...
