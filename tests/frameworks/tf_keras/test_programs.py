"""Old programs run unedited on Keras 2, and the examples in docstrings."""

import doctest
import importlib
import pkgutil

import pytest
import tensorflow as tf
import tf_keras

import autographs
import lossscale
import lossscale.tf_keras
import old_programs

PACKAGE = lossscale.tf_keras
MODULES = [found.name for found in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")]
WITH_EXAMPLES = {f"{PACKAGE.__name__}.optimizer"}


@old_programs.every_program
def test_an_old_program_learns(name, caplog, capsys, monkeypatch, two_replicas):
    old_programs.on_two_replicas(monkeypatch, two_replicas)
    old_programs.run(name, caplog, capsys)


def test_only_the_users_functions_are_translated(optimizers):
    autographs.assert_only_the_users_functions_are_translated(optimizers)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "tf_keras": tf_keras, "tf": tf, "lossscale": lossscale}
    failed, tried = doctest.testmod(module, globs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
    assert (tried > 0) == (name in WITH_EXAMPLES)
