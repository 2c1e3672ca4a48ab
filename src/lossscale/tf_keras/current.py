"""The loss scale optimizer around the new optimizers of tf_keras."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tf_keras

import lossscale.framework_types as ft
from lossscale.common.private_names import private_name
from lossscale.keras_common.optimizer import Slots, slots_in
from lossscale.keras_common.state import parts_of
from lossscale.old_formats import documented_name, kind_of
from lossscale.tensorflow.tracing import in_xla, translated
from lossscale.tf_keras.classes import CalledAsWritten, of_family
from lossscale.tf_keras.optimizer import LossScaleOptimizer, dtype_of
from lossscale.tf_keras.saving import load_own_variables, save_own_variables

_LossScaleOptimizerV3: ft.Class = private_name(
    "tf_keras.src.mixed_precision.loss_scale_optimizer",
    "LossScaleOptimizerV3",
    "be an instance of tf_keras' class for new optimizers",
)


@of_family
class CurrentWrapper(LossScaleOptimizer, _LossScaleOptimizerV3, metaclass=CalledAsWritten):
    """A wrapper of the optimizers that tf_keras has had since 2.11."""

    _inner_base = tf_keras.optimizers.Optimizer
    _is_legacy = False
    _are_summed = ("skip_gradients_aggregation", True)

    def _build_inner(self, variables: list[ft.Variable]) -> None:
        self._optimizer.build(variables)

    def _unlisted_variables(self) -> dict[str, ft.Variable]:
        # tf_keras lists what `add_variable` made, and not what `build` set as an attribute.
        inner = self._optimizer
        trained = [each for group in self._built_groups for each in group]
        listed = [*inner.variables, inner.iterations, inner._learning_rate, *trained]
        known = {id(variable) for variable in listed}
        return {
            f"inner.{name}.{number}": each
            for name, attribute in vars(inner).items()
            # TensorFlow keeps the attributes once more in these.
            if not name.startswith("_self_")
            for number, each in enumerate(parts_of(attribute))
            if isinstance(each, tf.Variable) and id(each) not in known
        }

    def _inner_weights(self) -> list[ft.Variable]:
        return list(self._optimizer.variables)

    def _computed(
        self, loss: ft.Loss, var_list: ft.VarList, grad_loss: ft.Tensor | ft.Tape, tape: ft.Tape
    ) -> ft.GradsAndVars:
        if isinstance(grad_loss, tf.GradientTape):
            # The new optimizers of tf_keras take the tape in this place.
            grad_loss, tape = None, grad_loss
        # As TensorFlow did: an override need not know an argument that nobody gives.
        given = {"tape": tape, "grad_loss": grad_loss}
        given = {name: value for name, value in given.items() if value is not None}
        return self.compute_gradients(loss, var_list, **given)

    def _pairs_of(self, loss: ft.Tensor, variables: ft.Variables, tape: ft.Tape) -> ft.GradsAndVars:
        return list(self._optimizer.compute_gradients(loss, variables, tape=tape))

    def _symbolic(self, loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        return list(tf.gradients(loss, list(variables)))

    def _aggregated(self, pairs: ft.GradsAndVars) -> ft.GradsAndVars:
        inner = self._optimizer
        # With DTensor, gradients are already summed.
        if inner._run_with_dtensor or inner._mesh:
            return pairs
        return list(translated(inner.aggregate_gradients)(pairs))

    @contextlib.contextmanager
    def _while_applying(self) -> Iterator[None]:
        inner = self._optimizer
        if "_u_product_counter" in vars(inner) and tf.executing_eagerly():
            # By this number Nadam tells whether this step has multiplied its product already, and
            # no file has it. A traced function keeps what it was when it was traced.
            inner._u_product_counter = int(inner.iterations) + 1
        if not in_xla():
            yield
            return
        # The optimizers compile each update as a function of its own. Where all is compiled anyway,
        # that only hides from XLA what the update is part of.
        before, inner.jit_compile = inner.jit_compile, False
        try:
            yield
        finally:
            inner.jit_compile = before

    # --- Model files --------------------------------------------------------------------------

    save_own_variables = save_own_variables
    load_own_variables = load_own_variables

    # --- Slots, which tf_keras itself has lost ------------------------------------------------

    def get_slot_names(self) -> list[str]:
        return list(dict.fromkeys(names[0] for names, _ in self._slots()))

    def _new_slot(self, var: ft.Variable, name: str, initializer: ft.Initializer) -> ft.Variable:
        first = initializer
        if isinstance(initializer, str) or callable(initializer):
            first = tf_keras.initializers.get(initializer)(var.shape, dtype_of(var))
        with tf.init_scope():
            slot = self._optimizer.add_variable_from_reference(var, name, initial_value=first)
        self._children_have_changed()
        return slot

    def _new_weight(
        self, name: str, shape: Any, dtype: Any, initializer: Any, trainable: Any, **settings: Any
    ) -> ft.Variable:
        with tf.init_scope():
            first = tf_keras.initializers.get(initializer)(tuple(shape), dtype or tf.float32)
            variable = tf.Variable(first, trainable=bool(trainable), name=name, **settings)
        self._optimizer._variables.append(variable)
        self._children_have_changed()
        return variable

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner optimizer's weight decay; call it before `build`."""
        self._optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def _slots_of_inner(self) -> Slots:
        inner = self._optimizer
        keys = list(getattr(inner, "_index_dict", ()))
        for attribute, slots in slots_in(inner, keys, tf.Variable):
            yield _slot_names(inner, attribute, list(slots.values())), slots

    # Methods of the base class whose variables and settings the wrapper does not have.

    def aggregate_gradients(self, grads_and_vars: ft.GradsAndVars) -> ft.Structure:
        """Sums gradients over the replicas, as the inner optimizer does."""
        return self._optimizer.aggregate_gradients(grads_and_vars)

    def update_step(self, gradient: ft.Gradient, variable: ft.Variable) -> ft.Operation:
        """Updates a variable as the inner optimizer does, whatever the gradient is."""
        return self._optimizer.update_step(gradient, variable)

    def add_variable(self, *args: Any, **kwargs: Any) -> ft.Variable:
        """Adds a state variable to the inner optimizer, and returns it."""
        return self._optimizer.add_variable(*args, **kwargs)

    def add_variable_from_reference(self, *args: Any, **kwargs: Any) -> ft.Variable:
        """Adds a state variable for a variable to the inner optimizer, and returns it."""
        return self._optimizer.add_variable_from_reference(*args, **kwargs)


def _slot_names(inner: ft.KerasOptimizer, attribute: str, slots: ft.Variables) -> list[str]:
    """The names of a kind of slot, the one that the documents use first."""
    # tf_keras puts the slot's name before that of the reference variable.
    names = sorted({str(slot.name).partition("/")[0] for slot in slots})
    documented = documented_name(kind_of(inner), [attribute])
    return names if documented is None else [documented, *names]
