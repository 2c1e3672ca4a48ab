"""Keras on TensorFlow and tf_keras alike: operations of a step, gradients of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from lossscale.common.gradient_arguments import flat_list, scaled_value
from lossscale.common.private_names import do_not_convert
from lossscale.errors import GradientsError, UnsupportedError
from lossscale.framework_types import Gradient, Loss, Structure, Tensor, Variable
from lossscale.tensorflow import overflow_check, replicas, scaling
from lossscale.tensorflow.apply_or_skip import apply_or_skip, run_guarded, trace_call
from lossscale.tensorflow.tracing import translated

if TYPE_CHECKING:
    from lossscale.tensorflow.overflow_tracker import OverflowTracker


class TensorFlowOperations:
    """Operations of a step on TensorFlow's tensors, for a subclass of `StepOperations`."""

    scaled = staticmethod(scaling.scaled)
    unscaled = staticmethod(scaling.unscaled)
    all_finite = staticmethod(overflow_check.all_finite)
    flat_gradients = staticmethod(scaling.flat_gradients)
    current_location = staticmethod(replicas.current_location)
    replica_count = staticmethod(replicas.replica_count)
    all_replicas_finite = staticmethod(replicas.all_replicas_finite)
    apply_or_skip = staticmethod(apply_or_skip)
    run_guarded = staticmethod(run_guarded)
    trace_call = staticmethod(trace_call)
    eager_scope = staticmethod(tf.init_scope)
    # Defined by a subclass: whether a value is a variable; the variables that the inner optimizer
    # may change, given the loss scale optimizer and the step.
    is_variable: Callable[[object], bool]
    variables_written: Callable[..., list[Variable]]

    @staticmethod
    def new_overflow_tracker() -> OverflowTracker:
        """Returns what tracks overflows for a monitor."""
        if not tf.executing_eagerly():
            raise UnsupportedError(
                "LossScaleMonitor does not work in graphs of TensorFlow 1. Leave out "
                "tf.compat.v1.disable_eager_execution(), or the monitor."
            )
        from lossscale.tensorflow.overflow_tracker import OverflowTracker

        return OverflowTracker()

    def check_context(self) -> None:
        """Raises under a strategy that does not work, and between the replicas of one."""
        # An optimizer is often made outside the strategy that it is used under.
        replicas.check_strategy()
        replicas.check_replica_context()

    def runs_now(self, gradients: Sequence[Gradient]) -> bool:
        """Whether the step is taken eagerly, by one replica."""
        return tf.executing_eagerly() and not tf.distribute.has_strategy()

    @do_not_convert
    def flat_variables(self, variables: Structure) -> list[Variable]:
        """Returns a list of variables from one variable or a nest of them."""
        return flat_list(variables, tf.nest.flatten, self.is_variable)


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
