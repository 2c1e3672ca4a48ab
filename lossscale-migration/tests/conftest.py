"""These tests read files of TensorFlow, and compare with tf_keras: on the TensorFlow backend."""

import gc
import os

import pytest

from seeding import seed

# Each is read once, while TensorFlow is imported. A value from outside wins.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# oneDNN picks summation orders by CPU, so the same test would round differently elsewhere.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf

# tf_keras logs, on every step, that nobody called get_scaled_loss.
tf.get_logger().setLevel("ERROR")
tf.random.set_seed(0)


def pytest_collection_finish():
    # What is imported stays. To look through it for garbage, as Keras does, takes a third of a
    # second each time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed():
    seed(0)


@pytest.fixture
def refused(capsys):
    """Runs a command that cannot do what it is asked to; returns its one line of error."""
    from lossscale_migration.__main__ import main

    def run(*arguments):
        assert main(list(map(str, arguments))) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("lossscale: ")
        assert err.count("\n") == 1
        assert err[:-1].isprintable()
        assert len(err) < 3000
        return err

    return run
