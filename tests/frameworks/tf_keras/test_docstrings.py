"""The examples in the docstrings of the tf_keras shells."""

import doctest
import importlib
import pkgutil

import pytest
import tensorflow as tf
import tf_keras

import lossscale
import lossscale.tf_keras

PACKAGE = lossscale.tf_keras
MODULES = [found.name for found in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")]
WITH_EXAMPLES = {f"{PACKAGE.__name__}.{name}" for name in ("monitor", "optimizer")}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "tf_keras": tf_keras, "tf": tf, "lossscale": lossscale}
    failed, tried = doctest.testmod(module, globs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
    assert (tried > 0) == (name in WITH_EXAMPLES)
