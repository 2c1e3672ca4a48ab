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
