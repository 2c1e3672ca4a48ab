"""The loss scale optimizer around the new optimizers of tf_keras."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

import lossscale.framework_types as ft
from lossscale.common.private_names import private_name
from lossscale.keras_common.optimizer import Slots, slots_in
from lossscale.old_formats import documented_name, kind_of
from lossscale.tensorflow.tracing import in_xla, translated
from lossscale.tf_keras.classes import CalledAsWritten, of_family
from lossscale.tf_keras.optimizer import LossScaleOptimizer, dtype_of
from lossscale.tf_keras.saving import UNLISTED, LossScaleStore, drop_pending

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
        inner, unlisted = self._optimizer, {}
        trained = [each for group in self._built_groups for each in group]
        listed = [*inner.variables, inner.iterations, *trained]
        seen = {id(variable) for variable in (*listed, inner._learning_rate)}
        for name, variable in _variables_in(vars(inner), UNLISTED.removesuffix(".")):
            if id(variable) not in seen:
                seen.add(id(variable))
                unlisted[name] = variable
        return unlisted

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

    @functools.cached_property
    def loss_scale_state(self) -> LossScaleStore:
        """The place of the loss scale and the counters in files."""
        # Kept: tf_keras skips an object with the id of one that it has visited.
        return LossScaleStore(self._own_values, self._set_loaded_values)

    save_own_variables = LossScaleOptimizer._save_inner
    load_own_variables = LossScaleOptimizer._load_inner

    def _load_now(self) -> None:
        self._load_pending()
        # It is built once, so that they will not fit later.
        self._load_refused = bool(self._built_groups) and self._pending_values is not None
        if self._load_refused:
            drop_pending(self)

    def _is_of_own_class(self, store: ft.Store, values: Sequence[ft.Array]) -> bool:
        """Whether a place in a file is that of an optimizer of tf_keras' own class."""
        # It has no values of loss scaling, and its inner optimizer's variables twice.
        place: ft.Store = getattr(store, "parent", {})
        ours = {"loss_scale_state", "lossscale.loss_scale_state"}
        if "inner_optimizer" not in place or not ours.isdisjoint(place):
            return False
        # The plain optimizer may have an attribute of this name.
        return not hasattr(self._optimizer, "inner_optimizer") or (
            "inner_optimizer" in place["inner_optimizer"]
        )

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


def _variables_in(thing: object, path: str) -> Iterator[tuple[str, ft.Variable]]:
    """Yields the variables in nested containers, by their places."""
    if isinstance(thing, tf.Variable):
        yield path, thing
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _variables_in(value, f"{path}.{key}")
    elif isinstance(thing, (list, tuple)):
        for number, value in enumerate(thing):
            yield from _variables_in(value, f"{path}.{number}")


def _slot_names(inner: ft.KerasOptimizer, attribute: str, slots: ft.Variables) -> list[str]:
    """The names of a kind of slot, the one that the documents use first."""
    # tf_keras puts the slot's name before that of the reference variable.
    names = sorted({str(slot.name).partition("/")[0] for slot in slots})
    documented = documented_name(kind_of(inner), [attribute])
    return names if documented is None else [documented, *names]
