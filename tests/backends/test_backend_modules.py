"""What is said where Keras computes with something that there is no backend for."""

import keras
import pytest

from lossscale.errors import UnsupportedError
from lossscale.keras import backends
from lossscale.keras.backends import counting, own_steps


@pytest.mark.parametrize(
    "load",
    # Past the cache, which has the backend in use.
    [backends.load.__wrapped__, counting.load, own_steps.load],
    ids=["steps", "counting", "own steps"],
)
def test_an_unknown_backend_is_named_with_those_that_are_known(load, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(UnsupportedError, match=r"'numpy'; lossscale supports tensorflow, jax, tor"):
        load()


def test_each_module_is_of_the_backend_in_use():
    name = keras.backend.backend()
    found = [type(backends.load()).__module__]
    found += [module.load().__name__ for module in (counting, own_steps)]
    assert [each.rpartition(".")[2] for each in found] == [
        name,
        f"{name}_counting",
        f"{name}_own_steps",
    ]
