"""The loss scale optimizer for Keras 3: what it is made of, and what can be read from it."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from lossscale.arguments import check_described, rule_from_arguments
from lossscale.common.checks import remember_wrapper
from lossscale.common.handover import GradientHandover
from lossscale.errors import ArgumentError
from lossscale.keras import backends, older_names
from lossscale.keras.checks import check_inner, check_names
from lossscale.keras.iterations import StepCounter
from lossscale.keras.loss_scales import LossScaleSupport
from lossscale.keras.persistence import LossScaleStore, Persistence
from lossscale.keras.settings import SETTINGS_OF_THE_BASE, InnerSettings
from lossscale.keras.state import State
from lossscale.keras.training import TrainingStep
from lossscale.keras.verbs import DocumentedVerbs
from lossscale.keras.weights import DocumentedWeights
from lossscale.keras_common.reading import SharedReading
from lossscale.members import VariableList
from lossscale.optimizer import LossScaleOptimizer


@keras.saving.register_keras_serializable(package="lossscale", name="LossScaleOptimizer")
class KerasLossScaleOptimizer(
    InnerSettings,
    TrainingStep,
    DocumentedVerbs,
    DocumentedWeights,
    Persistence,
    LossScaleSupport,
    SharedReading,
    LossScaleOptimizer,
    keras.optimizers.LossScaleOptimizer,
):
    __doc__ = LossScaleOptimizer.__doc__

    _framework: ClassVar[str | None] = "keras"

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: Any = True,
        initial_scale: Any = None,
        dynamic_growth_steps: Any = None,
        *,
        rule: Any = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_names(kwargs)
        rule = rule_from_arguments(dynamic, initial_scale, dynamic_growth_steps, rule)
        check_inner(inner_optimizer)
        backend = backends.load()
        backend.check_strategy()
        # Past Keras' own class, whose constructor would clear the inner optimizer's settings.
        super(keras.optimizers.LossScaleOptimizer, self).__init__(  # type: ignore[call-arg]
            learning_rate=0.0, name=name or "loss_scale_optimizer"
        )
        for setting in SETTINGS_OF_THE_BASE:
            del self.__dict__[setting]
        # Two variables of Keras' base class have no effect here. A new list, because TensorFlow
        # saves no checkpoint of a list that something was taken out of.
        del self._learning_rate, self._iterations
        self._variables: Any = []
        self._tracker = type(self._tracker)(
            {"variables": (lambda value: isinstance(value, keras.Variable), self._variables)}
        )
        self._backend = backend
        self.inner_optimizer = inner_optimizer
        self._rule = rule
        self._handover = GradientHandover()
        self._waiting = None
        # Past attribute tracking, which would count these variables as own ones.
        self.__dict__["_added_slots"] = {}
        self.loss_scale_state = LossScaleStore(self._own_values, self._set_own_values)
        self._create_state()
        remember_wrapper(inner_optimizer, self)

    def _create_state(self) -> None:
        self._state = self._first_state()
        variables = self._state.variables if self._state is not None else {}
        self.step_counter = variables.get("good_steps")
        self.dynamic_scale = variables.get("scale")
        self._steps_skipped = self._add_own_variable("steps_skipped", "int", 0)
        self._last_step_skipped = self._add_own_variable("last_step_skipped", "bool", False)
        with keras.name_scope(self.name):
            self._iterations = StepCounter(self.inner_optimizer, self._steps_skipped)
        if all(variable is not self._iterations for variable in self._variables):
            # Keras switches attribute tracking off while it compiles a model.
            self._track_variable(self._iterations)
        self._iterations.follow()

    def _first_state(self) -> State | None:
        return State(self._rule, self._add_own_variable, self._backend)

    def _add_own_variable(self, name: str, dtype: str, value: Any) -> Any:
        return self.add_variable(
            shape=(),
            dtype=dtype,
            # An initializer of Keras would be looked up by its name, and compute.
            initializer=lambda shape, dtype: np.full(shape, value, dtype),
            # Every replica computes the same value.
            aggregation="only_first_replica",
            name=name,
        )

    # --- What can be read ---------------------------------------------------------------------

    @property
    def loss_scale(self) -> Any:
        return ops.cast(self._current_scale(), "float32")

    @property
    def dynamic_counter(self) -> Any:
        return self.step_counter if self.dynamic else None

    @property
    def iterations(self) -> Any:
        if self.gradient_accumulation_steps:
            return ops.floor_divide(self._iterations, self.gradient_accumulation_steps)
        return self._iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self._iterations.assign(value)

    @property
    def variables(self) -> VariableList:
        return VariableList([*self._lasting_variables, *getattr(self._notes, "variables", ())])

    @property
    def _lasting_variables(self) -> VariableList:
        return VariableList([*self._variables, *self.inner_optimizer.variables])

    # --- Configuration ------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            **self._described_rule(),
        }

    @classmethod
    def _inner_from_config(cls, config: Any, custom_objects: Any) -> Any:
        if isinstance(config, keras.optimizers.Optimizer):
            return config
        check_described(config, "inner optimizer")
        # A copy: Keras lower-cases the class name in the dictionary it is given.
        config = older_names.inner_config(config, custom_objects)
        inner = keras.optimizers.deserialize(config, custom_objects=custom_objects)
        if not isinstance(inner, str):
            return inner
        # Keras' way of saying that its own list has no optimizer of this name. It lacks some that
        # Keras has (Lamb).
        if config.get("module") is None and hasattr(keras.optimizers, inner):
            config = {**config, "module": "keras.optimizers"}
        try:
            return keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
        except TypeError as error:
            raise ArgumentError(
                f"The optimizer {inner!r} in the configuration is not known. Pass its class in "
                f"custom_objects={{{inner!r}: ...}}."
            ) from error
