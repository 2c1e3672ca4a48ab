"""The loss scale optimizer of TensorFlow 2.0 to 2.3."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

from lossscale import registry
from lossscale.arguments import arguments_from_config, check_config, rule_from_arguments
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.experimental.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    _RuleLossScale,
    deserialize,
    from_rule,
    get,
    serialize,
)
from lossscale.members import with_public_names
from lossscale.optimizer import refuse_subclass
from lossscale.rules import GradientStats, ScaleRule, ScaleState

if TYPE_CHECKING:
    from lossscale.optimizer import KerasOptimizer

    # The wrapper class of Keras 3 or tf_keras, the next base.
    _Wrapper: Any
else:
    _Wrapper = object

# Its name in the later class.
_ARGUMENTS_OF_RULES = {"dynamic", "initial_scale", "dynamic_growth_steps", "rule"}


class LossScaleOptimizer(abc.ABC):  # noqa: B024 - for `register`
    """An optimizer that applies loss scaling, with the loss scale as an object.

    It has the members of `lossscale.LossScaleOptimizer`, for an optimizer of Keras 3 or tf_keras.
    The call returns a `lossscale.experimental.keras.LossScaleOptimizer` or a
    `lossscale.experimental.tf_keras.LossScaleOptimizer`, which are instances of this class for
    `isinstance`. Inherit from one of them, not from this class.

    Args:
        optimizer: The optimizer to wrap, an instance.
        loss_scale: A number for a fixed loss scale, `"dynamic"` for `DynamicLossScale()`, or a
            `LossScale`.
        name: The optimizer's name.

    Raises:
        TypeError: If `optimizer` is not an optimizer or already has loss scaling. Also if a class
            inherits from this one.
        ValueError: If `loss_scale` is invalid.

    Examples:
        >>> import keras, tensorflow as tf
        >>> opt = LossScaleOptimizer(keras.optimizers.SGD(0.25), "dynamic")
        >>> weight = tf.Variable(1.0)
        >>> steps = opt.minimize(lambda: weight**2, [weight])
        >>> float(weight), float(opt.loss_scale())
        (0.5, 32768.0)

    Source: `tf.keras.mixed_precision.experimental.LossScaleOptimizer`, TensorFlow 2.0 to 2.3.
    """

    def __new__(
        cls,
        optimizer: KerasOptimizer,
        loss_scale: float | str | LossScale,
        name: str | None = None,
        **others: Any,
    ) -> Any:
        return class_for(registry.framework_of(optimizer))(optimizer, loss_scale, name, **others)

    def __init_subclass__(cls) -> None:
        refuse_subclass(cls, "lossscale.experimental", registry.KERASES)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Any:
        """Creates an optimizer from its configuration; see `lossscale.LossScaleOptimizer`."""
        return class_for(registry.default_keras(config)).from_config(config, custom_objects)


def class_for(framework: registry.Framework) -> Any:
    """Returns the class for the optimizers of Keras 3 or tf_keras."""
    if framework not in registry.KERASES:
        raise ArgumentTypeError(
            "lossscale.experimental.LossScaleOptimizer wraps Keras optimizers only. Received: an "
            f"optimizer of {framework.title}. Use lossscale.LossScaleOptimizer."
        )
    return registry.package(f"lossscale.experimental.{framework.root}").LossScaleOptimizer


@with_public_names
class LossScaleAsObject(_Wrapper):
    """The older API of a wrapper, in which the loss scale is an object.

    A mixin before the wrapper of Keras 3 or tf_keras.
    """

    _name_of_inner = "optimizer"
    _takes_third = True

    def __init__(self, optimizer: Any, loss_scale: Any, name: str | None = None) -> None:
        loss_scale = get(loss_scale)
        # The wrapper's constructor needs it, and Keras rejects attributes before its own
        # constructor has run.
        self.__dict__["_loss_scale"] = loss_scale
        by_rule = _moves_by_its_rule(loss_scale)
        rule = loss_scale._rule if by_rule else UserLossScaleRule(loss_scale)
        super().__init__(optimizer, rule=rule, name=name)

    @property
    def loss_scale(self) -> LossScale:
        """The `LossScale` of this optimizer; call it for the current value."""
        loss_scale: LossScale = self._loss_scale
        self._ledger.is_scale_read = True
        return loss_scale

    def _first_state(self) -> Any:
        loss_scale = self._loss_scale
        by_rule = _moves_by_its_rule(loss_scale)
        if by_rule and loss_scale._state is None:
            # Those of the rule are tracked where they are made.
            untracked = loss_scale._variables()
            loss_scale._state = super()._first_state()
        else:
            if isinstance(loss_scale, _RuleLossScale):
                loss_scale._bound_state()
            untracked = loss_scale._variables()
        for variable in untracked.values():
            self._track_variable(variable)
        return loss_scale._state if by_rule else self._state_of_user(loss_scale)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration: a JSON-ready dictionary, without the state."""
        config = super().get_config()
        described = serialize(self._loss_scale)
        if type(self._loss_scale) not in (FixedLossScale, DynamicLossScale):
            described["class_name"] = self._registered_name(type(self._loss_scale))
        name = {"name": config["name"]} if "name" in config else {}
        return {**name, "optimizer": config["inner_optimizer"], "loss_scale": described}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Any:
        check_config(config)
        if "loss_scale" in config:
            inner, name = config.get("optimizer"), config.get("name")
            described = config["loss_scale"]
            classes = cls._with_class_named(described, custom_objects)
            loss_scale = deserialize(described, classes)
        else:
            # A later release wrote it, whose optimizer had these arguments.
            rules = cls._with_class_named(config.get("rule"), custom_objects)
            inner, arguments = arguments_from_config(config, rules)
            name = arguments.pop("name", None)
            if unknown := arguments.keys() - _ARGUMENTS_OF_RULES:
                raise ArgumentError(
                    "The configuration of a loss scale optimizer has unknown keys "
                    f"{sorted(unknown)}. It has inner_optimizer, dynamic, initial_scale, "
                    "dynamic_growth_steps, rule and name."
                )
            loss_scale = from_rule(rule_from_arguments(**arguments))
        inner = cls._inner_from_config(inner, custom_objects)
        return cls._made(inner, loss_scale=loss_scale, name=name)

    def _constructor_arguments(self) -> dict[str, Any]:
        return {"loss_scale": self._loss_scale, "name": self.name}


def _moves_by_its_rule(loss_scale: LossScale) -> bool:
    """Whether a subclass does not override `update`, so that the optimizer can update it."""
    cls = type(loss_scale)
    return any(
        issubclass(cls, known) and cls.update is known.update and cls.__call__ is known.__call__
        for known in (FixedLossScale, DynamicLossScale)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class UserLossScaleRule(ScaleRule):
    """The rule of a user's LossScale, which updates itself."""

    written: LossScale
    # When it met its optimizer; a graph of TensorFlow 1 has no numbers.
    scale: float | None = None

    def __post_init__(self) -> None:
        if not registry.is_graph_of_tensorflow_1():
            object.__setattr__(self, "scale", float(self.written()))

    def init(self) -> ScaleState:
        scale = self.written() if self.scale is None else self.scale
        return ScaleState(scale=float(scale), good_steps=0)

    def restored(self, state: ScaleState) -> ScaleState:
        return self.init()

    def update(self, state: ScaleState, stats: GradientStats, *, xp: Any) -> ScaleState:
        return state

    def get_config(self) -> dict[str, Any]:
        return self.written.get_config()
