"""The examples in the docstrings of the PyTorch modules, and that every public name has one."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import lossscale
import lossscale.frameworks.torch

PACKAGE = lossscale.frameworks.torch
MODULES = [found.name for found in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")]
OF_TRAINERS = ["LightningMonitor", "TransformersMonitor"]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "torch": torch, "lossscale": lossscale}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(module, globs=names, optionflags=flags).failed == 0


@pytest.mark.parametrize("name", [*lossscale.torch.__all__, *OF_TRAINERS])
def test_every_public_name_is_documented_with_an_example(name):
    assert ">>>" in (getattr(lossscale.torch, name).__doc__ or "")
    assert name in dir(lossscale.torch)
