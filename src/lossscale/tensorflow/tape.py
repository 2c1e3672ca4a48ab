"""Losses recorded by a gradient tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lossscale.common.checks import scaled_value
from lossscale.common.private_names import do_not_convert
from lossscale.errors import GradientsError
from lossscale.tensorflow.tracing import translated


@do_not_convert
def recorded(
    loss: Any, variables: Any, scale: Callable[[Any], Any], *, tape: Any = None, watch: Any = ()
) -> tuple[Any, Any, Any]:
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


def check_symbolic(loss: Any) -> None:
    """Checks that a tensor has a graph to differentiate.

    Raises:
        GradientsError: In eager mode, where it has none.
    """
    if tf.executing_eagerly():
        raise GradientsError(
            "The gradient of a tensor can be computed only inside a tf.function or a graph. Pass "
            "`loss` as a callable without arguments, or use a tf.GradientTape with "
            f"get_scaled_loss() and get_unscaled_gradients(). Received: loss={loss!r}."
        )
