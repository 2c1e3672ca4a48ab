"""TensorFlow: eager, `tf.function`, XLA, and replicas of a `tf.distribute` strategy."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

import lossscale.framework_types as ft
from lossscale.common.gradient_arguments import flat_list
from lossscale.common.private_names import check_attribute, do_not_convert
from lossscale.keras.backends import Backend, accumulable
from lossscale.keras_common.step import Step
from lossscale.tensorflow.arrays import ARRAYS, recorded
from lossscale.tensorflow.replicas import check_strategy, native
from lossscale.tensorflow.tracing import translated, where


def _where(condition: ft.Tensor, one: ft.Scalar, other: ft.Scalar) -> ft.Tensor:
    dtype = keras.backend.result_type(*(getattr(v, "dtype", type(v)) for v in (one, other)))
    return where(tf.cast(condition, tf.bool), tf.cast(one, dtype), tf.cast(other, dtype))


def _is_variable(value: object) -> bool:
    return isinstance(value, (tf.Variable, keras.Variable))


@do_not_convert
def _flat_variables(variables: ft.Structure) -> list[ft.Variable]:
    return flat_list(variables, tf.nest.flatten, _is_variable)


def _apply(inner: ft.KerasOptimizer, step: Step) -> None:
    gradients = accumulable(inner, step)
    with nullcontext() if step.aggregate else _not_summing(inner):
        # Keras' trainer calls `apply_gradients` here, so that this is what people override.
        if type(inner).apply_gradients is keras.optimizers.Optimizer.apply_gradients:
            translated(inner.apply)(gradients, step.variables)
        else:
            pairs = list(zip(gradients, step.variables, strict=True))
            translated(inner.apply_gradients)(pairs)


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


@do_not_convert
def _differentiate(
    loss: ft.Loss, var_list: ft.VarList, scale: ft.Function, tape: ft.Tape, grad_loss: Any
) -> tuple[list[ft.Gradient], list[ft.Variable]]:
    tape, scaled_loss, variables = recorded(loss, var_list, scale, tape=tape)
    variables = _flat_variables(variables)
    if grad_loss is not None:
        # Given for the loss, which may be narrower than what it became when it was scaled.
        grad_loss = tf.cast(grad_loss, scaled_loss.dtype)
    natives = [native(variable) for variable in variables]
    return list(tape.gradient(scaled_loss, natives, output_gradients=grad_loss)), variables


def _symbolic_gradients(loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
    return list(tf.gradients(loss, [native(variable) for variable in variables]))


BACKEND = Backend(
    arrays=ARRAYS,
    # TensorFlow's own functions do not mix integer dtypes, as the rules of users may.
    namespace=types.SimpleNamespace(**{**vars(keras.ops), "where": _where}),
    is_variable=_is_variable,
    flat_variables=_flat_variables,
    differentiate=_differentiate,
    symbolic_gradients=_symbolic_gradients,
    apply=_apply,
    check_strategy=check_strategy,
)
