"""The loss scale optimizer for Keras 3: construction, settings, and the training step."""

from __future__ import annotations

import copy
import difflib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import keras
from keras import ops

# Keras keeps attribute tracking private; its own optimizers decorate `build` with this.
from keras.src.utils.tracking import no_automatic_dependency_tracking

from lossscale.arguments import config_from_rule, rule_from_arguments
from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentError,
    GradientsError,
    MalformedGradientsError,
    UnknownSettingError,
)
from lossscale.frameworks.keras import engines
from lossscale.frameworks.keras.convention import GradientConvention
from lossscale.frameworks.keras.iterations import StepCounter
from lossscale.frameworks.keras.persistence import LossScaleStore, Persistence
from lossscale.frameworks.keras.standalone import Standalone
from lossscale.frameworks.keras.state import State
from lossscale.frameworks.keras.verbs import DocumentedVerbs
from lossscale.frameworks.keras.weights import DocumentedWeights, VariableList
from lossscale.optimizer import LossScaleOptimizer

# Keras' base class sets these on every optimizer. On a wrapper they would hide the settings of
# the optimizer inside, which are the ones that have an effect.
_SETTINGS_OF_THE_BASE = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
)

_wrappers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


@keras.saving.register_keras_serializable(package="lossscale", name="LossScaleOptimizer")
class KerasLossScaleOptimizer(
    DocumentedVerbs,
    DocumentedWeights,
    Persistence,
    Standalone,
    LossScaleOptimizer,
    keras.optimizers.LossScaleOptimizer,
):
    __doc__ = LossScaleOptimizer.__doc__

    _framework: ClassVar[str | None] = "keras"

    # None where a loss scale of the older API moves by its user's own code.
    _state: Any
    _iterations: Any
    _waiting: dict[str, Any] | None
    built: bool

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
        _check_names(kwargs)
        rule = rule_from_arguments(dynamic, initial_scale, dynamic_growth_steps, rule)
        _check_inner(inner_optimizer)
        engine = engines.load()
        # Past Keras' own class, whose constructor would clear the inner optimizer's settings.
        super(keras.optimizers.LossScaleOptimizer, self).__init__(
            learning_rate=0.0, name=name or "loss_scale_optimizer"
        )
        for setting in _SETTINGS_OF_THE_BASE:
            del self.__dict__[setting]
        self._untrack_variable(self._learning_rate)
        self._untrack_variable(self._iterations)
        del self._learning_rate, self._iterations
        self._engine = engine
        self.inner_optimizer = inner_optimizer
        self._rule = rule
        self._convention = GradientConvention()
        self._waiting = None
        # Past attribute tracking, which would count these variables as own ones.
        self.__dict__["_added_slots"] = {}
        self.loss_scale_state = LossScaleStore(self._own_values, self._set_own_values)
        self._create_state()
        _wrappers[inner_optimizer] = weakref.ref(self)

    def _create_state(self) -> None:
        self._state = self._first_state()
        variables = self._state.variables if self._state is not None else {}
        self.step_counter = variables.get("good_steps")
        self.dynamic_scale = variables.get("scale")
        self._steps_skipped = self._add_own_variable("steps_skipped", "int", 0)
        self._last_step_skipped = self._add_own_variable("last_step_skipped", "bool", False)
        with keras.name_scope(self.name):
            self._iterations = StepCounter(self.inner_optimizer, self._steps_skipped)
        self._iterations.follow()

    def _first_state(self) -> State | None:
        return State(self._rule, self._add_own_variable, self._engine.read)

    def _add_own_variable(self, name: str, dtype: str, value: Any) -> Any:
        return self.add_variable(
            shape=(),
            dtype=dtype,
            initializer=keras.initializers.Constant(value),
            # Every replica computes the same value.
            aggregation="only_first_replica",
            name=name,
        )

    def __repr__(self) -> str:
        inner = type(self.inner_optimizer).__name__
        return f"<LossScaleOptimizer {self.name!r} around {inner}, {self._rule}>"

    # --- What can be read ---------------------------------------------------------------------

    @property
    def loss_scale(self) -> Any:
        """The number that multiplies the loss now: a float32 scalar tensor, dimensionless."""
        return ops.cast(self._current_scale(), "float32")

    @property
    def dynamic_counter(self) -> Any:
        """The finite steps since the scale last changed: an integer scalar variable, in steps.

        None if the scale is fixed.
        """
        return self.step_counter if self.dynamic else None

    @property
    def steps_skipped(self) -> Any:
        """How many steps were skipped so far: an integer scalar tensor, in steps."""
        return self._engine.read(self._steps_skipped)

    @property
    def last_step_skipped(self) -> Any:
        """Whether the last step was skipped: a boolean scalar tensor."""
        return self._engine.read(self._last_step_skipped)

    @property
    def iterations(self) -> Any:
        """How many training steps were run, skipped ones included: an integer variable.

        `inner_optimizer.iterations` counts the applied ones; learning rate schedules and
        Adam's bias correction follow that. Assigning here moves both.
        """
        if self.gradient_accumulation_steps:
            return ops.floor_divide(self._iterations, self.gradient_accumulation_steps)
        return self._iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self._iterations.assign(value)

    @property
    def lr(self) -> Any:
        """The learning rate of the inner optimizer; another name of `learning_rate`."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    @property
    def loss_scale_factor(self) -> None:
        """Always None: Keras' own fixed loss scale, which this optimizer replaces."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        if value is not None:
            raise ArgumentError(
                "`loss_scale_factor` would scale the loss a second time. For a fixed scale make "
                f"LossScaleOptimizer(inner_optimizer, dynamic=False, initial_scale={value!r})."
            )

    @property
    def variables(self) -> VariableList:
        """Own variables, then those of the inner optimizer: a list that can also be called."""
        return VariableList([*self._variables, *self.inner_optimizer.variables])

    # --- The settings of the inner optimizer --------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not found here.
        inner = self.__dict__.get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(inner, name)
        except AttributeError:
            raise self._unknown_setting(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("inner_optimizer")
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if inner is None or own or "_state" not in self.__dict__ or name in _OWN_ATTRIBUTES:
            super().__setattr__(name, value)
        elif hasattr(inner, name):
            setattr(inner, name, value)
        else:
            raise self._unknown_setting(name)

    def _unknown_setting(self, name: str) -> UnknownSettingError:
        known = {n for n in (*dir(type(self)), *dir(self.inner_optimizer)) if n[0] != "_"}
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return UnknownSettingError(
            f"Neither the loss scale optimizer nor the {type(self.inner_optimizer).__name__} "
            f"inside it has a setting {name!r}.{hint}"
        )

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner optimizer's weight decay; call it before `build`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    # --- The training step --------------------------------------------------------------------

    @no_automatic_dependency_tracking  # type: ignore[untyped-decorator]
    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's variables; a second call does nothing."""
        if self.built:
            return
        inner = self.inner_optimizer
        if not inner.built:
            inner.build(list(variables))
        self._trainable_variables = list(variables)
        self._trainable_variables_indices = {
            self._var_key(variable): index for index, variable in enumerate(variables)
        }
        self.built = True
        self._load_what_waited()

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the loss scale, and marks the gradients that come of it.

        This is how Keras' trainer begins a step: the next `apply_gradients` takes its gradients
        for scaled ones and divides them. With `get_unscaled_gradients`, use `get_scaled_loss`.

        Args:
            loss: Tensor of any shape and dtype, a number, or a callable that returns one.

        Returns:
            The product, in float32 or wider; for a callable, a callable.
        """
        self._convention.note_scale_loss(self._engine.current_graph())
        return self._scaled(loss)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Applies gradients to variables, or skips the step; then moves the loss scale.

        The gradients are those that `get_unscaled_gradients` returned. After `scale_loss` they
        are those of the scaled loss, as Keras' trainer passes them.

        Args:
            grads_and_vars: (gradient, variable) pairs. A gradient is a tensor of the variable's
                shape, a `tf.IndexedSlices`, or None.
            name: Name of the operations, or None.
            skip_gradients_aggregation: Whether the gradients were already summed over the
                replicas of a strategy; then they are not summed again.
            experimental_aggregate_gradients: The opposite, under its older name.

        Returns:
            `iterations`, which has grown by 1, whether the step was applied or skipped.

        Raises:
            TypeError: If `grads_and_vars` does not hold pairs.
            ValueError: If no variable has a gradient.
        """
        gradients, variables = self._checked_pairs(grads_and_vars)
        scaled = self._convention.take(self._engine.current_graph())
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        with keras.name_scope(name or self.name):
            self._step(gradients, variables, scaled=scaled, aggregate=aggregate)
        return self.iterations

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Applies gradients of the scaled loss, or skips the step; then moves the loss scale.

        Args:
            grads: Gradients of the loss that `scale_loss` returned; None where there is none.
            trainable_variables: Their variables; None for those the optimizer was built with.
        """
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
            if len(grads) != len(trainable_variables):
                raise GradientsError(
                    f"Expected one gradient for each of the {len(trainable_variables)} variables "
                    f"the optimizer was built with. Received: {len(grads)} gradients. Pass the "
                    "variables as `trainable_variables`, or call build(variables) first."
                )
        _check_some_gradient(grads)
        self._convention.take_for_apply()
        with keras.name_scope(self.name):
            self._step(grads, list(trainable_variables), scaled=True)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Applies gradients of the scaled loss without changing any variable.

        Args:
            optimizer_variables: Arrays, the values of `variables`.
            grads: Gradients of the loss that `scale_loss` returned; None where there is none.
            trainable_variables: Arrays, the values of the variables it was built with.

        Returns:
            The new values of the trainable variables, and those of `variables`.

        Raises:
            ValueError: If the optimizer is not built, the numbers of values do not match, or the
                backend is TensorFlow.
        """
        own, trained = self.variables, self._trainable_variables
        if not self.built or keras.backend.backend() == "tensorflow":
            # The inner optimizer says why.
            self.inner_optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)
        for name, given, expected in (
            ("optimizer_variables", optimizer_variables, own),
            ("trainable_variables", trainable_variables, trained),
        ):
            if len(given) != len(expected):
                raise ArgumentError(
                    f"`{name}` must hold {len(expected)} values, one for each of the variables "
                    f"of the optimizer. Received: {len(given)}."
                )
        values = zip([*own, *trained], [*optimizer_variables, *trainable_variables], strict=True)
        with keras.StatelessScope(state_mapping=list(values)) as scope:
            self.apply(grads, trained)
        return (
            [scope.get_current_value(variable) for variable in trained],
            [scope.get_current_value(variable) for variable in own],
        )

    def _step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        scaled: bool,
        aggregate: bool = True,
    ) -> None:
        self.build(variables)
        self.inner_optimizer._check_variables_are_known(variables)
        if scaled:
            gradients = self._unscaled(gradients, variables)
        self._engine.run_step(self, gradients, variables, aggregate)

    def _scaled(self, loss: Any) -> Any:
        if callable(loss):
            return lambda: self._scaled(loss())
        return self._engine.scaled(loss, self._current_scale())

    def _unscaled(
        self, gradients: Iterable[Any], variables: Sequence[Any] | None = None
    ) -> list[Any]:
        scale, exact = self._current_scale(), self._rule.powers_of_two
        gradients = list(gradients)
        # A variable that Keras overwrites with its gradient (float8 statistics) has no gradient
        # of the loss, so nothing multiplied it.
        overwritten = [
            variables is not None and self._overwrite_variable_with_gradient(variables[i])
            for i in range(len(gradients))
        ]
        return [
            gradient
            if gradient is None or overwrites
            else self._engine.unscaled(gradient, scale, exact)
            for gradient, overwrites in zip(gradients, overwritten, strict=True)
        ]

    # What a LossScale object of the older API replaces: the scale, the verdict, the move.

    def _current_scale(self) -> Any:
        return self._rule.loss_scale(self._state.read())

    def _judge(self, gradients: Sequence[Any]) -> Any:
        """Whether the step is applied: a boolean scalar tensor, or True if nothing is checked."""
        return self._engine.all_finite(gradients) if self._rule.checks_gradients else True

    def _move_scale(self, finite: Any) -> None:
        if self._state is not None:
            self._state.update(finite)
        self._count_step(finite)

    def _count_step(self, finite: Any) -> None:
        if finite is not True:
            skipped = ops.logical_not(finite)
            self._last_step_skipped.assign(skipped)
            self._steps_skipped.assign_add(ops.cast(skipped, self._steps_skipped.dtype))
        self._iterations.follow()

    def _checked_pairs(self, grads_and_vars: Any) -> tuple[list[Any], list[Any]]:
        try:
            pairs = [tuple(pair) for pair in grads_and_vars]
        except TypeError:
            pairs = [()]
        if any(len(pair) != 2 for pair in pairs):
            raise MalformedGradientsError(
                "`grads_and_vars` must hold (gradient, variable) pairs, as in "
                "zip(gradients, variables). "
                f"Received: {grads_and_vars!r} of type {type(grads_and_vars).__name__}."
            )
        for _, variable in pairs:
            if not self._engine.is_variable(variable):
                raise MalformedGradientsError(
                    "The second item of every pair in `grads_and_vars` must be a variable. "
                    f"Received: {variable!r} of type {type(variable).__name__}."
                )
        gradients = [gradient for gradient, _ in pairs]
        _check_some_gradient(gradients)
        return gradients, [variable for _, variable in pairs]

    # --- Configuration ------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration: a JSON-ready dictionary without any saved state."""
        described = config_from_rule(self._rule)
        if "rule" in described:
            described["rule"]["class_name"] = keras.saving.get_registered_name(type(self._rule))
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            **described,
        }

    @classmethod
    def _rules_named(cls, config: Any, custom_objects: Any) -> dict[str, Any]:
        """Returns `custom_objects` and the rule in `config`, if Keras knows its name.

        Keras passes its own registry and the `custom_objects` of `load_model` to nobody.
        """
        name = (config.get("rule") or {}).get("class_name")
        found = keras.saving.get_registered_object(name, custom_objects)
        return {**(custom_objects or {}), **({} if found is None else {name: found})}

    @staticmethod
    def _register(combined: type[Any], written: type[Any]) -> None:
        """Lets Keras' files name a class that was combined with this one."""
        package, _, name = keras.saving.get_registered_name(written).rpartition(">")
        if not package and written.__module__.startswith("lossscale.experimental"):
            package = "lossscale.experimental"
        if package:
            keras.saving.register_keras_serializable(package=package, name=name)(combined)

    @classmethod
    def _inner_from_config(cls, config: Any, custom_objects: Any) -> Any:
        if isinstance(config, keras.optimizers.Optimizer):
            return config
        # Keras lower-cases the class name in the dictionary it is given.
        return keras.optimizers.deserialize(copy.deepcopy(config), custom_objects=custom_objects)


_OWN_ATTRIBUTES = frozenset(
    {"inner_optimizer", "step_counter", "dynamic_scale", "loss_scale_state", "built", "name"}
)


def _check_names(kwargs: dict[str, Any]) -> None:
    for setting in (*_SETTINGS_OF_THE_BASE, "loss_scale_factor", "learning_rate"):
        if setting in kwargs:
            raise ArgumentError(
                f"LossScaleOptimizer has no argument `{setting}`. "
                f"Set `{setting}` on the `inner_optimizer`."
            )
    if kwargs:
        raise ArgumentError(
            f"LossScaleOptimizer has no arguments: `{'`, `'.join(kwargs)}`. It takes "
            "inner_optimizer, dynamic, initial_scale, dynamic_growth_steps, rule and name."
        )


def _check_inner(inner: Any) -> None:
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise AlreadyWrappedError(
            "The optimizer to wrap is a LossScaleOptimizer itself; the gradients would be "
            f"divided twice. Wrap the optimizer inside it. Received: {inner!r}."
        )
    wrapper = _wrappers.get(inner, lambda: None)()
    if wrapper is not None:
        raise AlreadyWrappedError(
            f"This {type(inner).__name__} is already wrapped by another LossScaleOptimizer "
            f"({wrapper.name!r}), and two of them would both move it. Use that one, or make a "
            "new optimizer to wrap."
        )
    factor = getattr(inner, "loss_scale_factor", None)
    if factor is not None:
        raise ArgumentError(
            f"The optimizer to wrap has a fixed loss scale of its own, loss_scale_factor="
            f"{factor!r}, and the loss would be scaled twice. Leave `loss_scale_factor` out; for "
            f"a fixed scale make LossScaleOptimizer(..., dynamic=False, initial_scale={factor!r})."
        )


def _check_some_gradient(gradients: Sequence[Any]) -> None:
    if all(gradient is None for gradient in gradients):
        raise GradientsError(
            "No gradients provided for any variable. Received: "
            f"{'an empty list' if not gradients else f'{len(gradients)} times None'}. Check that "
            "the loss depends on the variables and that the tape watched them."
        )
