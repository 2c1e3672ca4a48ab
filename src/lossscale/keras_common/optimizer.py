"""The base class of the loss scale optimizers of Keras 3 and tf_keras, and their step.

The two differ in the hooks that are declared here, and in the `_backend` of an optimizer: for Keras
3 in the file of its backend, for tf_keras in `tf_keras/optimizer.py`. On TensorFlow both branch in
`tensorflow/apply_or_skip.py`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, ParamSpec, Self, TypeAlias

import numpy as np

import lossscale.framework_types as ft
from lossscale.arguments import (
    arguments_from_config,
    check_config,
    config_from_rule,
    rule_from_arguments,
)
from lossscale.common.gradient_arguments import check_named, checked_pairs, listed, with_gradient
from lossscale.common.private_names import do_not_convert
from lossscale.common.step_warnings import warned_at_floor
from lossscale.common.wrapped import remember_wrapper
from lossscale.errors import ArgumentError, GradientsError, UnknownSlotError, UnsupportedError
from lossscale.keras_common.scaled_gradients import Location, ScaleLedger
from lossscale.keras_common.state import ScaleVariables
from lossscale.keras_common.step import OverflowCheck, Step, StepOperations
from lossscale.members import VariableList, Wrapper
from lossscale.old_formats import kind_of, names_for
from lossscale.packages import warn
from lossscale.rules import DynamicScale, ScaleRule, ScaleState

_P = ParamSpec("_P")

Key: TypeAlias = Any
"""What an optimizer knows a variable by."""
Slots = Iterator[tuple[list[str], dict[Key, ft.Variable]]]
"""The names of each kind of slot, and its variables by the key of the reference variable."""


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


class KerasCommonOptimizer(Wrapper):
    """The members that TensorFlow documented; the Keras 3 and Keras 2 wrappers have them.

    Attributes:
        inner_optimizer: The optimizer that is wrapped.
        name: The optimizer's name.
    """

    # The constructor's argument for the inner optimizer.
    _name_of_inner: ClassVar[str] = "inner_optimizer"
    # What dir() does not name. Keras saves what it names, TensorFlow asks it for get_slot_names,
    # and writes no checkpoint if slots are attributes as well.
    _hidden: ClassVar[frozenset[str]] = frozenset({"get_slot_names"})

    # The operations on arrays and variables.
    _backend: StepOperations
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
    # By the name of the slot and the key of its variable.
    _added_slots: dict[tuple[str, Key], ft.Variable]

    # --- What a subclass for one Keras defines ------------------------------------------------

    # The module `keras` or `tf_keras`.
    _library: ClassVar[ft.Library]
    # How to give the state of an optimizer `old` to a `new` one.
    _lines_of_a_copy: ClassVar[tuple[str, str]]
    # The name of the framework, for `lossscale_migration`.
    _framework: ClassVar[str]
    # The inner optimizer of a configuration, given classes by name.
    _inner_from_config: Callable[[Any, dict[str, Any] | None], ft.KerasOptimizer]
    # Counts a variable as one of this optimizer's, so that it is saved.
    _track_variable: Callable[[ft.Variable], None]
    # For a `LossScale` of the older API, too, which may be used without an optimizer: the subclass
    # of `ScaleVariables`, which takes a rule alone; a float32 scalar tensor; what others have as
    # `_backend`; a new variable of a name, a dtype and a value.
    _state_class: Callable[[ScaleRule], ScaleVariables]
    _float32: Callable[[ft.Scalar], ft.Tensor]
    _arrays: Callable[[], StepOperations]
    _new_variable: Callable[[str, ft.DType, ft.Scalar], ft.Variable]

    @abc.abstractmethod
    def _construct(self, inner: ft.KerasOptimizer, rule: ScaleRule, name: str | None) -> None:
        """Checks the optimizer to wrap, then makes all attributes."""

    @abc.abstractmethod
    def _prepared(self, step: Step) -> Step:
        """Builds; returns the step with the gradients to check."""

    @abc.abstractmethod
    def _apply_inner(self, step: Step) -> object:
        """Has the inner optimizer apply unscaled gradients."""

    @abc.abstractmethod
    def _update_scale(self, finite: ft.Scalar, state_on_host: ScaleState | None) -> object:
        """Updates the loss scale and the counters."""

    @abc.abstractmethod
    def _differentiated(
        self, loss: ft.Loss, var_list: ft.VarList, grad_loss: ft.Tensor | None, tape: ft.Tape
    ) -> tuple[list[ft.Gradient], list[ft.Variable]]:
        """Returns the gradients of the scaled loss, and the variables they belong to."""

    @abc.abstractmethod
    def _symbolic(self, loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        """Returns the gradients of a scaled loss that is a tensor of the traced function."""

    @abc.abstractmethod
    def _inner_weights(self) -> list[ft.Variable]:
        """The variables of the inner optimizer, as the documents list them."""

    @abc.abstractmethod
    def _assign(self, variables: ft.Variables, values: Sequence[ft.Array]) -> None:
        """Sets variables."""

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

    @property
    @abc.abstractmethod
    def variables(self) -> VariableList:
        """The wrapper's variables, then the inner optimizer's: a list that can also be called.

        On JAX a monitor adds variables, because a compiled step can change only those in this list.
        """

    @abc.abstractmethod
    def get_weights(self) -> list[ft.Array]:
        """Returns the values of `weights` as a list of NumPy arrays."""

    @abc.abstractmethod
    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots, such as `momentum`; empty before the first step."""

    @abc.abstractmethod
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

    # Legacy optimizers have none of the rest: they keep slots and files themselves.

    # Yields the inner optimizer's slots.
    _slots_of_inner: Callable[[], Slots]
    # Makes a slot of a variable, with a name and a first value.
    _new_slot: Callable[[ft.Variable, str, ft.Initializer], ft.Variable]

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
        self._ledger.record(self._backend.current_location(), "get_scaled_loss")
        return self._scaled(loss)

    def _scaled(self, loss: ft.Loss) -> ft.Loss:
        if callable(loss):
            return lambda: self._scaled(loss())
        return self._backend.scaled(loss, self._current_scale())

    def _current_scale(self) -> ft.Scalar:
        return self._state.read().scale

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
        self._ledger.record_unscaled(self._backend.current_location(), number)
        scale = self._current_scale()
        return list(self._backend.unscaled(gradients, scale, self._rule.powers_of_two))

    def _unscaled_by_verb(self, step: Step) -> list[ft.Gradient]:
        """Unscales gradients by `get_unscaled_gradients`, which a subclass may override."""
        scaled = step.without_overwritten()
        return step.with_overwritten(scaled, self.get_unscaled_gradients(scaled))

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
        gradients, variables = checked_pairs(grads_and_vars, self._backend.is_variable)
        self._backend.check_context()
        location, updated = self._backend.current_location(), with_gradient(gradients, variables)
        asked = (experimental_aggregate_gradients, not skip_gradients_aggregation, *third)
        aggregate = self._sums_replicas(all(asked))
        with self._ledger.applying(location, updated) as scaled:
            return self._step(Step(gradients, variables, None, aggregate, name), scaled)

    def _sums_replicas(self, asked: bool) -> bool:
        """Whether gradients are summed over the replicas before the inner optimizer gets them."""
        return asked

    def _step(self, given: Step, scaled: bool) -> ft.Variable | ft.Operation:
        """Takes a step: checks the gradients, applies them or skips, updates the loss scale.

        Args:
            given: The gradients, without the scale.
            scaled: Whether they are those of the scaled loss.
        """
        backend, rule, state = self._backend, self._rule, self._state
        tracker = self._overflow_tracker
        if scaled and (state.decide is not None or self._is_overridden("get_unscaled_gradients")):
            # Code of the user's unscales them, or decides by unscaled ones.
            with self._ledger.own_step(backend.current_location()):
                unscaled = self._unscaled_by_verb(given)
                given, scaled = given._replace(gradients=unscaled), False
        with self._name_scope(given.name), backend.no_gradients():
            step = self._prepared(given)
            # A monitor warns itself.
            warns = tracker is None and not self._warned_at_floor and isinstance(rule, DynamicScale)
            warns = warns and backend.runs_now(step.gradients)
            needs_scale = scaled or warns or tracker is not None
            # None where nobody reads it.
            scale: ft.Scalar = self._current_scale() if needs_scale else None
            step = step._replace(scale=scale if scaled else None)

            if state.decide is not None:
                check = OverflowCheck(state.decide(step.gradients), step)
            else:
                check = backend.check(step, rule, self.inner_optimizer, state)
            step, finite = check.step, backend.all_replicas_finite(check.all_finite)
            if tracker is not None:
                tracker.track(
                    gradients=step.gradients,
                    variables=step.variables,
                    unscale=lambda each: backend.unscale(step._replace(gradients=list(each)), rule),
                    finite=finite,
                    scale=scale,
                    number=backend.step_number(self.iterations),
                    is_shared=backend.sums_before_check or not step.aggregate,
                )

            def apply(gradients: ft.Gradients, divisor: ft.Scalar | None) -> object:
                # Each replica has its own gradients, and its own copy of the scale.
                own = step._replace(gradients=list(gradients), scale=divisor)
                unscaled = backend.unscale(own, rule)
                return self._apply_inner(own._replace(gradients=unscaled, scale=None))

            def update_scale(finite: ft.Scalar) -> object:
                return self._update_scale(finite, check.state_on_host)

            done = backend.apply_or_skip(self, finite, step, apply, update_scale)
        if warns and not finite:
            self._warned_at_floor = warned_at_floor(rule, float(scale))
        return self._result(done)

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
        location = self._backend.current_location()
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
        location = self._backend.current_location()
        params = self._backend.flat_variables(params)
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
        location = self._backend.current_location()
        with self._ledger.own_step(location):
            gradients = self.get_gradients(loss, params)
            pairs = list(zip(gradients, self._backend.flat_variables(params), strict=True))
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
        return self._backend.read(self._steps_skipped)

    @property
    def last_step_skipped(self) -> ft.Tensor:
        """Whether the last step was skipped: a boolean scalar tensor."""
        return self._backend.read(self._last_step_skipped)

    # For `repr`, because a program that reads `loss_scale` may multiply by it. The second name is
    # called by programs for TensorFlow 2.4; of `experimental` it is the loss scale itself, which is
    # called the same way.
    _scale_now = _loss_scale = _current_scale

    def _is_on_host(self) -> bool:
        # Keras computes `iterations` if it accumulates, from a variable beside these.
        variables = [*self._state.variables.values(), self._steps_skipped]
        return all(self._backend.is_on_host(each) for each in variables)

    def _track_overflows(self, variables: ft.Variables = ()) -> None:
        """Makes steps track overflows, in functions that are traced from now on.

        Args:
            variables: Those that are trained, if they exist.
        """
        # Not tracked by Keras and TensorFlow.
        self.__dict__["_overflow_tracker"] = self._backend.new_overflow_tracker()
        if variables:
            self._build_overflow_tracker(variables)

    def _build_overflow_tracker(self, variables: ft.Variables) -> None:
        if self._overflow_tracker is not None:
            names = [getattr(v, "path", v.name).removesuffix(":0") for v in variables]
            with self._backend.eager_scope():
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

    # --- Weights and slots --------------------------------------------------------------------

    @property
    def weights(self) -> VariableList:
        """The inner optimizer's counter of applied steps, then its state variables.

        As in TensorFlow, the loss scale and the learning rate are not among them. They are in the
        order of creation.
        """
        return VariableList(self._inner_weights())

    @property
    def _lasting_variables(self) -> VariableList:
        """All variables that are saved."""
        return self.variables

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
        values = list(weights)
        weights, everything = self.weights, self._lasting_variables
        if len(values) not in (len(weights), len(everything)):
            raise ArgumentError(
                f"Expected {len(weights)} weights, or all {len(everything)} variables, with the "
                f"loss scale. Received: {len(values)} arrays. An optimizer that is not built has "
                "no state yet: call build(variables) first."
            )
        targets = weights if len(values) == len(weights) else everything
        check_shapes(targets, values)
        self._assign(targets, values)

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
        slot = self._find_slot(var, slot_name)
        if slot is None:
            raise UnknownSlotError(
                f"{type(self.inner_optimizer).__name__} has no slot {slot_name!r} for the "
                f"variable {var.name!r}. Its slots are {self.get_slot_names()}; they exist for "
                "the variables it was built with."
            )
        return slot

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
        slot = self._find_slot(var, slot_name)
        if slot is None:
            slot = self._new_slot(var, slot_name, initializer)
            self._added_slots[slot_name, self.inner_optimizer._var_key(var)] = slot
        return slot

    def _find_slot(self, var: ft.Variable, slot_name: str) -> ft.Variable | None:
        wanted = self._names_of_slot(var, slot_name)
        key = self.inner_optimizer._var_key(var)
        for names, slots in self._slots():
            if wanted & set(names) and key in slots:
                return slots[key]
        return None

    def _names_of_slot(self, var: ft.Variable, slot_name: str) -> set[str]:
        """Returns all names of a kind of slot of a variable."""
        return set(names_for(kind_of(self.inner_optimizer), [slot_name]))

    def _slots(self) -> Slots:
        yield from self._slots_of_inner()
        by_name: dict[str, dict[Key, ft.Variable]] = {}
        for (name, key), slot in self._added_slots.items():
            by_name.setdefault(name, {})[key] = slot
        for name, slots in by_name.items():
            yield [name], slots

    # --- Copies, configurations, and the library's registry of classes ------------------------

    def __reduce__(self) -> NoReturn:
        lines = ("new = type(old).from_config(old.get_config())", *self._lines_of_a_copy)
        raise UnsupportedError(
            "A LossScaleOptimizer cannot be copied or pickled; its model can. For a second "
            "optimizer with the same state, write:\n    " + "\n    ".join(lines)
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce__()

    def _constructor_arguments(self) -> dict[str, Any]:
        """Returns the other arguments of the constructor, to recreate this optimizer."""
        return {"rule": self._rule, "name": self.__dict__.get("_given_name", self.name)}

    def get_config(self) -> ft.Config:
        """Returns the configuration: a JSON-ready dictionary, without the state."""
        name, described = self._constructor_arguments()["name"], config_from_rule(self._rule)
        if "rule" in described:
            described["rule"]["class_name"] = self._registered_name(type(self._rule))
        return {
            **({} if name is None else {"name": name}),
            "inner_optimizer": self._library.optimizers.serialize(self.inner_optimizer),
            **described,
        }

    @classmethod
    def from_config(cls, config: ft.Config, custom_objects: dict[str, Any] | None = None) -> Self:
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
        check_config(config)
        rules = cls._with_class_named(config.get("rule"), custom_objects)
        inner, arguments = arguments_from_config(config, rules)
        return cls._made(cls._inner_from_config(inner, custom_objects), **arguments)

    @classmethod
    def _made(cls, inner: ft.KerasOptimizer, **arguments: Any) -> Self:
        """Returns an object of this class, or of a user's subclass with another constructor."""
        by_name = {cls._name_of_inner: inner, **arguments}
        try:
            inspect.signature(cls.__init__).bind(None, **by_name)
        except TypeError:
            # A subclass may have another name for it.
            return cls(inner, **arguments)
        # As every optimizer of Keras is made of its configuration.
        return cls(**by_name)

    @classmethod
    def _registered_name(cls, named: ft.Class) -> str:
        """Returns the name by which a configuration can name a class."""
        return str(cls._library.saving.get_registered_name(named))

    @classmethod
    def _with_class_named(cls, described: Any, custom_objects: Any) -> dict[str, Any]:
        """Returns `custom_objects` with the class that `described` names, if it is registered.

        Keras does not pass its registry and the `custom_objects` of `load_model` on.
        """
        name = described.get("class_name") if isinstance(described, dict) else None
        registered = cls._library.saving.get_registered_object(name, custom_objects)
        return {**(custom_objects or {}), **({} if registered is None else {name: registered})}


_VERBS_OF_A_LOSS = ("get_scaled_loss", "get_unscaled_gradients")


def _recording(cls: ft.Class, name: str) -> Callable[..., ft.Loss | ft.Gradients]:
    """Wraps a subclass' method that scales a loss, so that its calls are recorded too."""
    rewritten = getattr(cls, name)
    is_inherited = name not in vars(cls)

    @functools.wraps(rewritten)
    def noted(self: KerasCommonOptimizer, *args: Any, **kwargs: Any) -> ft.Loss | ft.Gradients:
        # A base class may replace its verb after this class was made.
        verb = getattr(super(cls, self), name) if is_inherited else rewritten.__get__(self)
        location = self._backend.current_location()
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


def slots_in(
    optimizer: ft.KerasOptimizer, keys: Sequence[Key], kind: ft.Class
) -> Iterator[tuple[str, dict[Key, ft.Variable]]]:
    """Yields the attributes that hold a kind of slot, and its variables by the given keys.

    Keras' optimizers keep each kind in a list, with one variable (or None) for every variable they
    were built with. Two lists of the base class can be as long, by chance.

    Args:
        optimizer: The optimizer.
        keys: A key for each variable that it was built with.
        kind: The class of its variables.
    """
    for attribute, values in vars(optimizer).items():
        if attribute in ("_trainable_variables", "_variables"):
            continue
        if isinstance(values, (list, tuple)) and len(values) == len(keys):
            pairs = zip(keys, values, strict=True)
            if slots := {key: value for key, value in pairs if isinstance(value, kind)}:
                yield attribute, slots


def check_shapes(variables: ft.Variables, values: Iterable[ft.Array]) -> None:
    """Checks that arrays fit variables, before any is set.

    Raises:
        ArgumentError: If one does not.
    """
    for variable, value in zip(variables, values, strict=True):
        shape = tuple(np.shape(value))
        if tuple(variable.shape) != shape:
            raise ArgumentError(
                f"The weight {variable.name!r} has the shape {tuple(variable.shape)}. "
                f"Received: an array of shape {shape}. Nothing was changed."
            )
