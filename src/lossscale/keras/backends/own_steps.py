"""A model's own `train_step`, run for what it gives to its optimizers: a module each backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras

from lossscale.diagnostics.measurement import Derived
from lossscale.keras import backends


class OwnSteps(Protocol):
    """What it takes of a backend of Keras to run a `train_step`: each is a module with this."""

    def runner(
        self,
        step: Callable[..., Any],
        new_recorder: Callable[..., Any],
        model: Any,
        optimizers: Sequence[Any],
        *,
        eager: bool,
        helped: bool,
    ) -> Callable[[Any, float], tuple[list[Derived], Any]]:
        """Returns what takes data and a scale, and gives the gradients and the recorder.

        Args:
            step: Runs the `train_step` with a recorder in the places of the optimizers.
            new_recorder: Makes a recorder for a scale, and on JAX the values of the variables.
            model: The model.
            optimizers: Its optimizers.
            eager: Whether the model is trained eagerly.
            helped: Whether to scale the loss of a step that does not do so itself.
        """


if TYPE_CHECKING:
    from lossscale.keras.backends import (
        jax_own_steps,
        tensorflow_own_steps,
        torch_own_steps,
    )

    _JAX: OwnSteps = jax_own_steps
    _TENSORFLOW: OwnSteps = tensorflow_own_steps
    _TORCH: OwnSteps = torch_own_steps


def load() -> OwnSteps:
    """Returns the module of Keras' backend."""
    module: OwnSteps = backends.module_for("own_steps")
    return module


def state_of(model: Any, optimizers: Iterable[Any]) -> list[Any]:
    """Returns the Keras variables that a step without optimizers may assign to, each once.

    Args:
        model: The model.
        optimizers: Its optimizers, of which a step may set the counter and the learning rate.
    """
    settings = [each for one in optimizers for each in one.variables if not len(each.shape)]
    # A model may list fewer metrics than it has.
    metrics = [
        variable
        for layer in model._flatten_layers()
        for value in vars(layer).values()
        if isinstance(value, keras.metrics.Metric)
        for variable in value.variables
    ]
    found = [*model.variables, *model.metrics_variables, *metrics, *settings]
    return list({id(variable): variable for variable in found}.values())


def dtype_of(variable: Any) -> str:
    """The name of the dtype of a Keras variable."""
    return str(keras.backend.standardize_dtype(variable.dtype))
