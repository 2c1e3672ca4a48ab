"""These tests read files of TensorFlow, and compare with tf_keras: on the TensorFlow backend."""

import os

import pytest

from seeding import seed

if os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
    collect_ignore_glob = ["test_*.py"]
else:
    pytest.importorskip("tf_keras")
    import tensorflow as tf

    # tf_keras logs, on every step, that nobody called get_scaled_loss.
    tf.get_logger().setLevel("ERROR")
    tf.random.set_seed(0)


@pytest.fixture(autouse=True)
def _fixed_seed():
    seed(0)
