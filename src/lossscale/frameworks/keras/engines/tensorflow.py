"""TensorFlow: eager, `tf.function`, XLA, and replicas of a `tf.distribute` strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from lossscale.errors import GradientsError
from lossscale.frameworks.keras.engines.common import Place, aggregation_name, flat_list

__all__ = ["aggregation_name"]


def current_place() -> Place:
    """The graph being traced, None in eager mode, and the replica; all of them outside of one."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    replica = tf.distribute.get_replica_context()
    if replica is None:
        return Place(graph, tuple(range(replica_count())))
    # A TPU traces all replicas at once: there the number is known only when the function runs.
    number = tf.get_static_value(replica.replica_id_in_sync_group)
    return Place(graph, (0 if number is None else int(number),))


def outside_traces() -> contextlib.AbstractContextManager[None]:
    """Within it variables are set now and once, also where a function is being traced."""
    context: contextlib.AbstractContextManager[None] = tf.init_scope()
    return context


def is_variable(value: Any) -> bool:
    """Whether a gradient can be applied to `value`."""
    return isinstance(value, (tf.Variable, keras.Variable))


def native(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def read(variable: Any) -> Any:
    """The value of a Keras variable now, as a tensor."""
    return tf.convert_to_tensor(variable.value)


def unscaled(gradient: Any, scale: Any, exact_reciprocal: bool) -> Any:
    """Divides a gradient by the scale, in float32 or wider.

    Args:
        gradient: Tensor or `tf.IndexedSlices` of any dtype; slices stay slices.
        scale: float32 scalar tensor, or a Python float.
        exact_reciprocal: Whether multiplying by the reciprocal is exact. It is for powers of
            two; others are divided by.
    """
    if isinstance(gradient, tf.IndexedSlices):
        values = unscaled(gradient.values, scale, exact_reciprocal)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    gradient = _widened(gradient)
    divisor = tf.cast(scale, gradient.dtype)
    if exact_reciprocal:
        return gradient * tf.math.reciprocal(divisor)
    return gradient / divisor


def scaled(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the scale, in float32 or wider."""
    loss = _widened(tf.convert_to_tensor(loss))
    return loss * tf.cast(scale, loss.dtype)


def _widened(tensor: Any) -> Any:
    tensor = tf.convert_to_tensor(tensor)
    wide = tensor.dtype in (tf.float32, tf.float64) or tensor.dtype.is_complex
    return tensor if wide else tf.cast(tensor, tf.float32)


def all_finite(gradients: Sequence[Any]) -> Any:
    """Whether every element of every gradient is finite: a boolean scalar tensor.

    Args:
        gradients: Tensors, `tf.IndexedSlices` (their values are looked at) or None (skipped).
    """
    checks = [
        tf.reduce_all(tf.math.is_finite(part))
        for gradient in gradients
        if gradient is not None
        for part in _float_parts(gradient)
    ]
    return tf.reduce_all(tf.stack(checks)) if checks else tf.constant(True)


def _float_parts(gradient: Any) -> list[Any]:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    values = tf.convert_to_tensor(values)
    if values.dtype.is_complex:
        return [tf.math.real(values), tf.math.imag(values)]
    return [values] if values.dtype.is_floating else []


def flat_gradients(gradients: Any) -> list[Any]:
    """The gradients in a nest, of all replicas where it holds values per replica, without None."""
    return [
        gradient
        for value in tf.nest.flatten(gradients)
        for gradient in tf.distribute.get_strategy().experimental_local_results(value)
        if gradient is not None
    ]


def replica_count() -> int:
    """How many replicas train together; 1 without a strategy."""
    count: int = tf.distribute.get_strategy().num_replicas_in_sync
    return count


def run_step(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], aggregate: bool
) -> None:
    """Applies unscaled gradients or skips the step, on all replicas alike.

    Args:
        optimizer: The loss scale optimizer, built.
        gradients: Unscaled gradients of this replica; None where there is none.
        variables: Their variables.
        aggregate: Whether the inner optimizer sums the gradients of the replicas.
    """
    if tf.distribute.in_cross_replica_context():
        raise GradientsError(
            "Gradients must be applied in a replica context. Received a call in a cross-replica "
            "context. Call it inside the function that is given to strategy.run()."
        )
    finite = optimizer._judge(gradients)
    replica = tf.distribute.get_replica_context()
    if finite is not True and replica.num_replicas_in_sync > 1:
        # Keras sums the gradients of the replicas inside the inner optimizer, after this point,
        # so one replica does not see the overflow of another.
        overflowed = tf.where(finite, 0.0, 1.0)
        finite = replica.all_reduce(tf.distribute.ReduceOp.SUM, overflowed) < 0.5

    def apply_inner(gradients: Sequence[Any]) -> None:
        with _summing(optimizer.inner_optimizer, aggregate):
            optimizer.inner_optimizer.apply(list(gradients), list(variables))

    if (
        not tf.distribute.has_strategy()
        or tf.__internal__.distribute.strategy_supports_no_merge_call()
    ):
        _apply_if(finite, lambda: apply_inner(gradients))
        optimizer._move_scale(finite)
        return

    def in_cross_replica(strategy: Any, finite: Any, gradients: Sequence[Any]) -> None:
        if finite is not True:
            # All replicas hold the same verdict by now.
            finite = strategy.experimental_local_results(finite)[0]
        # The condition must stand outside the replicas: inside one of its branches they could
        # not meet to sum their gradients.
        _apply_if(
            finite,
            lambda: strategy.extended.call_for_each_replica(apply_inner, args=(gradients,)),
        )
        optimizer._move_scale(finite)

    replica.merge_call(in_cross_replica, args=(finite, list(gradients)))


def _apply_if(finite: Any, apply: Callable[[], Any]) -> None:
    if finite is True:
        apply()
        return

    def applied() -> Any:
        apply()
        return tf.constant(True)

    tf.cond(finite, applied, lambda: tf.constant(False))


@contextlib.contextmanager
def _summing(inner_optimizer: Any, aggregate: bool) -> Iterator[None]:
    """Within it the inner optimizer sums the gradients of all replicas, or does not."""
    if aggregate:
        yield
        return
    # Keras 3 has no argument for this; the sum is one method, here replaced on the instance.
    parts = [inner_optimizer, *getattr(inner_optimizer, "optimizers", ())]
    for part in parts:
        part.__dict__["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        for part in parts:
            part.__dict__.pop("_all_reduce_sum_gradients", None)


def differentiate(
    loss: Any,
    variables: Any,
    scale: Callable[[Any], Any],
    *,
    tape: Any = None,
    grad_loss: Any = None,
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of a scaled loss, and the variables they belong to.

    Args:
        loss: A callable without arguments, or with `tape` a tensor that the tape recorded.
        variables: A list, one variable, a callable that returns either, or None for the
            trainable variables that the tape watched.
        scale: Multiplies a loss by the loss scale.
        tape: A `tf.GradientTape`; None records `loss` on a new one.
        grad_loss: Tensor of the loss's shape that multiplies the gradients, or None.
    """
    if not callable(loss) and tape is None:
        raise GradientsError(
            "`loss` must be a callable without arguments; a tensor has no gradients unless the "
            f"tape that recorded it is passed as `tape`. Received: loss={loss!r}."
        )
    with tape if tape is not None else tf.GradientTape() as recording:
        value = loss() if callable(loss) else loss
        scaled_loss = scale(value)
    if callable(variables):
        variables = variables()
    if variables is None:
        variables = [v for v in recording.watched_variables() if v.trainable]
    variables = flat_variables(variables)
    if grad_loss is not None:
        # Given for the loss, which may be narrower than what it became when it was scaled.
        grad_loss = tf.cast(grad_loss, scaled_loss.dtype)
    gradients = recording.gradient(
        scaled_loss, [native(v) for v in variables], output_gradients=grad_loss
    )
    return list(gradients), variables


def symbolic_gradients(loss: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a tensor of the graph that is being traced.

    Raises:
        GradientsError: In eager mode, where a tensor does not know how it was computed.
    """
    if tf.executing_eagerly():
        raise GradientsError(
            "The gradient of a tensor can be computed only inside a tf.function. Pass `loss` as "
            "a callable without arguments, or use a tf.GradientTape with get_scaled_loss() and "
            "get_unscaled_gradients()."
        )
    gradients: list[Any] = tf.gradients(loss, [native(v) for v in variables])
    return gradients


def flat_variables(variables: Any) -> list[Any]:
    """Returns a list of variables from one variable or a nest of them."""
    return flat_list(variables, tf.nest.flatten, is_variable)
