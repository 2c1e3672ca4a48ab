"""These tests need PyTorch alone: a process that runs no others never imports Keras."""

import contextlib
import importlib
import pkgutil
import sys

import pytest
import torch

import lossscale.torch
from frameworks.torch.support import DEVICE, forget_accelerate

_PREFIX = f"{lossscale.torch.__name__}."


@pytest.fixture(scope="session", autouse=True)
def _no_keras():
    # Other folders of the same process may have imported it before.
    before = {name for name in ("keras", "tf_keras", "tensorflow") if name in sys.modules}
    yield
    for module in pkgutil.walk_packages(lossscale.torch.__path__, _PREFIX):
        # Lightning and others are not there where the lowest releases are tried.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module.name)
    now = {name for name in ("keras", "tf_keras", "tensorflow") if name in sys.modules}
    assert now == before


@pytest.fixture
def on_the_device():
    """New tensors are on the device that is tested."""
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _new_accelerate():
    yield
    forget_accelerate()


@pytest.fixture(scope="session")
def lightning():
    return pytest.importorskip("lightning")
