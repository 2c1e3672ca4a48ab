"""Keras on TensorFlow and tf_keras alike: functions of arrays, gradients of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lossscale.common.arrays import Arrays
from lossscale.common.gradient_arguments import scaled_value
from lossscale.common.private_names import do_not_convert
from lossscale.errors import GradientsError
from lossscale.framework_types import Loss, Operation, Scalar, Structure, Tensor, Variable
from lossscale.tensorflow import overflow_check, replicas, scaling
from lossscale.tensorflow.apply_or_skip import apply_or_skip, run_guarded, trace_call
from lossscale.tensorflow.overflow_tracker import OverflowTracker
from lossscale.tensorflow.replicas import native
from lossscale.tensorflow.tracing import translated


def _assign(variable: Variable, value: Scalar) -> Operation:
    # Keras' own way takes several times as long in eager mode.
    target = native(variable)
    value = tf.cast(value, target.dtype) if tf.is_tensor(value) else value
    if tf.executing_eagerly():
        # Keras' tests put a function of the value alone in the place of this method.
        return target.assign(value)
    return target.assign(value, read_value=False)


def _add(variable: Variable, value: Scalar) -> Operation:
    target = native(variable)
    return target.assign_add(tf.cast(value, target.dtype), read_value=False)


def _is_eager() -> bool:
    return tf.executing_eagerly() and not tf.distribute.has_strategy()


def _host_reader() -> Callable[[Variable], Any] | None:
    # With tensors a step of one variable takes 1.3 times as long, one of ten 1.08.
    return (lambda variable: native(variable).numpy().item()) if _is_eager() else None


ARRAYS = Arrays(
    scaled=scaling.scaled,
    unscaled=scaling.unscaled,
    all_finite=overflow_check.all_finite,
    flat_gradients=scaling.flat_gradients,
    read=lambda variable: tf.convert_to_tensor(native(variable)),
    assign=_assign,
    add=_add,
    is_on_host=replicas.is_on_host,
    branch=apply_or_skip,
    run_guarded=run_guarded,
    trace_call=trace_call,
    new_overflow_tracker=OverflowTracker,
    on_all_replicas=replicas.all_replicas_finite,
    runs_now=lambda gradients: _is_eager(),
    host_reader=_host_reader,
    location=replicas.current_location,
    replica_count=replicas.replica_count,
    check_context=replicas.check_replica_context,
)


@do_not_convert
def recorded(
    loss: Loss,
    variables: Structure | Callable[[], Structure],
    scale: Callable[[Loss], Loss],
    *,
    tape: tf.GradientTape | None = None,
    watch: Sequence[Variable] = (),
) -> tuple[tf.GradientTape, Tensor, Structure]:
    """Runs a loss under a tape and scales it there.

    Args:
        loss: A callable without arguments, or with `tape` a tensor that the tape recorded.
        variables: A list, one variable, a callable that returns either, or None.
        scale: Multiplies a loss by the loss scale; for a callable, its result.
        tape: A `tf.GradientTape`; None creates a new one.
        watch: Variables to record although they are not trainable.

    Returns:
        The tape; the scaled loss, a tensor; what is differentiated, in the form it was given in, or
        the trainable variables that the tape watched.

    Raises:
        GradientsError: If `loss` is a tensor without a tape.
    """
    if not callable(loss) and tape is None:
        raise GradientsError(
            "`loss` must be a callable without arguments; a tensor has no gradients unless the "
            f"tape that recorded it is passed as `tape`. Received: loss={loss!r}."
        )
    with tape if tape is not None else tf.GradientTape() as recording:
        if callable(loss):
            recording.watch(watch)
        scaled_loss = scaled_value(translated(loss) if callable(loss) else loss, translated(scale))
    if callable(variables):
        variables = translated(variables)()
    if variables is None:
        variables = [v for v in recording.watched_variables() if v.trainable]
    return recording, scaled_loss, variables
