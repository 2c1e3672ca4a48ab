"""The loss scale optimizer for Keras 3.

`keras_common/optimizer.py` has the documented loop, `keras_common/step.py` the step, `backends` a
file for each backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
from keras import ops

import lossscale.framework_types as ft
import lossscale.keras.backends as backends
import lossscale.keras.saving as saving
import lossscale.keras.slots as slots
from lossscale.common.gradient_arguments import check_some_gradient, with_gradient
from lossscale.common.private_names import do_not_convert, private_name
from lossscale.errors import GradientsError, UnknownSettingError
from lossscale.keras.arguments import check_inner, inner_from_config, refuse_factor
from lossscale.keras.state import KerasScaleVariables, StepCounter, new_variable
from lossscale.keras_common.optimizer import KerasCommonOptimizer
from lossscale.keras_common.scaled_gradients import ScaleLedger
from lossscale.keras_common.slots import Slots
from lossscale.keras_common.step import Step
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.rules import ScaleRule
from lossscale.wrapper import VariableList

_no_automatic_dependency_tracking: ft.Function = private_name(
    "keras.src.utils.tracking",
    "no_automatic_dependency_tracking",
    "keep the variables that are trained out of the optimizer's own, as Keras' `build` does",
)
_OWN_ATTRIBUTES = frozenset({"inner_optimizer", "step_counter", "dynamic_scale", "built", "name"})
_KEPT = ("inner_optimizer", "step_counter", "dynamic_scale")


@FrontDoor.register
@keras.saving.register_keras_serializable(package="lossscale")
class LossScaleOptimizer(KerasCommonOptimizer, keras.optimizers.LossScaleOptimizer):
    """The loss scale optimizer around a Keras 3 optimizer.

    The class to inherit from; `lossscale.LossScaleOptimizer` makes objects of it. It is a
    `keras.optimizers.LossScaleOptimizer`, and has two groups of verbs: those that TensorFlow
    documented, and `scale_loss`, `apply` and `stateless_apply`, which Keras' trainer calls.

    Attributes:
        dynamic_scale: The float32 variable that holds the loss scale.
        step_counter: The variable that counts the finite steps since the scale last changed; None
            if the rule does not count them.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap, an instance.
        dynamic: As for `lossscale.LossScaleOptimizer`, like the arguments below.
        initial_scale: The first, or the fixed, loss scale.
        dynamic_growth_steps: The number of finite steps in a row after which the scale doubles.
        rule: A `ScaleRule`, instead of the three arguments above.
        name: The optimizer's name.

    Raises:
        TypeError: If `inner_optimizer` is not a Keras 3 optimizer or already has loss scaling, or
            an argument has the wrong type.
        ValueError: If a scale or a number of steps is invalid.

    Examples:
        >>> class Clipping(lossscale.keras.LossScaleOptimizer):
        ...     def get_unscaled_gradients(self, grads):
        ...         unscaled = super().get_unscaled_gradients(grads)
        ...         return [keras.ops.clip(each, -1.0, 1.0) for each in unscaled]
        >>> optimizer, weight = Clipping(keras.optimizers.SGD(0.5)), keras.Variable(1.0)
        >>> steps = optimizer.minimize(lambda: weight * 100.0, [weight])
        >>> float(weight)
        0.5
    """

    # The public module, which pickles and files name.
    __module__ = "lossscale.keras"

    _framework: ClassVar[str] = "keras"
    _library = keras
    _lines_of_a_copy = (
        "new.build(variables)",
        "new.set_weights([keras.ops.convert_to_numpy(v) for v in old.variables])",
    )
    # Keras would save these a second time.
    _hidden = KerasCommonOptimizer._hidden | {"_inner_parts", "_optimizer"}
    _backend: backends.Backend
    dynamic_scale: ft.Variable | None
    step_counter: ft.Variable | None
    # Attributes of Keras' base class.
    built: bool
    _tracker: Any

    def _construct(self, inner: ft.KerasOptimizer, rule: ScaleRule, name: str | None) -> None:
        check_inner(inner)
        backend, before = backends.load(), set(vars(self))
        backend.check_strategy()
        # Not the constructor of Keras' own class, which would clear the inner optimizer's settings.
        # mypy does not know the next base.
        super(keras.optimizers.LossScaleOptimizer, self).__init__(  # type: ignore[call-arg]
            learning_rate=0.0, name=name or "loss_scale_optimizer"
        )
        # Settings of Keras' base class. They would hide those of the inner optimizer, which are the
        # ones that have an effect.
        for setting in set(vars(self)) - before - _OWN_ATTRIBUTES:
            if not setting.startswith("_"):
                del self.__dict__[setting]
        # Two variables of Keras' base class have no effect here. TensorFlow must not track the list
        # of the others: in a checkpoint of Keras' own class, a list of this name has other things.
        del self._learning_rate, self._iterations, self._variables
        self.__dict__["_variables"] = []
        self._tracker = type(self._tracker)(
            {"variables": (lambda value: isinstance(value, keras.Variable), self._variables)}
        )
        self._backend, self._arrays = backend, backend.arrays
        self.inner_optimizer = inner
        self._rule = rule
        self._ledger = ScaleLedger(not rule.is_dynamic)
        # Not tracked: tracking would count these variables as the wrapper's own.
        self.__dict__["_added_slots"] = {}
        self._create_state()

    def _create_state(self) -> None:
        with keras.name_scope(self.name):
            self._state = state = self._first_state()
            skipped = new_variable("steps_skipped", "int", 0)
            last_skipped = new_variable("last_step_skipped", "bool", False)
        # Not by setting them, because Keras switches attribute tracking off while it compiles a
        # model.
        for variable in (*state.variables.values(), skipped, last_skipped):
            self._track_variable(variable)
        # Not saved, because it is a sum.
        self.__dict__["_step_counter"] = StepCounter(self.inner_optimizer, skipped)
        self.step_counter = state.variables.get("good_steps")
        self.dynamic_scale = state.variables.get("scale")
        self._steps_skipped, self._last_step_skipped = skipped, last_skipped

    def build(self, variables: ft.Variables) -> None:
        if self.built:
            return
        inner = self.inner_optimizer
        # Keras switches attribute tracking off for all objects at once, and by it an optimizer
        # lists the variables that its `build` sets as attributes.
        if not inner.built:
            inner.build(list(variables))
        self._warn_of_float16(variables)
        self._remember_trained(list(variables))
        self.built = True
        self._build_overflow_tracker(self._trainable_variables)

    @_no_automatic_dependency_tracking
    def _remember_trained(self, variables: list[ft.Variable]) -> None:
        self._trainable_variables = variables
        self._trainable_variables_indices = {
            self._var_key(variable): index for index, variable in enumerate(variables)
        }
        # An optimizer of several keeps them where TensorFlow's checkpoints do not look.
        if parts := list(getattr(self.inner_optimizer, "optimizers", ())):
            self._inner_parts = parts

    # --- What Keras' trainer calls; the documented loop is in the base class ------------------

    @do_not_convert
    def scale_loss(self, loss: ft.Loss) -> ft.Loss:
        """Multiplies the loss by the loss scale; its gradients count as scaled.

        Keras' trainer begins a step with it. `apply_gradients` then expects scaled gradients and
        divides them, once for each variable, so that they can be applied in groups. With
        `get_unscaled_gradients`, use `get_scaled_loss` instead.

        Args:
            loss: Tensor of any shape and dtype, a number, or a callable that returns one.

        Returns:
            The product, in float32 or wider; for a callable, a callable.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8)
            >>> float(optimizer.scale_loss(tf.constant(0.5)))
            4.0
        """
        location = self._arrays.location()
        self._ledger.record_scale_loss(location)
        # A subclass may override a verb and call this one.
        if not self._ledger.is_own_step(location) and self._is_overridden("get_scaled_loss"):
            return self.get_scaled_loss(loss)
        return self._scaled(loss)

    @do_not_convert
    def apply(self, grads: ft.Gradients, trainable_variables: ft.Variables | None = None) -> None:
        """Applies gradients of the scaled loss, or skips the step; updates the loss scale.

        The gradients themselves are not changed: on PyTorch, `.grad` can be added to, overwritten
        or passed again.

        Args:
            grads: Gradients of the loss that `scale_loss` returned, or None for a variable without.
            trainable_variables: Their variables; None for those the optimizer was built with.

        Raises:
            ValueError: If no variable has a gradient, or the number of gradients is wrong.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1.0))
            >>> weight = keras.Variable([1.0, 2.0])
            >>> optimizer.apply([optimizer.scale_loss(tf.constant([0.5, 0.5]))], [weight])
            >>> weight.numpy()
            array([0.5, 1.5], dtype=float32)
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
        check_some_gradient(grads)
        variables = list(trainable_variables)
        self._arrays.check_context()
        location = self._arrays.location()
        self._ledger.check_apply(location)
        self._step(Step(grads, variables), is_scaled=True)
        self._ledger.record_apply(location, with_gradient(grads, variables))

    def stateless_apply(
        self,
        optimizer_variables: Sequence[ft.Tensor],
        grads: ft.Gradients,
        trainable_variables: Sequence[ft.Tensor],
    ) -> tuple[list[ft.Tensor], list[ft.Tensor]]:
        """Applies gradients of the scaled loss without changing any variable.

        Args:
            optimizer_variables: Arrays, the values of `variables`.
            grads: Gradients of the loss that `scale_loss` returned, or None for a variable without.
            trainable_variables: Arrays, the values of the variables it was built with.

        Returns:
            The new values of the trainable variables, and of `variables`.

        Raises:
            ValueError: If the optimizer is not built, the numbers of values do not match, or the
                backend is TensorFlow.
        """
        # Not that of Keras' own class, which would skip the step itself. This one calls `apply`.
        trained, values = super(keras.optimizers.LossScaleOptimizer, self).stateless_apply(
            optimizer_variables, grads, trainable_variables
        )
        # The first is a sum, and not a variable whose new value a stateless scope holds.
        new = dict(zip(map(id, self.variables), values, strict=True))
        values[0] = new[id(self.inner_optimizer._iterations)] + new[id(self._steps_skipped)]
        return trained, values

    # --- The parts of a step; see `keras_common/step.py` --------------------------------------

    def _name_scope(self, name: str | None) -> Any:
        return keras.name_scope(name or self.name)

    def _prepared(self, step: Step) -> Step:
        self.build(step.variables)
        self.inner_optimizer._check_variables_are_known(step.variables)
        return step

    def _apply_inner(self, step: Step) -> None:
        self._backend.apply(self.inner_optimizer, step)

    def _changed_by(self, step: Step) -> list[ft.Variable]:
        inner = self.inner_optimizer
        return [*inner.variables, *inner._trainable_variables, *step.variables]

    # --- Gradients of a loss ------------------------------------------------------------------

    def _is_variable(self, value: object) -> bool:
        return self._backend.is_variable(value)

    def _flat_variables(self, variables: ft.Structure) -> list[ft.Variable]:
        return self._backend.flat_variables(variables)

    def _differentiated(
        self, loss: ft.Loss, var_list: ft.VarList, grad_loss: ft.Tensor | None, tape: ft.Tape
    ) -> tuple[list[ft.Gradient], list[ft.Variable]]:
        return self._backend.differentiate(loss, var_list, self.get_scaled_loss, tape, grad_loss)

    def _symbolic(self, loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        return self._backend.symbolic_gradients(loss, variables)

    # --- What can be read ---------------------------------------------------------------------

    @property
    def _optimizer(self) -> ft.KerasOptimizer:
        # The name of the inner optimizer in tf_keras, which programs read.
        return self.inner_optimizer

    @property
    def dynamic_counter(self) -> ft.Variable | None:
        return self.step_counter if self.dynamic else None

    # It counts every call, also with gradient accumulation, as `steps_skipped` does.
    @property
    def iterations(self) -> ft.Variable:
        return self._step_counter

    @iterations.setter
    def iterations(self, value: ft.Scalar) -> None:
        self._step_counter.assign(value)
        for part in getattr(self.inner_optimizer, "optimizers", ()):
            part._iterations.assign(self.inner_optimizer._iterations)

    @property
    def variables(self) -> VariableList:
        tracked = getattr(self._overflow_tracker, "variables", ())
        return VariableList([*self._lasting_variables, *tracked])

    @property
    def _lasting_variables(self) -> VariableList:
        own = [self._step_counter, *self._variables]
        return VariableList([*own, *self.inner_optimizer.variables])

    # --- Settings -----------------------------------------------------------------------------

    @property
    def loss_scale_factor(self) -> None:
        """Always None: Keras' own fixed loss scale, which this optimizer replaces."""
        return None

    def __setattr__(self, name: str, value: object) -> None:
        if "_lock" not in (name, *self.__dict__) and not isinstance(value, keras.Variable):
            # A subclass may set attributes before it calls Keras' constructor, as in TensorFlow.
            object.__setattr__(self, name, value)
            return
        inner = self.__dict__.get("inner_optimizer")
        if name == "loss_scale_factor":
            # Not TensorFlow's tracking, which ignores a value that is already set.
            if "_state" in self.__dict__:
                refuse_factor(value)
            return
        if name in _KEPT and self.__dict__.get(name) is not None:
            raise UnknownSettingError(
                f"`{name}` cannot be replaced. The value of a variable is set with assign()."
            )
        known = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if name not in _OWN_ATTRIBUTES and not known and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    # --- Weights and slots; see `slots` -------------------------------------------------------

    def _inner_weights(self) -> list[ft.Variable]:
        return slots.weights_of(self.inner_optimizer)

    def _assign(self, variables: ft.Variables, values: Sequence[ft.Array]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    get_weights = slots.get_weights
    add_weight = slots.add_weight

    def get_slot_names(self) -> list[str]:
        return list(dict.fromkeys(name for names, _ in self._slots() for name in names))

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner optimizer's weight decay; call it before `build`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def _slots_of_inner(self) -> Slots:
        return slots.slots_of(self.inner_optimizer)

    def _names_of_slot(self, var: ft.Variable, slot_name: str) -> set[str]:
        return slots.names_of(self.inner_optimizer, var, slot_name)

    def _new_slot(self, var: ft.Variable, name: str, initializer: ft.Initializer) -> ft.Variable:
        make = self.inner_optimizer.add_variable_from_reference
        return make(var, name=name, initializer=initializer)

    # --- Files, copies and configurations; see `saving` and `arguments` -----------------------

    save_own_variables = saving.save_own_variables
    load_own_variables = saving.load_own_variables

    # TensorFlow asks for the children of a node in a checkpoint, on its backend alone.

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        return {**super()._trackable_children(save_type, **kwargs), **saving.named_variables(self)}

    def _lookup_dependency(self, name: str, cached_dependencies: object = None) -> ft.Node:
        # A restore gives the children.
        if name == "_iterations" and cached_dependencies:
            return saving.CounterOfPlain("iteration", "int", 0)
        return super()._lookup_dependency(name, cached_dependencies)

    _inner_from_config = staticmethod(inner_from_config)

    # --- For loss scale objects without an optimizer ------------------------------------------

    _new_variable = staticmethod(new_variable)
    _state_class = KerasScaleVariables

    @staticmethod
    def _float32(value: ft.Scalar) -> ft.Tensor:
        return ops.cast(value, "float32")
