"""Two virtual devices for the replicas, and a clean start for every test."""

import os

import pytest

from seeding import seed

_ON_TENSORFLOW = os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"

if _ON_TENSORFLOW:
    import two_devices

    two_devices.split_cpu()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _float32_policy_and_fixed_seed():
    import keras

    seed(0)
    yield
    keras.mixed_precision.set_global_policy("float32")
