"""The loss scale optimizer for tf_keras; `families` has what differs by its inner optimizer."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf
import tf_keras

import lossscale.framework_types as ft
import lossscale.tf_keras.saving as saving
from lossscale import registry
from lossscale.common.gradient_arguments import flat_list, scaled_value, with_gradient
from lossscale.common.private_names import do_not_convert, private_name
from lossscale.common.signatures import takes
from lossscale.errors import ArgumentError, UnsupportedError
from lossscale.keras_common.optimizer import KerasCommonOptimizer
from lossscale.keras_common.scaled_gradients import ScaleLedger
from lossscale.keras_common.slots import Slots
from lossscale.keras_common.step import Step
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.rules import ScaleRule
from lossscale.tensorflow import replicas, tracing
from lossscale.tensorflow.arrays import ARRAYS, recorded
from lossscale.tf_keras.arguments import check_inner, inner_from_config
from lossscale.tf_keras.classes import join_family, written_class
from lossscale.tf_keras.families import CurrentFamily, LegacyFamily
from lossscale.tf_keras.state import (
    CheckpointChildren,
    LossScaleNode,
    OlderNode,
    StepCounter,
    TFKerasScaleVariables,
    new_variable,
)
from lossscale.wrapper import VariableList

_DelegatingTrackableMixin: ft.Class = private_name(
    "tensorflow",
    "__internal__.tracking.DelegatingTrackableMixin",
    "be one node in a checkpoint with the inner optimizer",
)


def _of_inner(name: str) -> property:
    """A member of a base class that is the inner optimizer's, if that has it."""
    return property(lambda self: getattr(self._optimizer, name), doc=f"The optimizer's `{name}`.")


if TYPE_CHECKING:

    class _Base(KerasCommonOptimizer, Any):
        """Any, because tf_keras types the optimizer of `compile` as a string, its default."""
else:
    _Base = KerasCommonOptimizer


@FrontDoor.register
@tf_keras.saving.register_keras_serializable("lossscale")
class LossScaleOptimizer(_Base):
    """The loss scale optimizer around a tf_keras optimizer.

    The class to inherit from; `lossscale.LossScaleOptimizer` creates objects of it. An object
    belongs to the family of its inner optimizer: it is a `tf_keras.optimizers.Optimizer` or a
    `tf_keras.optimizers.legacy.Optimizer`, and a `tf_keras.mixed_precision.LossScaleOptimizer`.

    Args:
        inner_optimizer: The optimizer to wrap, an instance of either family.
        dynamic: As for `lossscale.LossScaleOptimizer`, like the arguments below.
        initial_scale: The first, or the fixed, loss scale.
        dynamic_growth_steps: The number of finite steps in a row after which the scale doubles.
        rule: A `ScaleRule`, instead of the three arguments above.
        name: The optimizer's name.

    Raises:
        TypeError: If `inner_optimizer` is not a tf_keras optimizer or already has loss scaling, or
            an argument has the wrong type.
        ValueError: If a scale or a number of steps is invalid.

    Examples:
        >>> optimizer = LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.5), initial_scale=8)
        >>> isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer)
        True
    """

    # The public module, which pickles and files name.
    __module__ = "lossscale.tf_keras"

    _framework: ClassVar[str] = "tf_keras"
    _library = tf_keras
    # Unlike `set_weights`, a checkpoint knows the slots of legacy optimizers by their variables.
    _lines_of_a_copy = (
        "path = tf.train.Checkpoint(optimizer=old, variables=variables).write(path)",
        "tf.train.Checkpoint(optimizer=new, variables=variables).read(path)",
    )
    _inner_attribute = "_optimizer"
    # TensorFlow keeps the inner optimizer under the second name.
    _hidden = frozenset({"_optimizer", "_trackable"})
    _arrays = ARRAYS

    _is_legacy: bool = False
    _family: CurrentFamily | LegacyFamily

    def _construct(self, inner: ft.KerasOptimizer, rule: ScaleRule, name: str | None) -> None:
        check_inner(inner)
        replicas.check_strategy()
        join_family(self, inner)
        # The constructors of tf_keras are not called: they would make a second counter and hide
        # the inner optimizer's settings. In a checkpoint both optimizers are one node.
        _DelegatingTrackableMixin.__init__(self, inner)
        self._optimizer = inner
        if isinstance(inner, tf_keras.optimizers.legacy.Optimizer):
            self._is_legacy = self._takes_third = True
        self._family = LegacyFamily(inner) if self._is_legacy else CurrentFamily(inner)
        self._given_name = name
        self._rule = rule
        self._ledger = ScaleLedger(not rule.is_dynamic)
        # All variables that it was built with, by the calls of `build`.
        self._built_groups: tuple[ft.Variables, ...] = ()
        # Variables of a LossScale object, by name.
        self._loss_scale_variables: dict[str, ft.Variable] = {}
        self._added_slots = {}
        self._create_state()

    def _create_state(self) -> None:
        self._state = self._first_state()
        self._steps_skipped = new_variable("steps_skipped", tf.int64, 0)
        self._last_step_skipped = new_variable("last_step_skipped", tf.bool, False)
        self._step_counter = StepCounter(self._inner_iterations, self._steps_skipped)
        own = self._own_variables()
        extras = {name: own.pop(name) for name in ("steps_skipped", "last_step_skipped")}
        self._children = CheckpointChildren(
            self._optimizer,
            LossScaleNode(own, extras) if own or self._rule.checks_gradients else None,
            OlderNode(),
        )

    def _track_variable(self, variable: ft.Variable) -> None:
        """Counts a variable of a LossScale object as one of this optimizer's."""
        self._loss_scale_variables[variable.name.removesuffix(":0")] = variable

    def _children_have_changed(self) -> None:
        # The first checkpoint, maybe written before the optimizer was wrapped, left a list.
        self._optimizer.__dict__.pop("_coalesced_children", None)

    def build(self, var_list: ft.Variables) -> None:
        self._build(list(var_list))

    def _create_all_weights(self, var_list: ft.Variables) -> None:
        # The name of legacy optimizers.
        self._build(list(var_list))

    def _build(self, variables: list[ft.Variable]) -> None:
        self._family.build(variables)
        # For `lossscale_migration`.
        known = {id(each) for group in self._built_groups for each in group}
        new = [each for each in variables if id(each) not in known]
        self._warn_of_float16(new)
        if new:
            self._built_groups = (*self._built_groups, new)

    # --- The parts of a step; see `keras_common/step.py` --------------------------------------

    def _prepared(self, step: Step) -> Step:
        if not self._is_legacy and registry.is_graph_of_tensorflow_1():
            raise UnsupportedError(
                "The new optimizers of tf_keras do not train in a graph of TensorFlow 1. Received: "
                f"{type(self._optimizer).__name__}. Wrap one of tf_keras.optimizers.legacy."
            )
        variables = step.variables
        if self._is_legacy:
            # As without loss scaling, a variable without a gradient gets no slots.
            variables = with_gradient(step.gradients, variables)
        with tf.init_scope():
            self._build(list(variables))
        self._build_overflow_tracker(step.variables)
        pairs = list(zip(step.gradients, step.variables, strict=True))
        if step.aggregate:
            pairs = self._family.aggregated(pairs)
        # Before the check, because the cast can overflow.
        narrowed = [_narrowed(gradient, variable) for gradient, variable, *_ in pairs]
        variables = [pair[1] for pair in pairs]
        # They are summed now.
        return step._replace(gradients=narrowed, variables=variables, aggregate=False)

    def _sums_replicas(self, asked: bool) -> bool:
        argument, _ = self._family.are_summed
        if takes(self._optimizer.apply_gradients, argument):
            return asked
        if not asked:
            raise ArgumentError(
                f"{type(self._optimizer).__name__}.apply_gradients() does not take `{argument}`, "
                "so that it always sums the gradients of replicas. Add the argument to it, and "
                "pass it on."
            )
        # It does that itself.
        return False

    def _apply_inner(self, step: Step) -> object:
        argument, value = self._family.are_summed
        given: dict[str, Any] = {} if step.name is None else {"name": step.name}
        if takes(self._optimizer.apply_gradients, argument):
            given[argument] = value
        pairs = list(zip(step.gradients, step.variables, strict=True))
        with self._family.while_applying():
            return tracing.translated(self._optimizer.apply_gradients)(pairs, **given)

    def _changed_by(self, step: Step) -> list[ft.Variable]:
        inner, unlisted = self._optimizer, self._unlisted_variables().values()
        return [*inner.variables, inner.iterations, *unlisted, *step.variables]

    def _result(self, operation: ft.Operation) -> ft.Variable | ft.Operation:
        if tf.executing_eagerly():
            return self.iterations
        if tf.compat.v1.get_default_graph().building_function:
            return tracing.after(operation, self.iterations.value)
        return tracing.grouped(operation)

    # --- Gradients of a loss ------------------------------------------------------------------

    @staticmethod
    def _is_variable(value: object) -> bool:
        return isinstance(value, tf.Variable)

    @do_not_convert
    def _flat_variables(self, variables: ft.Structure) -> list[ft.Variable]:
        return flat_list(variables, tf.nest.flatten, self._is_variable)

    def compute_gradients(
        self, loss: ft.Loss, var_list: ft.VarList = None, tape: Any = None, grad_loss: Any = None
    ) -> ft.GradsAndVars:
        """Returns (gradient, variable) pairs for `apply_gradients`; the first half of `minimize`.

        Args:
            loss: As for `minimize`.
            var_list: As for `minimize`.
            tape: As for `minimize`.
            grad_loss: As for `minimize`.

        Raises:
            ValueError: If `var_list` holds something else than variables, or if `loss` is a
                tensor without a tape.

        Examples:
            >>> optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.SGD())
            >>> weight = tf.Variable(3.0)
            >>> [(gradient, _)] = optimizer.compute_gradients(lambda: weight**2, [weight])
            >>> float(gradient)
            6.0
        """
        location = replicas.current_location()
        with self._ledger.own_step(location):
            scaled, variables = self._differentiated(loss, var_list, grad_loss, tape)
            gradients = self._unscaled_by_verb(Step(scaled, variables))
        self._ledger.record(location, "get_scaled_loss")
        self._ledger.record_unscaled(location, len(with_gradient(gradients, variables)))
        return list(zip(gradients, variables, strict=True))

    def _compute_gradients(
        self,
        loss: ft.Loss,
        var_list: ft.VarList,
        grad_loss: ft.Tensor | ft.Tape = None,
        tape: ft.Tape = None,
    ) -> ft.GradsAndVars:
        # Programs for legacy optimizers use, and override, this name.
        if isinstance(grad_loss, tf.GradientTape):
            # The new optimizers of tf_keras take the tape in this place.
            grad_loss, tape = None, grad_loss
        # As TensorFlow did: an override need not know an argument that nobody gives.
        given = {"tape": tape, "grad_loss": grad_loss}
        given = {name: value for name, value in given.items() if value is not None}
        return self.compute_gradients(loss, var_list, **given)

    def _computed(self, *given: Any) -> ft.GradsAndVars:
        return self._compute_gradients(*given)

    def _symbolic(self, loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        return self._family.symbolic(loss, variables)

    def _differentiated(
        self, loss: ft.Loss, var_list: ft.VarList, grad_loss: ft.Tensor | None, tape: ft.Tape
    ) -> tuple[list[ft.Gradient], list[ft.Variable]]:
        def scale(loss: ft.Loss) -> ft.Tensor:
            scaled = scaled_value(loss, self.get_scaled_loss)
            if grad_loss is None:
                return scaled
            return tf.reduce_sum(scaled * tf.stop_gradient(tf.cast(grad_loss, scaled.dtype)))

        given = var_list is not None and not callable(var_list)
        watch = self._flat_variables(var_list) if given else []
        tape, scaled, variables = recorded(loss, var_list, scale, tape=tape, watch=watch)
        variables = self._flat_variables(variables)
        pairs = self._family.pairs_of(scaled, variables, tape)
        return [gradient for gradient, _ in pairs], variables

    # --- What can be read ---------------------------------------------------------------------

    @property
    def inner_optimizer(self) -> ft.KerasOptimizer:
        """The inner optimizer."""
        return self._optimizer

    @property
    def name(self) -> str:  # type: ignore[override]  # only read
        """The optimizer's name."""
        return self._given_name or "loss_scale_optimizer"

    @property
    def dynamic_counter(self) -> ft.Variable | None:
        return self._state.variables.get("good_steps")

    @property
    def iterations(self) -> StepCounter:
        return self._step_counter

    @iterations.setter
    def iterations(self, value: ft.Variable | ft.Scalar) -> None:
        if isinstance(value, tf.Variable):
            self._optimizer.iterations = value
        else:
            self._step_counter.assign(value)

    def _inner_iterations(self) -> ft.Variable:
        # A legacy optimizer makes its counter when it is first read, maybe in a traced function.
        with tf.init_scope():
            return self._optimizer.iterations

    @property
    def variables(self) -> VariableList:
        # Last come those that the inner optimizer keeps and does not list (Nadam).
        listed = [*self._inner_weights(), *self._own_variables().values()]
        # HDF5 files name a variable by its name alone.
        others = self._unlisted_variables().values()
        names = collections.Counter(variable.name for variable in (*listed, *others))
        return VariableList([*listed, *(other for other in others if names[other.name] == 1)])

    def get_weights(self) -> list[ft.Array]:
        return saving.values_of(self.weights)

    def _assign(self, variables: ft.Variables, values: Sequence[ft.Array]) -> None:
        tf_keras.backend.batch_set_value(list(zip(variables, values, strict=True)))

    def add_weight(
        self,
        name: str,
        shape: Iterable[int],
        dtype: ft.DType = None,
        initializer: ft.Initializer = "zeros",
        trainable: bool | None = None,
        synchronization: object = tf.VariableSynchronization.AUTO,
        aggregation: object = tf.VariableAggregation.NONE,
    ) -> ft.Variable:
        dtype = None if dtype is None else tf.as_dtype(dtype)
        settings = {"synchronization": synchronization, "aggregation": aggregation}
        made = self._family.new_weight(name, shape, dtype, initializer, trainable, **settings)
        self._children_have_changed()
        return made

    def _own_variables(self) -> dict[str, ft.Variable]:
        """The variables of the loss scale and of the skips, by their names in saving."""
        named = self._state.named
        skips = {"steps_skipped": self._steps_skipped, "last_step_skipped": self._last_step_skipped}
        theirs = {
            f"own.{name}" if name in {**named, **skips} else name: variable
            for name, variable in self._loss_scale_variables.items()
        }
        return {**named, **theirs, **skips}

    def _unlisted_variables(self) -> dict[str, ft.Variable]:
        """Returns variables that the inner optimizer does not list, by their names in saving."""
        trained = [each for group in self._built_groups for each in group]
        return self._family.unlisted_variables(trained)

    def _inner_weights(self) -> list[ft.Variable]:
        return self._family.weights()

    # --- Slots; legacy optimizers keep theirs themselves ----------------------------------------

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - self._family.hidden)

    def get_slot_names(self) -> list[str]:
        if self._is_legacy:
            return list(self._optimizer.get_slot_names())
        return list(dict.fromkeys(names[0] for names, _ in self._slots()))

    def _find_slot(self, var: ft.Variable, slot_name: str) -> ft.Variable | None:
        if not self._is_legacy:
            return super()._find_slot(var, slot_name)
        with contextlib.suppress(KeyError):
            return self._optimizer.get_slot(var, slot_name)
        return None

    def add_slot(
        self, var: ft.Variable, slot_name: str, initializer: Any = "zeros", **shape: Any
    ) -> ft.Variable:
        add = self._optimizer.add_slot if self._is_legacy else super().add_slot
        return add(var, slot_name, initializer, **shape)

    def _new_slot(self, var: ft.Variable, name: str, initializer: ft.Initializer) -> ft.Variable:
        first = initializer
        if isinstance(initializer, str) or callable(initializer):
            first = tf_keras.initializers.get(initializer)(var.shape, dtype_of(var))
        with tf.init_scope():
            slot = self._optimizer.add_variable_from_reference(var, name, initial_value=first)
        self._children_have_changed()
        return slot

    def _slots_of_inner(self) -> Slots:
        return self._family.slots()

    # --- Members of the base classes that are the inner optimizer's -----------------------------

    aggregate_gradients = _of_inner("aggregate_gradients")
    update_step = _of_inner("update_step")
    add_variable = _of_inner("add_variable")
    add_variable_from_reference = _of_inner("add_variable_from_reference")
    exclude_from_weight_decay = _of_inner("exclude_from_weight_decay")
    _decayed_lr = _of_inner("_decayed_lr")
    _get_hyper = _of_inner("_get_hyper")

    # --- Settings -----------------------------------------------------------------------------

    def __getattribute__(self, name: str) -> Any:
        # Past tf_keras, whose own passing on leaves out what an optimizer does not call a
        # hyperparameter, such as Adam's epsilon.
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        inner = self.__dict__.get("_optimizer")
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not own and (name in getattr(inner, "_hyper", ()) or hasattr(inner, name)):
            setattr(inner, name, value)
        else:
            # Past attribute tracking: what belongs into a checkpoint is named explicitly.
            object.__setattr__(self, name, value)

    # --- Files, copies and configurations; see `saving` and `arguments` --------------------------

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        theirs = self._optimizer._trackable_children(save_type, **kwargs)
        return self._children.beside(theirs)

    def _lookup_dependency(self, name: str, cached_dependencies: object = None) -> ft.Node:
        theirs = self._optimizer._lookup_dependency(name)
        taken = theirs is not None or name in getattr(self._optimizer, "_hyper", ())
        own = self._children.found(name, taken)
        return theirs if own is None else own

    save_own_variables = saving.save_own_variables
    load_own_variables = saving.load_own_variables
    _inner_from_config = staticmethod(inner_from_config)

    @classmethod
    def _made(cls, inner: ft.KerasOptimizer, **arguments: Any) -> Any:
        # A configuration may be of the other family than the object whose class was asked.
        return written_class(cls)(inner, **arguments)

    def _track_overflows(self, variables: ft.Variables = ()) -> None:
        if not tf.executing_eagerly():
            raise UnsupportedError(
                "LossScaleMonitor does not work in graphs of TensorFlow 1. Leave out "
                "tf.compat.v1.disable_eager_execution(), or the monitor."
            )
        super()._track_overflows(variables)

    # --- For loss scale objects without an optimizer ------------------------------------------

    _new_variable = staticmethod(new_variable)
    _state_class = TFKerasScaleVariables

    @staticmethod
    def _float32(value: ft.Scalar) -> ft.Tensor:
        return tf.cast(value, tf.float32)


def dtype_of(variable: ft.Variable) -> ft.DType:
    """The dtype that a variable is stored in."""
    # Under a mixed precision policy it shows the dtype that it is cast to.
    return getattr(variable, "true_dtype", variable.dtype)


def _narrowed(gradient: ft.Gradient, variable: ft.Variable) -> ft.Gradient:
    """Returns a gradient of a float16 or bfloat16 variable in its dtype; others as they are."""
    dtype = dtype_of(variable)
    if gradient is None or dtype not in (tf.float16, tf.bfloat16) or gradient.dtype != tf.float32:
        return gradient
    return tf.cast(gradient, dtype)
