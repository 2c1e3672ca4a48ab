"""TensorFlow: in a `tf.function`, whose variables are put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lossscale.diagnostics.measurement import Derived
from lossscale.keras.backends.own_steps import state_of
from lossscale.tensorflow import own_steps
from lossscale.tensorflow.draws import repeatable_draws


def runner(
    step: Callable[..., Any],
    new_recorder: Callable[..., Any],
    model: Any,
    optimizers: Sequence[Any],
    *,
    eager: bool,
    helped: bool,
) -> Callable[[Any, float], tuple[list[Derived], Any]]:
    """Returns what takes data and a scale, and gives the gradients that a step is taken with.

    Args:
        step: Runs the `train_step` with a recorder, on data.
        new_recorder: Makes a recorder for a scale.
        model: The model.
        optimizers: Its optimizers.
        eager: Whether the model is trained eagerly.
        helped: Whether to scale the loss of a step that does not do so itself.
    """
    compiled = own_steps.runner(
        step,
        new_recorder,
        list(model.trainable_variables),
        lambda: [variable.value for variable in state_of(model, optimizers)],
        # Keras 3 does not translate a step either.
        autograph=False,
        eager=eager,
        helped=helped,
    )

    def run(data: Any, scale: float) -> tuple[list[Derived], Any]:
        with repeatable_draws():
            return compiled(data, scale)

    return run
