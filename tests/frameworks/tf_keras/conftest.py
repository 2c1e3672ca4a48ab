"""These tests run in a process of their own: see the Makefile."""

import os

import pytest

if os.environ.get("LOSSSCALE_TEST_KERAS") == "tf_keras":
    import two_devices

    two_devices.split_cpu()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(params=["new", "legacy"])
def optimizers(request):
    """Each family of optimizers in turn."""
    import tf_keras

    return tf_keras.optimizers if request.param == "new" else tf_keras.optimizers.legacy
