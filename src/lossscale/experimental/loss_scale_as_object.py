"""The older API of a wrapper, in which the loss scale is an object; needs a framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from lossscale import registry
from lossscale.arguments import check_config
from lossscale.errors import ArgumentError, UnsupportedError
from lossscale.experimental.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    _RuleLossScale,
    deserialize,
    get,
    serialize,
)
from lossscale.framework_types import Gradient, KerasOptimizer, Library, Scalar
from lossscale.keras_common.state import ScaleVariables
from lossscale.rules import ScaleRule, ScaleState

if TYPE_CHECKING:
    # The wrapper class of Keras 3 or tf_keras, the next base.
    _Wrapper: Any
else:
    _Wrapper = object


class LossScaleAsObject(_Wrapper):
    """The older API of a wrapper, in which the loss scale is an object.

    A mixin before the wrapper of Keras 3 or tf_keras.
    """

    _takes_third = True

    def __init__(
        self,
        optimizer: KerasOptimizer,
        loss_scale: Scalar | str | LossScale,
        name: str | None = None,
    ) -> None:
        loss_scale = get(loss_scale)
        # For `_first_state`: Keras rejects attributes before its own constructor has run.
        self.__dict__["_given_loss_scale"] = loss_scale
        own = loss_scale._rule if _moves_by_its_rule(loss_scale) else UserLossScaleRule(loss_scale)
        super().__init__(optimizer, rule=own, name=name)

    @property
    def loss_scale(self) -> LossScale:
        """The `LossScale` of this optimizer; call it for the current value."""
        loss_scale: LossScale = self._loss_scale
        self._ledger.is_scale_read = True
        return loss_scale

    def _first_state(self) -> ScaleVariables:
        loss_scale = self.__dict__["_loss_scale"] = self.__dict__.pop("_given_loss_scale")
        if isinstance(loss_scale, _RuleLossScale):
            state = loss_scale._bound_state(type(self))
        if isinstance(self._rule, UserLossScaleRule):
            state = VariablesOfUser(self._rule, self._arrays.replica_count)
        of_rule = {id(variable) for variable in state.variables.values()}
        for variable in loss_scale._variables().values():
            if id(variable) not in of_rule:
                self._track_variable(variable)
        return state

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration: a JSON-ready dictionary, without the state."""
        config = super().get_config()
        described = serialize(self._loss_scale)
        described["class_name"] = self._registered_name(type(self._loss_scale))
        name = {"name": config["name"]} if "name" in config else {}
        return {**name, "optimizer": config["inner_optimizer"], "loss_scale": described}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Any:
        check_config(config)
        if "loss_scale" not in config:
            raise ArgumentError(
                "An experimental loss scale optimizer needs the key `loss_scale`. Received "
                f"the keys {sorted(config)}. For one of TensorFlow 2.4 or later, call "
                "lossscale.LossScaleOptimizer.from_config(config)."
            )
        described = config["loss_scale"]
        loss_scale = deserialize(described, cls._with_class_named(described, custom_objects))
        inner = cls._inner_from_config(config.get("optimizer"), custom_objects)
        return cls._made(inner, loss_scale=loss_scale, name=config.get("name"))

    def _constructor_arguments(self) -> dict[str, Any]:
        return {"loss_scale": self._loss_scale, "name": self.name}


def _moves_by_its_rule(loss_scale: LossScale) -> TypeGuard[_RuleLossScale]:
    """Whether a subclass does not override `update`, so that the optimizer can update it."""
    cls = type(loss_scale)
    return any(
        issubclass(cls, known) and cls.update is known.update and cls.__call__ is known.__call__
        for known in (FixedLossScale, DynamicLossScale)
    )


class UserLossScaleRule(ScaleRule):
    """The rule of a user's LossScale, which updates itself."""

    def __init__(self, written: LossScale) -> None:
        self.written = written
        # When it met its optimizer; a graph of TensorFlow 1 has no numbers.
        self._first = math.nan if registry.is_graph_of_tensorflow_1() else float(written())

    def init(self) -> ScaleState:
        return ScaleState(scale=self._first, good_steps=0)

    def update(self, state: ScaleState, finite: Scalar, *, xp: Library) -> ScaleState:
        return state

    def get_config(self) -> dict[str, Any]:
        return self.written.get_config()


class VariablesOfUser(ScaleVariables):
    """In place of a rule's variables, a user's LossScale: it has its own, and decides itself.

    Args:
        rule: The rule that stands for it.
        replica_count: Returns the number of replicas.
    """

    def __init__(self, rule: UserLossScaleRule, replica_count: Callable[[], int]) -> None:
        self._loss_scale, self._replica_count = rule.written, replica_count
        super().__init__(rule, {}, lambda *_: None)

    def scale(self) -> Scalar:
        return self._loss_scale()

    def write(self, state: ScaleState) -> None:
        """Does nothing: a file names its variables."""

    def update(self, finite: Scalar) -> None:
        """Does nothing: it moved when it decided."""

    def decide(self, unscaled: list[Gradient]) -> Scalar:
        """Moves the loss scale; returns whether to apply the gradients."""
        if self._replica_count() > 1:
            raise UnsupportedError(
                f"{type(self._loss_scale).__name__} cannot decide for several replicas: it "
                "receives the gradients of one. Use 'dynamic' or a DynamicLossScale."
            )
        moved, should_apply = self._loss_scale.update(unscaled)
        if moved is None:
            return should_apply
        return registry.package("lossscale.tensorflow.tracing").after(moved, lambda: should_apply)
