"""These tests read files of TensorFlow, and compare with tf_keras: on the TensorFlow backend."""

import os
import random

import pytest

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
    # Both Kerases draw their initial values by it. Not `set_random_seed`: TensorFlow's drops every
    # kernel, which the eager steps of the next test would make anew.
    random.seed(0)
