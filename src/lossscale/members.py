"""Members of every wrapper, and members of the API that TensorFlow documented."""

# Most methods declared here have a docstring and no body.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import lossscale.framework_types as ft
from lossscale.arguments import growth_steps
from lossscale.errors import UnknownSettingError
from lossscale.rules import ScaleRule

_Class = TypeVar("_Class", bound=type)


class VariableList(list[ft.Variable]):
    """A list of variables that returns itself when called.

    Keras 3 has `optimizer.variables`, TensorFlow documented `optimizer.variables()`.
    """

    def __call__(self) -> VariableList:
        return self


def with_public_names(cls: _Class) -> _Class:
    """Has Python's messages, of an unexpected keyword, name the class that a user knows."""
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        while isinstance(function, types.FunctionType):
            function.__qualname__ = f"LossScaleOptimizer.{name}"
            function = vars(function).get("__wrapped__")
    return cls


class Wrapper:
    """The base class of the wrappers of all frameworks.

    Attributes:
        inner_optimizer: The optimizer that is wrapped.
        name: The optimizer's name.
    """

    inner_optimizer: Any
    name: str
    _rule: ScaleRule
    # The key of the inner optimizer in `__dict__`.
    _inner_attribute: ClassVar[str] = "inner_optimizer"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            with_public_names(cls)

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None: ...
        # For subclasses.
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not found here, or if a property raised this error.
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        inner = self.__dict__.get(self._inner_attribute)
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(inner, name)
        except AttributeError:
            if hasattr(type(inner), name):
                raise
            raise unknown_setting(inner, name) from None

    @property
    def rule(self) -> ScaleRule:
        """The rule that moves the loss scale."""
        return self._rule

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is adjusted during training."""
        return bool(self._rule.is_dynamic)

    @property
    def initial_scale(self) -> float:
        """The first loss scale, or the fixed one."""
        return float(self._rule.init().scale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The number of finite steps after which the scale grows; None if the scale is fixed."""
        return growth_steps(self._rule)

    def __repr__(self) -> str:
        names = [type(each).__name__ for each in (self, self.inner_optimizer, self._rule)]
        return "<{} around {}, {}{}>".format(*names, self._state_in_words())

    def _state_in_words(self) -> str:
        try:
            if not self._is_on_host():
                return ": loss scale on the device"
            scale, skipped = float(self._scale_now()), int(self.steps_skipped)
            return f": loss scale {scale:g}, {skipped} of {int(self.iterations)} steps skipped"
        except Exception:
            # A debugger may call this at any time. In a traced function and in a TensorFlow 1 graph
            # there are no numbers, and each framework raises its own exceptions for that.
            return ""

    def _is_on_host(self) -> bool:
        """Whether the host reads the scale and the counters without waiting for a device."""
        return True

    def _scale_now(self) -> ft.Scalar:
        return self.loss_scale


class DocumentedMembers(Wrapper):
    """The API that TensorFlow documented; the Keras 3 and Keras 2 wrappers have it.

    Attributes:
        inner_optimizer: The optimizer that is wrapped.
        name: The optimizer's name.
        dynamic_scale: The float32 variable that holds the loss scale (Keras 3 only).
        step_counter: The variable that counts the finite steps since the scale last changed; None
            if the rule does not count them (Keras 3 only).
    """

    dynamic_scale: ft.Variable | None
    step_counter: ft.Variable | None

    def minimize(
        self,
        loss: ft.Loss,
        var_list: ft.VarList = None,
        grad_loss: ft.Tensor | None = None,
        name: str | None = None,
        tape: ft.Tape = None,
    ) -> ft.Variable | ft.Operation:
        """Minimizes a loss: scales it, computes and unscales the gradients, and applies them.

        It calls `get_scaled_loss`, `get_unscaled_gradients` and `apply_gradients`, including the
        overrides of a subclass.

        Args:
            loss: A callable without arguments that returns the loss; or a tensor, with the
                `tape` that recorded it.
            var_list: The variables to update: a list or tuple, one variable, or a callable that
                returns these. None means the trainable variables that the tape watched. An
                empty list updates nothing and does not count as a step.
            grad_loss: Tensor of the loss's shape that multiplies its gradient, or None.
            name: Name of the operations, or None.
            tape: The `tf.GradientTape` that recorded `loss`, if `loss` is a tensor.

        Returns:
            The result of `apply_gradients`.

        Raises:
            ValueError: If `var_list` contains something that is not a variable, if no variable has
                a gradient, or if `loss` is a tensor without a tape.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.25))
            >>> weight = tf.Variable(1.0)
            >>> steps = optimizer.minimize(lambda: weight**2, [weight])
            >>> float(weight), int(steps)
            (0.5, 1)
        """

    def get_scaled_loss(self, loss: ft.Loss) -> ft.Loss:
        """Multiplies the loss by the loss scale.

        Call it before you compute gradients, for example with `tf.GradientTape`, and
        `get_unscaled_gradients` afterwards. `minimize` calls both.

        Args:
            loss: Tensor of any shape and dtype, a number, or a callable that returns one.

        Returns:
            The product, in float32 or wider, so that the scaled value of a float16 loss does not
            overflow. For a callable, a callable that reads the scale when it is called.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8)
            >>> float(optimizer.get_scaled_loss(tf.constant(0.5)))
            4.0
        """

    def get_unscaled_gradients(self, grads: Iterable[ft.Gradient]) -> list[ft.Gradient]:
        """Divides gradients by the loss scale.

        Pass the gradients of a loss from `get_scaled_loss`.

        Args:
            grads: Tensors, `tf.IndexedSlices` or None, in any iterable.

        Returns:
            A new list of the same length, in float32 or wider: float16 cannot hold the small
            values that scaling protected. None stays None, sparse stays sparse.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8)
            >>> gradient, missing = optimizer.get_unscaled_gradients([tf.constant([4.0]), None])
            >>> gradient.numpy(), missing
            (array([0.5], dtype=float32), None)
        """

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[ft.Gradient, ft.Variable]],
        name: str | None = None,
        *third: Any,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> ft.Variable | ft.Operation:
        """Applies gradients to variables, or skips the step; then adjusts the loss scale.

        Pass the gradients from `get_unscaled_gradients`. After `scale_loss`, pass the gradients of
        the scaled loss, as Keras' trainer does.

        Args:
            grads_and_vars: (gradient, variable) pairs. A gradient is a tensor of the variable's
                shape, a `tf.IndexedSlices`, or None.
            name: Name of the operations, or None.
            *third: Do not pass a third positional argument. In TensorFlow 2.2 to 2.10 it was
                `experimental_aggregate_gradients`; current optimizers use its opposite there.
                Wrappers of legacy optimizers and of `lossscale.experimental` accept it as before.
            skip_gradients_aggregation: Whether the gradients were already summed over the
                replicas of a strategy; then they are not summed again.
            experimental_aggregate_gradients: The opposite, under its older name.

        Returns:
            `iterations`, one higher than before, whether the step was applied or skipped. With
            tf_keras inside a `tf.function`, its value; in a graph of TensorFlow 1, the operation
            that runs the step.

        Raises:
            TypeError: If `grads_and_vars` does not hold pairs.
            ValueError: If no variable has a gradient.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
            >>> weight = tf.Variable([1.0, 2.0])
            >>> scaled = optimizer.get_scaled_loss(tf.constant([2.0, float("inf")]))
            >>> gradients = optimizer.get_unscaled_gradients([scaled])
            >>> steps = optimizer.apply_gradients(zip(gradients, [weight]))
            >>> weight.numpy(), int(optimizer.steps_skipped), float(optimizer.loss_scale)
            (array([1., 2.], dtype=float32), 1, 16384.0)
        """

    def get_gradients(self, loss: ft.Loss, params: ft.Variables) -> list[ft.Tensor]:
        """Returns the unscaled gradients of a loss; computes them from the scaled loss.

        Args:
            loss: A callable without arguments; or, inside a `tf.function`, a tensor.
            params: List of variables.

        Returns:
            List of gradient tensors, in float32 or wider.

        Raises:
            ValueError: If the loss does not depend on a variable.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD())
            >>> weight = tf.Variable(3.0)
            >>> float(optimizer.get_gradients(lambda: weight**2, [weight])[0])
            6.0
        """

    def get_updates(self, loss: ft.Loss, params: ft.Variables) -> list[ft.Variable | ft.Operation]:
        """Computes gradients as `get_gradients` does, and applies them.

        Args:
            loss: A callable without arguments; or, inside a `tf.function`, a tensor.
            params: List of variables.

        Returns:
            A list with the result of `apply_gradients`: `iterations`, one higher than before.

        Raises:
            ValueError: If the loss does not depend on a variable.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
            >>> weight = tf.Variable(3.0)
            >>> updates = optimizer.get_updates(lambda: weight**2, [weight])
            >>> float(weight)
            0.0
        """

    def build(self, variables: ft.Variables) -> None:
        """Creates the inner optimizer's variables; a second call does nothing."""

    @property
    def loss_scale(self) -> ft.Scalar:
        """The current loss scale: a float32 scalar tensor."""

    @property
    def dynamic_counter(self) -> ft.Variable | None:
        """The finite steps since the scale last changed: an integer scalar variable.

        None if the scale is fixed.
        """

    @property
    def steps_skipped(self) -> ft.Scalar:
        """The number of steps skipped so far: an integer scalar tensor."""

    @property
    def last_step_skipped(self) -> ft.Scalar:
        """Whether the last step was skipped: a boolean scalar tensor."""

    @property
    def iterations(self) -> ft.Variable:
        """The number of training steps, skipped ones included: an integer variable.

        `inner_optimizer.iterations` counts the applied steps, which learning rate schedules and
        Adam's bias correction use. Assigning to this one changes both.
        """

    @iterations.setter
    def iterations(self, value: ft.Scalar) -> None: ...

    @property
    def learning_rate(self) -> ft.LearningRate:
        """The learning rate of the inner optimizer: a number, a variable or a schedule."""

    @learning_rate.setter
    def learning_rate(self, value: ft.LearningRate) -> None: ...

    @property
    def lr(self) -> ft.LearningRate:
        """The learning rate of the inner optimizer; another name of `learning_rate`."""

    @lr.setter
    def lr(self, value: ft.LearningRate) -> None: ...

    @property
    def variables(self) -> VariableList:
        """The wrapper's variables, then the inner optimizer's: a list that can also be called.

        On JAX a monitor adds variables, because a compiled step can change only those in this list.
        """

    @property
    def weights(self) -> VariableList:
        """The inner optimizer's counter of applied steps, then its state variables.

        As in TensorFlow, the loss scale and the learning rate are not among them. They are in the
        order of creation.
        """

    def get_weights(self) -> list[ft.Array]:
        """Returns the values of `weights` as a list of NumPy arrays."""

    def set_weights(self, weights: Sequence[ft.Array]) -> None:
        """Sets the values of `weights`, or of `variables`.

        Args:
            weights: Arrays from `get_weights`; or one array for each of `variables`, in that order.

        Raises:
            ValueError: If their number or a shape does not match. Nothing is changed then.

        Examples:
            >>> inner = keras.optimizers.SGD(0.5, momentum=0.9)
            >>> optimizer = lossscale.LossScaleOptimizer(inner)
            >>> optimizer.build([keras.Variable([1.0, 2.0])])
            >>> optimizer.set_weights([10, [0.5, 0.25]])
            >>> optimizer.get_weights()
            [array(10), array([0.5 , 0.25], dtype=float32)]
        """

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots, such as `momentum`; empty before the first step."""

    def get_slot(self, var: ft.Variable, slot_name: str) -> ft.Variable:
        """Returns the state variable that the inner optimizer keeps for a variable.

        Args:
            var: A variable that the optimizer was built with.
            slot_name: `momentum`, `velocity`, ..., or TensorFlow's older names (`m` and `v` of
                Adam, `rms` of RMSprop).

        Returns:
            The state variable; in most optimizers it has the shape of `var`.

        Raises:
            KeyError: If there is no such slot, or the optimizer does not know the variable.

        Examples:
            >>> inner = keras.optimizers.SGD(0.5, momentum=0.9)
            >>> optimizer = lossscale.LossScaleOptimizer(inner)
            >>> weight = tf.Variable(1.0)
            >>> steps = optimizer.minimize(lambda: weight * 2.0, [weight])
            >>> optimizer.get_slot_names(), float(optimizer.get_slot(weight, "momentum"))
            (['momentum'], -1.0)
        """

    def add_slot(
        self, var: ft.Variable, slot_name: str, initializer: ft.Initializer = "zeros"
    ) -> ft.Variable:
        """Adds a state variable for a variable, and returns it.

        Args:
            var: The variable it belongs to. The new one has its shape and dtype.
            slot_name: The name of the slot. If it exists, it is returned unchanged.
            initializer: A Keras initializer or its name, or a callable of shape and dtype.

        Returns:
            The new state variable. It is saved with the optimizer.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD())
            >>> optimizer.add_slot(tf.Variable([1.0, 2.0]), "average").shape.as_list()
            [2]
        """

    def add_weight(
        self,
        name: str,
        shape: Any,
        dtype: ft.DType = None,
        initializer: ft.Initializer = "zeros",
        trainable: bool | None = None,
        synchronization: Any = None,
        aggregation: Any = "none",
    ) -> ft.Variable:
        """Adds a state variable that does not belong to a model variable, and returns it.

        Args:
            name: Its name.
            shape: Its shape, a tuple.
            dtype: Its dtype; None means Keras' float type.
            initializer: A Keras initializer or its name, or a callable of shape and dtype.
            trainable: The `trainable` flag of the variable.
            synchronization: None or `tf.VariableSynchronization.AUTO`.
            aggregation: A `tf.VariableAggregation`, or Keras' name of one.

        Returns:
            The new variable. It is saved with the optimizer.

        Raises:
            ValueError: If `synchronization` has another value, which Keras 3 does not support.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD())
            >>> int(optimizer.add_weight("seen", (), dtype="int64"))
            0
        """

    def get_config(self) -> ft.Config:
        """Returns the configuration: a JSON-ready dictionary, without the state."""

    @classmethod
    def from_config(cls, config: ft.Config, custom_objects: dict[str, Any] | None = None) -> Any:
        """Creates an optimizer from its configuration, without saved state.

        Args:
            config: A dictionary from `get_config`; it is not changed.
            custom_objects: Classes in the configuration that are not part of the framework, by
                class name.

        Returns:
            An optimizer instance.

        Raises:
            ValueError: If `config` does not describe a loss scale optimizer.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8)
            >>> lossscale.LossScaleOptimizer.from_config(optimizer.get_config()).initial_scale
            8.0
        """


def unknown_setting(inner: object, name: str) -> UnknownSettingError:
    """Returns the error for a name that neither a wrapper nor its inner optimizer has."""
    if hasattr(DocumentedMembers, name):
        return UnknownSettingError(
            f"LossScaleOptimizer has no `{name}` around {type(inner).__module__}."
            f"{type(inner).__name__}. The page on TensorFlow's documented API lists what each "
            "framework has."
        )
    return UnknownSettingError(
        f"Neither LossScaleOptimizer nor its inner optimizer, {type(inner).__name__}, has an "
        f"attribute {name!r}."
    )
