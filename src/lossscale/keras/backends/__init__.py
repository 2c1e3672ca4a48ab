"""What differs between the backends of Keras 3: one module each, as `contract` describes it."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import keras

from lossscale.errors import UnsupportedError
from lossscale.keras.backends.contract import Backend
from lossscale.packages import BACKENDS

if TYPE_CHECKING:
    from lossscale.keras.backends import jax, tensorflow, torch

    _JAX: Backend = jax
    _TENSORFLOW: Backend = tensorflow
    _TORCH: Backend = torch


# Cached also because AutoGraph, in a function that is being traced, cannot translate an import.
@functools.cache
def load() -> Backend:
    """Returns the module of Keras' backend."""
    backend: Backend = module_for()
    return backend


def module_for(purpose: str = "") -> Any:
    """Returns a module of Keras' backend.

    Args:
        purpose: What it is for besides steps: "counting" or "own_steps".
    """
    name = keras.backend.backend()
    if name not in BACKENDS:
        raise UnsupportedError(
            f"Keras runs on the backend {name!r}; lossscale supports {', '.join(BACKENDS)}. "
            "Set the environment variable KERAS_BACKEND before importing Keras."
        )
    return importlib.import_module(f"{__name__}.{name}{purpose and f'_{purpose}'}")
