"""These tests need PyTorch alone: a process that runs no others never imports Keras."""

import importlib
import pkgutil
import sys

import pytest

import lossscale.frameworks.torch


@pytest.fixture(scope="session", autouse=True)
def _no_keras():
    # Other folders of the same process may have imported it before.
    before = {name for name in ("keras", "tf_keras", "tensorflow") if name in sys.modules}
    yield
    for module in pkgutil.iter_modules(lossscale.frameworks.torch.__path__):
        importlib.import_module(f"lossscale.frameworks.torch.{module.name}")
    now = {name for name in ("keras", "tf_keras", "tensorflow") if name in sys.modules}
    assert now == before
