"""The backends of Keras 3: a file for each, with a subclass of `Backend`."""

from __future__ import annotations

import functools
import importlib

import keras

from lossscale.errors import UnsupportedError
from lossscale.keras.backends.backend import Backend
from lossscale.packages import BACKENDS


# Cached also because AutoGraph, in a function that is being traced, cannot translate an import.
@functools.cache
def load() -> Backend:
    """Returns the `Backend` that Keras runs on."""
    name = keras.backend.backend()
    if name not in BACKENDS:
        raise UnsupportedError(
            f"Keras runs on the backend {name!r}; lossscale supports {', '.join(BACKENDS)}. "
            "Set the environment variable KERAS_BACKEND before importing Keras."
        )
    backend: Backend = importlib.import_module(f"{__name__}.{name}").BACKEND
    return backend
