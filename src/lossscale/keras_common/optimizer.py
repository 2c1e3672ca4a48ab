"""The base class of the loss scale optimizers of Keras 3 and tf_keras: verbs and settings.

`step` has a step. `slots` and `configs` have the other members.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, ParamSpec

import lossscale.framework_types as ft
from lossscale.arguments import rule_from_arguments
from lossscale.common.arrays import Arrays, Location
from lossscale.common.floor_warning import warned_at_floor
from lossscale.common.gradient_arguments import check_named, checked_pairs, listed, with_gradient
from lossscale.common.private_names import do_not_convert
from lossscale.errors import ArgumentError, GradientsError
from lossscale.keras_common.configs import WithConfig
from lossscale.keras_common.scaled_gradients import ScaleLedger
from lossscale.keras_common.slots import WithSlots
from lossscale.keras_common.state import ScaleVariables
from lossscale.keras_common.step import Parts, Step, take, with_overwritten, without_overwritten
from lossscale.packages import warn
from lossscale.rules import DynamicScale, ScaleRule
from lossscale.wrapper import remember_wrapper

_P = ParamSpec("_P")


def _refuses_unknown(constructor: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates a constructor: an unknown keyword is a ValueError, as with Keras' own class."""
    known = inspect.signature(constructor).parameters

    @functools.wraps(constructor)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if "loss_scale" in kwargs:
            raise ArgumentError(
                "LossScaleOptimizer takes no `loss_scale`. Received: "
                f"loss_scale={kwargs['loss_scale']!r}. Pass dynamic=False, initial_scale=128 for a "
                "fixed scale, or use lossscale.experimental.LossScaleOptimizer, which takes it."
            )
        if unknown := [f"`{name}`" for name in kwargs if name not in known]:
            raise ArgumentError(
                "LossScaleOptimizer got unknown arguments. Received arguments: "
                f"{', '.join(unknown)}. Set those of the optimizer on the `inner_optimizer`."
            )
        constructor(*args, **kwargs)

    return checked


class KerasCommonOptimizer(WithSlots, WithConfig):
    """The members that TensorFlow documented; the Keras 3 and Keras 2 wrappers have them.

    Attributes:
        inner_optimizer: The optimizer that is wrapped.
        name: The optimizer's name.
    """

    # What dir() does not name. Keras saves what it names, TensorFlow asks it for get_slot_names,
    # and writes no checkpoint if slots are attributes as well.
    _hidden: ClassVar[frozenset[str]] = frozenset({"get_slot_names"})

    # The functions of its framework.
    _arrays: Arrays
    # Whether the gradients that come are scaled.
    _ledger: ScaleLedger
    # The rule's state.
    _state: ScaleVariables
    # A monitor sets it in the instance's dictionary, past attribute tracking: it is not saved.
    _overflow_tracker: ClassVar[Any] = None
    _warned_at_floor: bool = False
    _warned_of_float16: bool = False
    # Whether the third positional argument is that of TensorFlow 2.2 to 2.10.
    _takes_third: bool = False
    # Scalar variables: a number of steps, and a boolean.
    _steps_skipped: ft.Variable
    _last_step_skipped: ft.Variable

    # --- What a subclass for one Keras defines ------------------------------------------------

    # The name of the framework, for `lossscale_migration`.
    _framework: ClassVar[str]
    # Counts a variable as one of this optimizer's, so that it is saved.
    _track_variable: Callable[[ft.Variable], None]
    # For a `LossScale` of the older API, too, which may be used without an optimizer: the subclass
    # of `ScaleVariables`, which takes a rule alone; a float32 scalar tensor; a new variable of a
    # name, a dtype and a value.
    _state_class: Callable[[ScaleRule], ScaleVariables]
    _float32: Callable[[ft.Scalar], ft.Tensor]
    _new_variable: Callable[[str, ft.DType, ft.Scalar], ft.Variable]

    # Whether a value is a variable of this Keras; a list of variables from one or a nest of them.
    _is_variable: Callable[[object], bool]
    _flat_variables: Callable[[ft.Structure], list[ft.Variable]]

    # Checks the optimizer to wrap, then makes all attributes.
    _construct: Callable[[ft.KerasOptimizer, ScaleRule, str | None], None]
    # Builds; returns the step with the gradients to check.
    _prepared: Callable[[Step], Step]
    # Has the inner optimizer apply the unscaled gradients of a step.
    _apply_inner: Callable[[Step], object]
    # Returns the variables that the inner optimizer may change in a step.
    _changed_by: Callable[[Step], list[ft.Variable]]
    # Returns the gradients of the scaled loss, and the variables they belong to. Takes the
    # arguments of `minimize`: loss, var_list, grad_loss, tape.
    _differentiated: Callable[..., tuple[list[ft.Gradient], list[ft.Variable]]]
    # Returns the gradients of a scaled loss that is a tensor of the traced function.
    _symbolic: Callable[[ft.Tensor, ft.Variables], list[ft.Gradient]]

    # Documented members.

    @abc.abstractmethod
    def build(self, variables: ft.Variables) -> None:
        """Creates the inner optimizer's variables; a second call does nothing."""

    @property
    @abc.abstractmethod
    def dynamic_counter(self) -> ft.Variable | None:
        """The finite steps since the scale last changed: an integer scalar variable.

        None if the scale is fixed.
        """

    @property
    @abc.abstractmethod
    def iterations(self) -> ft.Variable:
        """The number of training steps, skipped ones included: an integer variable.

        `inner_optimizer.iterations` counts the applied steps, which learning rate schedules and
        Adam's bias correction use. Assigning to this one changes both.
        """

    @iterations.setter
    @abc.abstractmethod
    def iterations(self, value: ft.Scalar) -> None: ...

    @_refuses_unknown
    def __init__(
        self,
        inner_optimizer: ft.KerasOptimizer,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        rule: ScaleRule | None = None,
        name: str | None = None,
    ) -> None:
        rule = rule_from_arguments(dynamic, initial_scale, dynamic_growth_steps, rule)
        self._construct(inner_optimizer, rule, name)
        remember_wrapper(inner_optimizer, self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _VERBS_OF_A_LOSS:
            if cls._is_overridden(name) and not hasattr(getattr(cls, name), "is_recording"):
                setattr(cls, name, _recording(cls, name))

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self)} - self._hidden)

    @classmethod
    def _is_overridden(cls, verb: str) -> bool:
        """Whether a subclass overrides a verb."""
        return getattr(cls, verb) is not getattr(KerasCommonOptimizer, verb)

    def _first_state(self) -> ScaleVariables:
        return self._state_class(self._rule)

    # --- The documented loop: scale the loss, unscale the gradients, apply them ---------------

    @do_not_convert
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
        self._ledger.record(self._arrays.location(), "get_scaled_loss")
        return self._scaled(loss)

    def _scaled(self, loss: ft.Loss) -> ft.Loss:
        if callable(loss):
            return lambda: self._scaled(loss())
        return self._arrays.scaled(loss, self._current_scale())

    def _current_scale(self) -> ft.Scalar:
        return self._state.scale()

    @do_not_convert
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
        gradients = listed(grads)
        number = sum(gradient is not None for gradient in gradients)
        self._ledger.record_unscaled(self._arrays.location(), number)
        scale = self._current_scale()
        return list(self._arrays.unscaled(gradients, scale, self._rule.powers_of_two))

    def _unscaled_by_verb(self, step: Step) -> list[ft.Gradient]:
        """Unscales gradients by `get_unscaled_gradients`, which a subclass may override."""
        scaled = without_overwritten(step)
        return with_overwritten(step, scaled, self.get_unscaled_gradients(scaled))

    @do_not_convert
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
        check_named(third[1:] if self._takes_third else third)
        gradients, variables = checked_pairs(grads_and_vars, self._is_variable)
        self._arrays.check_context()
        location, updated = self._arrays.location(), with_gradient(gradients, variables)
        asked = (experimental_aggregate_gradients, not skip_gradients_aggregation, *third)
        aggregate = self._sums_replicas(all(asked))
        with self._ledger.applying(location, updated) as scaled:
            return self._step(Step(gradients, variables, None, aggregate, name), scaled)

    def _sums_replicas(self, asked: bool) -> bool:
        """Whether gradients are summed over the replicas before the inner optimizer gets them."""
        return asked

    def _step(self, step: Step, is_scaled: bool) -> ft.Variable | ft.Operation:
        """Takes a step, given its gradients and whether they are those of the scaled loss."""
        decides = self._state.decide is not None
        if is_scaled and (decides or self._is_overridden("get_unscaled_gradients")):
            # Code of the user's unscales them, or decides by unscaled ones.
            with self._ledger.own_step(self._arrays.location()):
                step = step._replace(gradients=self._unscaled_by_verb(step))
            is_scaled = False
        with self._name_scope(step.name), self._arrays.no_gradients():
            done = take(self._prepared(step), is_scaled, self._parts_of_a_step())
        return self._result(done)

    def _parts_of_a_step(self) -> Parts:
        # A monitor warns itself.
        warns = self._overflow_tracker is None and not self._warned_at_floor
        return Parts(
            arrays=self._arrays,
            inner=self.inner_optimizer,
            state=self._state,
            steps=self.iterations,
            steps_skipped=self._steps_skipped,
            last_step_skipped=self._last_step_skipped,
            apply=self._apply_inner,
            written=self._changed_by,
            warn=self._warn_at_floor if warns and isinstance(self._rule, DynamicScale) else None,
            tracker=self._overflow_tracker,
        )

    def _warn_at_floor(self, scale: float) -> None:
        self._warned_at_floor = warned_at_floor(self._rule, scale)

    def _name_scope(self, name: str | None) -> contextlib.AbstractContextManager[object]:
        """A context that names the operations of a step."""
        return contextlib.nullcontext()

    def _result(self, operation: ft.Operation) -> ft.Variable | ft.Operation:
        """Returns the value of `apply_gradients`, given the operation of the step."""
        return self.iterations

    # --- Calls that do several of these -------------------------------------------------------

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
        location = self._arrays.location()
        with self._ledger.own_step(location):
            pairs = list(self._computed(loss, var_list, grad_loss, tape))
            if not pairs and var_list is not None:
                return self._result(None)
            return self._apply_unscaled(location, pairs, name)

    def _computed(
        self, loss: ft.Loss, var_list: ft.VarList, grad_loss: ft.Tensor | None, tape: ft.Tape
    ) -> Iterable[tuple[ft.Gradient, ft.Variable]]:
        """Returns pairs of unscaled gradients and variables."""
        gradients, variables = self._differentiated(loss, var_list, grad_loss, tape)
        return zip(self._unscaled_by_verb(Step(gradients, variables)), variables, strict=True)

    def get_gradients(self, loss: ft.Loss, params: ft.Structure) -> list[ft.Gradient]:
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
        location = self._arrays.location()
        params = self._flat_variables(params)
        with self._ledger.own_step(location):
            if callable(loss):
                gradients, _ = self._differentiated(loss, params, None, None)
            else:
                gradients = self._symbolic(self.get_scaled_loss(loss), params)
            for gradient, variable in zip(gradients, params, strict=True):
                if gradient is None:
                    raise GradientsError(
                        f"The loss has no gradient with respect to {variable.name!r}: it does "
                        "not depend on it, or an operation between them has no gradient. Leave "
                        "the variable out of `params`."
                    )
            unscaled = self._unscaled_by_verb(Step(gradients, params))
        self._ledger.record(location, "get_scaled_loss")
        self._ledger.record_unscaled(location, len(unscaled))
        return unscaled

    def get_updates(self, loss: ft.Loss, params: ft.Structure) -> list[ft.Variable | ft.Operation]:
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
        location = self._arrays.location()
        with self._ledger.own_step(location):
            gradients = self.get_gradients(loss, params)
            pairs = list(zip(gradients, self._flat_variables(params), strict=True))
            return [self._apply_unscaled(location, pairs, None)]

    def _apply_unscaled(
        self, location: Location, pairs: ft.GradsAndVars, name: str | None
    ) -> ft.Variable | ft.Operation:
        # Also if a subclass unscales without calling the method of this class.
        self._ledger.record_unscaled(location, math.inf)
        named: dict[str, Any] = {} if name is None else {"name": name}
        return self.apply_gradients(pairs, **named)

    # --- Members to read ----------------------------------------------------------------------

    @property
    def loss_scale(self) -> ft.Tensor:
        """The current loss scale: a float32 scalar tensor."""
        self._ledger.is_scale_read = True
        return self._float32(self._current_scale())

    @property
    def steps_skipped(self) -> ft.Tensor:
        """The number of steps skipped so far: an integer scalar tensor."""
        return self._arrays.read(self._steps_skipped)

    @property
    def last_step_skipped(self) -> ft.Tensor:
        """Whether the last step was skipped: a boolean scalar tensor."""
        return self._arrays.read(self._last_step_skipped)

    # For `repr`, because a program that reads `loss_scale` may multiply by it. The second name is
    # called by programs for TensorFlow 2.4; of `experimental` it is the loss scale itself, which is
    # called the same way.
    _scale_now = _loss_scale = _current_scale

    def _is_on_host(self) -> bool:
        # Keras computes `iterations` if it accumulates, from a variable beside these.
        variables = [*self._state.variables.values(), self._steps_skipped]
        return all(self._arrays.is_on_host(each) for each in variables)

    def _track_overflows(self, variables: ft.Variables = ()) -> None:
        """Makes steps track overflows, in functions that are traced from now on.

        Args:
            variables: Those that are trained, if they exist.
        """
        # Not tracked by Keras and TensorFlow.
        self.__dict__["_overflow_tracker"] = self._arrays.new_overflow_tracker()
        if variables:
            self._build_overflow_tracker(variables)

    def _build_overflow_tracker(self, variables: ft.Variables) -> None:
        if self._overflow_tracker is not None:
            names = [getattr(v, "path", v.name).removesuffix(":0") for v in variables]
            self._overflow_tracker.build(variables, names)

    def _warn_of_float16(self, variables: ft.Variables) -> None:
        """Warns once if there are float16 variables to train."""
        trained = [each for each in variables if getattr(each, "trainable", True)]
        # In tf_keras, a variable may show the dtype that it is cast to.
        dtypes = [getattr(each, "true_dtype", each.dtype) for each in trained]
        is_float16 = any(getattr(dtype, "name", dtype) == "float16" for dtype in dtypes)
        if is_float16 and not self._warned_of_float16:
            self._warned_of_float16 = True
            warn(
                "float16 variables are rounded after each step, and lose small updates. Set the "
                'policy "mixed_float16", which computes in float16 and keeps float32 variables.'
            )

    # --- The settings of the inner optimizer -------------------------------------------------

    @property
    def learning_rate(self) -> ft.LearningRate:
        """The learning rate of the inner optimizer: a number, a variable or a schedule."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: ft.LearningRate) -> None:
        self.inner_optimizer.learning_rate = value

    lr = learning_rate
    """Another name of `learning_rate`."""


_VERBS_OF_A_LOSS = ("get_scaled_loss", "get_unscaled_gradients")


def _recording(cls: ft.Class, name: str) -> Callable[..., ft.Loss | ft.Gradients]:
    """Wraps a subclass' method that scales a loss, so that its calls are recorded too."""
    rewritten = getattr(cls, name)
    is_inherited = name not in vars(cls)

    @functools.wraps(rewritten)
    def noted(self: KerasCommonOptimizer, *args: Any, **kwargs: Any) -> ft.Loss | ft.Gradients:
        # A base class may replace its verb after this class was made.
        verb = getattr(super(cls, self), name) if is_inherited else rewritten.__get__(self)
        location = self._arrays.location()
        with self._ledger.own_step(location):
            result = verb(*args, **kwargs)
        if name == "get_scaled_loss":
            self._ledger.record(location, "get_scaled_loss")
            return result
        gradients = list(result)
        self._ledger.record_unscaled(location, sum(each is not None for each in gradients))
        return gradients

    noted.is_recording = True  # type: ignore[attr-defined]  # of a function
    return noted
