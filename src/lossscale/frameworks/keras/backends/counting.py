"""Gradients with respect to variables and to tensors inside a model: a module for each backend.

Each has

- `differentiator(loss_of, variables, fixed, wide=, tapped=)`: a function of a batch and of a loss
  scale that returns a list of `Derived`;
- `count(gradient)` and `on_host(gradient)`: its table of exponents, and its array, on the host;
- `random_state_kept()`: a context that leaves the framework's own random state as it was.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import keras

from lossscale.diagnostics.measurement import NARROW
from lossscale.diagnostics.tapping import Tap
from lossscale.errors import UnsupportedError

_BACKENDS = ("jax", "tensorflow", "torch")

Loss = Callable[[Sequence[tuple[Any, Any]], Any, Tap], Any]
"""Given (variable, value) pairs, a batch and a tap, returns the loss."""


def load() -> Any:
    """Returns the module of Keras' backend."""
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise UnsupportedError(
            f"Keras runs on the backend {backend!r}; gradients can be diagnosed on "
            f"{', '.join(_BACKENDS)}. Set KERAS_BACKEND before importing Keras."
        )
    return importlib.import_module(f"{__package__}.{backend}_counting")


def value_of(variable: Any, wide: bool) -> Any:
    """Returns the value of a Keras variable as a tensor, if `wide` in float32 or wider."""
    narrow = keras.backend.standardize_dtype(variable.dtype) in NARROW
    value = keras.ops.convert_to_tensor(variable.value)
    return keras.ops.cast(value, "float32") if narrow and wide else value
