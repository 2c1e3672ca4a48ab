"""The examples in the docstrings of the JAX modules; and that none of this needs Keras."""

import importlib
import pkgutil
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import lossscale.jax
import lossscale.optax
from pages import examples_tried

MODULES = [
    found.name
    for package in (lossscale.jax, lossscale.optax)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "jax": jax, "jnp": jnp, "optax": optax, "lossscale": lossscale}
    examples_tried(module, names)


def test_every_public_function_has_an_example():
    public = [getattr(lossscale.optax, name) for name in lossscale.optax.__all__]
    assert [f for f in public if not isinstance(f, type) and ">>>" not in f.__doc__] == []


def test_nothing_here_imports_keras():
    """Of all tests of this folder, which run in one process."""
    assert {name.partition(".")[0] for name in sys.modules} & {"keras", "tf_keras"} == set()
