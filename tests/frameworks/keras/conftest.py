"""Two virtual devices for the replicas, and a clean start for every test."""

import os

import pytest

_ON_TENSORFLOW = os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"

if _ON_TENSORFLOW:
    import tensorflow as tf

    import two_devices

    two_devices.split_cpu()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _float32_policy_and_fixed_seed():
    import keras

    keras.utils.set_random_seed(0)
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def mixed_float16():
    """Models made in this test compute in float16."""
    import keras

    keras.mixed_precision.set_global_policy("mixed_float16")


@pytest.fixture(scope="session")
def two_replicas():
    """A strategy of two replicas, one for all tests: TensorFlow numbers the collectives anew for
    each strategy of a process, and those of a second one meet those of the first."""
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    assert strategy.num_replicas_in_sync == 2
    return strategy
