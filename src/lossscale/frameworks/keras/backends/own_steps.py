"""A model's own `train_step`, run for what it gives to its optimizers: a module for each backend.

Each has `runner(step, new_recorder, model, optimizers, eager=, helped=)`, which returns a function
of data and of a loss scale that returns a list of `Derived` and the recorder. `step(recorder, ...)`
runs the `train_step` with the recorder in the places of the optimizers, and
`new_recorder(scale, values)` makes one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import keras


def load() -> Any:
    """Returns the module of Keras' backend."""
    return importlib.import_module(f"{__package__}.{keras.backend.backend()}_own_steps")


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
