"""What the parts of the shell of Keras 3 use of each other and of Keras' base class, as types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import keras

from lossscale.common.notes import NotesOfVariables
from lossscale.keras.backends.contract import Backend
from lossscale.keras.iterations import StepCounter
from lossscale.keras.state import State
from lossscale.keras_common.parts import SharedParts
from lossscale.members import VariableList

if TYPE_CHECKING:
    from lossscale.keras_common.contract import ShellOfKeras3 as _Contract
else:
    _Contract = object


class Parts(SharedParts, _Contract):
    """The base of each part: attributes that the constructor sets, and methods of other parts."""

    _library = keras

    name: str
    built: bool
    inner_optimizer: Any

    # None where a loss scale of the older API moves by its user's own code.
    _state: State | None
    _backend: Backend
    _iterations: StepCounter
    # What was loaded before the variables exist that it belongs to.
    _waiting: dict[str, Any] | None
    _variables: list[Any]
    _tracker: Any
    _trainable_variables: list[Any]
    _notes: ClassVar[NotesOfVariables | None] = None

    if TYPE_CHECKING:
        # Of other parts.
        @property
        def dynamic(self) -> bool: ...
        @property
        def _lasting_variables(self) -> VariableList: ...
        def _after_weights_were_set(self) -> None: ...

        # Of Keras' base class.
        @property
        def learning_rate(self) -> Any: ...
        @learning_rate.setter
        def learning_rate(self, value: Any) -> None: ...
        def _var_key(self, variable: Any) -> Any: ...
