"""The examples in the docstrings of what serves PyTorch itself."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import lossscale
import lossscale.torch

PACKAGE = lossscale.torch
# That of the wrapper is found where its class says that it is.
MODULES = [PACKAGE.__name__]
MODULES += [m.name for m in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")]
TRIED = {}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "torch": torch, "lossscale": lossscale}
    failed, TRIED[name] = doctest.testmod(
        module, globs=names, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0


def test_the_examples_are_found():
    with_examples = {name.rpartition(".")[2] for name, tried in TRIED.items() if tried}
    assert with_examples >= {"amp_names", "scaler", "guard", "torch", "ranks"}


def test_there_are_examples_of_all_that_is_public():
    for name in lossscale.torch.__all__:
        assert ">>>" in (getattr(lossscale.torch, name).__doc__ or ""), name
