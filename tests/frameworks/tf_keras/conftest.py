"""These tests run in a process of their own: see the Makefile."""

import os

import pytest

if os.environ.get("LOSSSCALE_TEST_KERAS") == "tf_keras":
    import tensorflow as tf

    import two_devices

    two_devices.split_cpu()
    tf.random.set_seed(0)
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _float32_policy_and_fixed_seed():
    import tf_keras

    from frameworks.tf_keras.support import seed_initial_values

    seed_initial_values()
    yield
    tf_keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def mixed_float16():
    """Models made in this test compute in float16."""
    import tf_keras

    tf_keras.mixed_precision.set_global_policy("mixed_float16")


@pytest.fixture(params=["new", "legacy"])
def optimizers(request):
    """Each family of optimizers in turn."""
    import tf_keras

    return tf_keras.optimizers if request.param == "new" else tf_keras.optimizers.legacy
