"""Loss scales as objects, which hold their value and update it from the gradients of a step."""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, Any, NoReturn

from lossscale import registry
from lossscale.arguments import made_from, rule_from_loss_scale_arguments
from lossscale.checks import checked_scale
from lossscale.errors import ArgumentError, UnsupportedError
from lossscale.framework_types import Config, DType, Operation, Scalar, Structure, Tensor, Variable
from lossscale.rules import DynamicScale, FixedScale, ScaleRule

if TYPE_CHECKING:
    from lossscale.keras_common.state import ScaleVariables


class LossScale(abc.ABC):
    """Base class of loss scales. Inherit from it to write a custom one.

    A subclass defines `__call__`, `update` and `get_config`, and keeps its state in variables from
    `_add_weight`, which are saved with the optimizer.

    Source: `tf.mixed_precision.experimental.LossScale`, TensorFlow 2.1.
    """

    @abc.abstractmethod
    def __call__(self) -> Tensor:
        """Returns the current loss scale, a float32 scalar tensor."""

    @abc.abstractmethod
    def update(self, grads: Structure) -> tuple[Operation, Scalar]:
        """Updates the loss scale from the gradients of a step.

        Args:
            grads: Unscaled gradients, in any nested structure; None entries are ignored.

        Returns:
            A pair: in a TensorFlow 1 graph the operation that updates it, otherwise None; and
            whether to apply the gradients, a bool or a boolean scalar tensor.
        """

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, as a JSON-ready dictionary."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LossScale:
        """Creates a loss scale from its configuration, without saved state."""
        return cls(**config)

    def _add_weight(self, name: str, initial_value: Scalar, dtype: DType = None) -> Variable:
        """Adds a scalar variable to this loss scale and returns it.

        Args:
            name: Its name, unique in this loss scale.
            initial_value: Its initial value, a Python number or a scalar array.
            dtype: Its dtype; None takes the dtype of `initial_value`.
        """
        # A subclass may forget to call __init__.
        weights: dict[str, Variable] = self.__dict__.setdefault("_weights", {})
        if name in weights:
            raise ArgumentError(
                f"This loss scale already has a weight of this name. Received: {name!r}. Use "
                "another name."
            )
        weights[name] = registry.default_keras().wrapper()._new_variable(name, dtype, initial_value)
        return weights[name]

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"A {type(self).__name__} cannot be copied or pickled, because its variables belong to "
            "an optimizer. Create another: type(old).from_config(old.get_config())."
        )

    def _variables(self) -> dict[str, Variable]:
        return dict(self.__dict__.get("_weights", {}))


class _RuleLossScale(LossScale):
    """A loss scale that follows a rule; its variables are created at their first use."""

    _rule: ScaleRule
    _state: ScaleVariables | None = None

    def _variables(self) -> dict[str, Variable]:
        of_rule = {} if self._state is None else self._bound_state().variables
        return {**of_rule, **super()._variables()}

    def _bound_state(self, wrapper: type[Any] | None = None) -> ScaleVariables:
        """Returns the variables, in the Keras of an optimizer if its class is given."""
        before = self._state
        if before is not None and (wrapper is None or isinstance(before, wrapper._state_class)):
            return before
        wrapper = wrapper or registry.default_keras().wrapper()
        state: ScaleVariables = wrapper._state_class(self._rule)
        if before is not None:
            # The value was asked for before the object met an optimizer of the other Keras.
            values = {field: v.numpy().item() for field, v in before.variables.items()}
            state.write(before.first._replace(**values))
        self._state = state
        return state


class FixedLossScale(_RuleLossScale):
    """A loss scale that never changes. Gradients are not checked.

    Args:
        loss_scale_value: The loss scale, a Python int or float from 2**-126 to 2**126.

    Raises:
        ValueError: If it is not such a number.

    Examples:
        >>> FixedLossScale(8).get_config()
        {'loss_scale_value': 8.0}

    Source: `tf.mixed_precision.experimental.FixedLossScale`, TensorFlow 2.1.
    """

    def __init__(self, loss_scale_value: float) -> None:
        self._rule: FixedScale = FixedScale(checked_scale("loss_scale_value", loss_scale_value))

    def __call__(self) -> Tensor:
        """Returns the loss scale, a float32 scalar tensor."""
        return registry.default_keras().wrapper()._float32(self._rule.scale)

    def update(self, grads: Structure) -> tuple[Operation, bool]:
        """Returns None and True: the scale is fixed, and every step is applied."""
        return _operation(None), True

    def get_config(self) -> dict[str, Any]:
        """Returns `{"loss_scale_value": float}`."""
        return {"loss_scale_value": self._rule.scale}

    def __repr__(self) -> str:
        return f"FixedLossScale({self._rule.scale})"


class DynamicLossScale(_RuleLossScale):
    """A loss scale that is adjusted during training.

    Args:
        initial_loss_scale: The first loss scale. Start high: it falls much faster than it grows.
        increment_period: Number of finite steps in a row after which it grows.
        multiplier: Multiplies the scale when it grows, and divides it after a non-finite gradient.

    Raises:
        ValueError: If a value is invalid; the message names it.

    Examples:
        >>> DynamicLossScale(increment_period=500).get_config()
        {'initial_loss_scale': 32768.0, 'increment_period': 500, 'multiplier': 2.0}

    Source: `tf.mixed_precision.experimental.DynamicLossScale`, TensorFlow 2.1.
    """

    def __init__(
        self,
        initial_loss_scale: float = 2.0**15,
        increment_period: int = 2000,
        multiplier: float = 2.0,
    ) -> None:
        self._rule: DynamicScale = rule_from_loss_scale_arguments(
            initial_loss_scale, increment_period, multiplier
        )
        if registry.is_graph_of_tensorflow_1():
            # The operation that initializes a graph's variables is often created before they are
            # used.
            self._bound_state()

    @property
    def initial_loss_scale(self) -> float:
        """The first loss scale."""
        return self._rule.initial_scale

    @property
    def increment_period(self) -> int:
        """Number of finite steps in a row after which the scale grows."""
        return self._rule.growth_interval

    @property
    def multiplier(self) -> float:
        """The factor by which the scale grows."""
        return self._rule.growth_factor

    def __call__(self) -> Tensor:
        """Returns the current loss scale, a float32 scalar tensor."""
        return self._bound_state().read().scale

    # Other attributes that programs of that time read.

    @property
    def _current_loss_scale(self) -> Variable:
        return self._bound_state().variables["scale"]

    @property
    def _num_good_steps(self) -> Variable:
        return self._bound_state().variables["good_steps"]

    def update(self, grads: Structure) -> tuple[Operation, Tensor]:
        """Updates the loss scale.

        Args:
            grads: Gradients in any nested structure; None entries are ignored. Without gradients
                the scale does not change.

        Returns:
            In a TensorFlow 1 graph a tensor that updates the scale, otherwise None; and whether all
            gradients are finite, a boolean scalar tensor.
        """
        state = self._bound_state()
        gradients = state.arrays.flat_gradients(grads)
        finite = state.arrays.all_finite(gradients)
        moved = state.update(finite) if gradients else None
        return _operation(moved), finite

    def get_config(self) -> dict[str, Any]:
        """Returns the three constructor arguments."""
        return {
            "initial_loss_scale": self.initial_loss_scale,
            "increment_period": self.increment_period,
            "multiplier": self.multiplier,
        }

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.get_config().items())
        return f"DynamicLossScale({settings})"


def _operation(moved: Operation) -> Operation:
    if not registry.is_graph_of_tensorflow_1():
        return None
    tracing = registry.package("lossscale.tensorflow.tracing")
    # Programs of that time took a tensor where something moves, and an operation elsewhere.
    return tracing.grouped() if moved is None else tracing.after(moved, lambda: True)


def get(loss_scale: Scalar | str | LossScale) -> LossScale:
    """Returns the loss scale for an argument of the optimizer.

    Args:
        loss_scale: A number for a fixed scale, `"dynamic"` or a `LossScale`.

    Raises:
        ValueError: If it is another string, or not a number.
    """
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale()
    message = (
        "`loss_scale` must be a number, the string 'dynamic' or a LossScale. "
        f"Received: loss_scale={loss_scale!r} of type {type(loss_scale).__name__}."
    )
    if isinstance(loss_scale, (str, bool)) or loss_scale is None:
        raise ArgumentError(message)
    return FixedLossScale(checked_scale("loss_scale", loss_scale))


_KNOWN = {known.__name__: known for known in (FixedLossScale, DynamicLossScale)}


def serialize(loss_scale: LossScale) -> dict[str, Any]:
    """Returns the class name and the configuration of a loss scale."""
    return {"class_name": type(loss_scale).__name__, "config": loss_scale.get_config()}


def deserialize(config: Config, custom_objects: dict[str, Any] | None = None) -> LossScale:
    """Returns the loss scale that `serialize` described.

    Args:
        config: The dictionary.
        custom_objects: Custom classes, by class name.

    Raises:
        ValueError: If the class is not known, or cannot be created from its configuration.
    """
    known = {**_KNOWN, **(custom_objects or {})}
    makers = {name: functools.partial(_from_settings, cls) for name, cls in known.items()}
    return made_from(config, makers, "loss scale")


def _from_settings(cls: type[LossScale], /, **settings: Any) -> LossScale:
    return cls.from_config(settings)
