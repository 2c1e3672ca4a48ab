"""TensorFlow: eager, `tf.function`, XLA, and replicas of a `tf.distribute` strategy."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

import lossscale.framework_types as ft
from lossscale.common.private_names import check_attribute, do_not_convert
from lossscale.keras.backends import Backend
from lossscale.keras_common.step import Step
from lossscale.members import Wrapper
from lossscale.rules import ScaleState, changed_fields
from lossscale.tensorflow import replicas
from lossscale.tensorflow.operations import TensorFlowOperations, recorded
from lossscale.tensorflow.tracing import translated, where


def _where(condition: ft.Tensor, one: ft.Scalar, other: ft.Scalar) -> ft.Tensor:
    dtype = keras.backend.result_type(*(getattr(v, "dtype", type(v)) for v in (one, other)))
    return where(tf.cast(condition, tf.bool), tf.cast(one, dtype), tf.cast(other, dtype))


class TensorFlowBackend(TensorFlowOperations, Backend):
    """The computations of Keras on TensorFlow."""

    # TensorFlow's own functions do not mix integer dtypes, as the rules of users may.
    namespace = types.SimpleNamespace(**{**vars(keras.ops), "where": _where})
    check_strategy = staticmethod(replicas.check_strategy)
    translated = staticmethod(translated)
    calls_apply_gradients = True

    # --- One step -----------------------------------------------------------------------------

    def variables_written(self, optimizer: Wrapper, step: Step) -> list[ft.Variable]:
        """The variables that the inner optimizer may change in a step."""
        inner = optimizer.inner_optimizer
        everything = (*inner.variables, *inner._trainable_variables, *step.variables)
        return [_native(variable) for variable in everything]

    def applying(self, inner: ft.KerasOptimizer, aggregate: bool) -> AbstractContextManager[None]:
        """A context in which the inner optimizer sums the gradients of replicas or does not."""
        return nullcontext() if aggregate else _not_summing(inner)

    def update_on_host(
        self, optimizer: Wrapper, finite: ft.Scalar, state_on_host: ScaleState | None
    ) -> bool:
        """Updates the loss scale and the counters in eager mode."""
        # With tensors a step of one variable takes 1.3 times as long, one of ten 1.08.
        state = optimizer._state
        if not self.runs_now(()) or not state.rule.exact_on_host:
            return False
        updates = changed_fields(state.rule, state.read_by(_number), bool(finite))
        written = [(state.variables[field], value) for field, value in updates.items()]
        if state.rule.checks_gradients:
            written.append((optimizer._last_step_skipped, not finite))
            if not finite:
                written.append((optimizer._steps_skipped, _number(optimizer._steps_skipped) + 1))
        for variable, value in written:
            # Keras' own way takes several times as long.
            variable.value.assign(value)
        return True

    # --- Variables and arrays -----------------------------------------------------------------

    def is_variable(self, value: object) -> bool:
        """Whether a value is a variable."""
        return isinstance(value, (tf.Variable, keras.Variable))

    def read(self, variable: ft.Variable) -> ft.Tensor:
        """The value of a Keras variable now, as a tensor."""
        return tf.convert_to_tensor(variable.value)

    def is_on_host(self, variable: ft.Variable) -> bool:
        """Whether nothing waits to read a variable."""
        return replicas.is_on_host(variable.value)

    def cast(self, gradient: ft.Gradient, dtype: str) -> ft.Gradient:
        """Returns a gradient, dense or sparse, in another dtype."""
        return tf.cast(gradient, dtype)

    # --- Gradients of a loss ------------------------------------------------------------------

    @do_not_convert
    def differentiate(
        self, loss: ft.Loss, var_list: ft.VarList, scale: ft.Function, tape: ft.Tape, grad_loss: Any
    ) -> tuple[list[ft.Gradient], list[ft.Variable]]:
        """Returns the gradients of a scaled loss, and the variables they belong to."""
        tape, scaled_loss, variables = recorded(loss, var_list, scale, tape=tape)
        variables = self.flat_variables(variables)
        if grad_loss is not None:
            # Given for the loss, which may be narrower than what it became when it was scaled.
            grad_loss = tf.cast(grad_loss, scaled_loss.dtype)
        gradients = tape.gradient(
            scaled_loss, [_native(v) for v in variables], output_gradients=grad_loss
        )
        return list(gradients), variables

    def symbolic_gradients(self, loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        """Returns the gradients of a tensor of the graph that is being traced."""
        return list(tf.gradients(loss, [_native(v) for v in variables]))


def _native(variable: ft.Variable) -> ft.Variable:
    """The TensorFlow variable behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _number(variable: ft.Variable) -> ft.Scalar:
    """The value of a scalar Keras variable as a Python number; in eager mode."""
    return variable.value.numpy().item()


@contextmanager
def _not_summing(inner_optimizer: ft.KerasOptimizer) -> Iterator[None]:
    """A context in which the inner optimizer does not sum gradients over the replicas."""
    # Keras 3 has no argument for this, so the method that sums is replaced on the instance.
    parts = [inner_optimizer, *getattr(inner_optimizer, "optimizers", ())]
    for part in parts:
        # If the method were missing, gradients would be summed twice without an error.
        check_attribute(
            "keras",
            part,
            "_all_reduce_sum_gradients",
            "apply gradients that are summed over the replicas already",
        )
        part.__dict__["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        for part in parts:
            part.__dict__.pop("_all_reduce_sum_gradients", None)


BACKEND = TensorFlowBackend()
