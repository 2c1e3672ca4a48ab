"""The examples in the docstrings of the Keras shell, on the TensorFlow backend."""

import doctest
import importlib
import pkgutil

import keras
import pytest
import tensorflow as tf

import lossscale
import lossscale.keras

MODULES = ["lossscale.keras"] + [
    found.name
    for found in pkgutil.walk_packages(lossscale.keras.__path__, "lossscale.keras.")
    # A backend needs its own backend.
    if ".backends." not in found.name
]
# That of the wrapper is found where its class says that it is.
WITH_EXAMPLES = {"lossscale.keras", "lossscale.keras.arguments", "lossscale.keras.monitor"}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "keras": keras, "tf": tf, "lossscale": lossscale}
    failed, tried = doctest.testmod(module, globs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
    assert (tried > 0) == (name in WITH_EXAMPLES)
