"""What loss scaling needs of a Keras backend: one module per backend, all with these names.

- `check_strategy()`: refuses a distribution under which loss scaling does not work.
- `current_place()`: the graph being traced and the replica.
- `outside_traces()`: a context in which variables are set now and once.
- `read(variable)`: its value now, as a tensor that does not change with it.
- `namespace`: the module of array functions for `ScaleRule.update`.
- `known(verdict)`: a verdict as a bool where it is known before the step runs, else None.
- `all_finite(gradients, scale, exact_reciprocal)`: a boolean scalar tensor.
- `unscaled(gradients, scale, exact_reciprocal)`: float32 or wider; sparse stays sparse.
- `cast(gradient, dtype)`: a gradient, dense or sparse, in another dtype (not on PyTorch).
- `run_step(optimizer, gradients, variables, scale, aggregate)`: unscales and checks, applies or
  skips, moves the scale.
- `new_watch(histograms_every, new_variable)`: notes steps for a monitor.
- `differentiate(...)`: gradients of a callable loss.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import keras

from lossscale.errors import UnsupportedError

_ENGINES = {
    "jax": "lossscale.frameworks.keras.engines.jax",
    "tensorflow": "lossscale.frameworks.keras.engines.tensorflow",
    "torch": "lossscale.frameworks.keras.engines.torch",
}


# Cached also because AutoGraph, in a function that is being traced, cannot translate an import.
@functools.cache
def load() -> Any:
    """Returns the engine of Keras' backend."""
    backend = keras.backend.backend()
    if backend not in _ENGINES:
        raise UnsupportedError(
            f"Keras runs on the backend {backend!r}; lossscale supports {sorted(_ENGINES)}. "
            "Set the environment variable KERAS_BACKEND before importing Keras."
        )
    return importlib.import_module(_ENGINES[backend])
