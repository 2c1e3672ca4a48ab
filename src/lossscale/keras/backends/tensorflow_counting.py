"""TensorFlow: a tape in a `tf.function`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from lossscale.diagnostics.measurement import Derived
from lossscale.keras.backends.counting import Loss, value_of
from lossscale.tensorflow import counting
from lossscale.tensorflow.counting import count as count
from lossscale.tensorflow.counting import on_host as on_host
from lossscale.tensorflow.draws import repeatable_draws


def random_state_kept() -> contextlib.AbstractContextManager[None]:
    """Does nothing: no state outside of the model is drawn from."""
    return contextlib.nullcontext()


def differentiator(
    loss_of: Loss, variables: Sequence[Any], fixed: Sequence[Any], *, wide: bool, tapped: bool
) -> Callable[[Any, float], list[Derived]]:
    """Returns what takes a batch and a scale, and gives the gradients of the scaled loss.

    Args:
        loss_of: Computes the loss.
        variables: The trainable Keras variables.
        fixed: Not used: the function reads the other variables when it runs.
        wide: Whether to widen the values of variables in 16 bits to float32.
        tapped: Whether to derive by the tensors that are tapped as well.
    """
    del fixed
    compiled = counting.differentiator(
        lambda values, batch, tap: loss_of(list(zip(variables, values, strict=True)), batch, tap),
        lambda: [value_of(variable, wide) for variable in variables],
        # Layers of Keras 3 choose with keras.ops, and Keras does not translate them either.
        autograph=False,
        tapped=tapped,
    )

    def derive(batch: Any, scale: float) -> list[Derived]:
        with repeatable_draws():
            return compiled(batch, scale)

    return derive
