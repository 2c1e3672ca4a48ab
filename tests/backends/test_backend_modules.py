"""What is said where Keras computes with something that there is no backend for."""

import keras
import pytest

from lossscale.errors import UnsupportedError
from lossscale.keras import backends


def test_an_unknown_backend_is_named_with_those_that_are_known(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(UnsupportedError, match=r"'numpy'; lossscale supports tensorflow, jax, tor"):
        # Past the cache, which has the backend in use.
        backends.load.__wrapped__()
