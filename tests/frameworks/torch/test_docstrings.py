"""The examples in the docstrings of what needs PyTorch run as they stand."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import lossscale
import lossscale.frameworks.torch

NAMES = [
    f"lossscale.frameworks.torch.{module.name}"
    for module in pkgutil.iter_modules(lossscale.frameworks.torch.__path__)
]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_module_run(name):
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    # Examples begin where a user's program does, with these two imports.
    names = {**vars(module), "torch": torch, "lossscale": lossscale}
    runner = doctest.DocTestRunner()
    for test in finder.find(module, globs=names):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_there_are_examples_of_all_that_is_public():
    for name in lossscale.torch.__all__:
        assert ">>>" in (getattr(lossscale.torch, name).__doc__ or ""), name
