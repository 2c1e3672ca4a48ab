"""TensorFlow: a tape in a `tf.function`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from lossscale.diagnostics.measurement import Counted
from lossscale.frameworks.keras.backends.counting import Loss, wide_value
from lossscale.frameworks.tensorflow import counting


def random_state_kept() -> contextlib.AbstractContextManager[None]:
    """Does nothing: no state outside of the model is drawn from."""
    return contextlib.nullcontext()


def counter(
    loss_of: Loss, variables: Sequence[Any], fixed: Sequence[Any]
) -> Callable[[Any], list[Counted]]:
    """Returns what takes a batch and counts the gradients of the loss on it.

    Args:
        loss_of: Computes the loss.
        variables: The trainable Keras variables.
        fixed: Not used: the function reads the other variables when it runs.
    """
    del fixed
    return counting.counter(
        lambda values, batch, tap: loss_of(list(zip(variables, values, strict=True)), batch, tap),
        lambda: [wide_value(variable) for variable in variables],
        # Layers of Keras 3 choose with keras.ops, and Keras does not translate them either.
        autograph=False,
    )
