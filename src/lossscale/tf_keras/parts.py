"""What the parts of the shells of tf_keras use of each other and of its base classes, as types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import tf_keras

from lossscale.keras_common.contract import ArrayCode
from lossscale.keras_common.parts import SharedParts
from lossscale.tf_keras import array_code
from lossscale.tf_keras.iterations import StepCounter
from lossscale.tf_keras.state import State

if TYPE_CHECKING:
    from lossscale.keras_common.contract import ShellOfTFKeras as _Contract
else:
    _Contract = object


class Parts(SharedParts, _Contract):
    """The base of each part: attributes that the constructor sets, and methods of other parts."""

    _library = tf_keras
    _backend: ArrayCode = array_code
    _is_legacy: ClassVar[bool]

    # The inner optimizer.
    _optimizer: Any
    _given_name: str | None
    # None where a loss scale of the older API moves by its user's own code.
    _state: State | None
    _step_counter: StepCounter
    # Variables of a LossScale object, by name.
    _loose_variables: dict[str, Any]
    # What was loaded before the variables exist that it belongs to.
    _waiting: list[Any] | None
    # What the optimizer was built with.
    _trained: tuple[Any, ...]
    _warned_of_none: bool

    if TYPE_CHECKING:
        # Of other parts.
        @property
        def iterations(self) -> StepCounter: ...
        def _result(self, done: Any) -> Any: ...
        def _own_variables(self) -> dict[str, Any]: ...
        def _inner_iterations(self) -> Any: ...
        def _unlisted_variables(self) -> dict[str, Any]: ...
        def _find_slot(self, var: Any, slot_name: str) -> Any: ...

        # What differs between the two families of optimizers.
        def _inner_weights(self) -> list[Any]: ...
        def _inner_gradients(self, loss: Any, variables: list[Any], tape: Any) -> list[Any]: ...
        def _symbolic_gradients(self, loss: Any, variables: Sequence[Any]) -> list[Any]: ...
        def _aggregated(self, pairs: list[Any]) -> Any: ...
        def _apply_inner(self, pairs: list[Any], name: str | None) -> Any: ...
        def _can_gate(self, gradients: Sequence[Any]) -> bool: ...
        def _written(self, trained: Sequence[Any]) -> list[Any]: ...
