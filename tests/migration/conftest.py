"""These tests read files of TensorFlow, and compare with tf_keras: on the TensorFlow backend."""

import os

import pytest

from seeding import seed

if os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
    collect_ignore_glob = ["test_*.py"]
else:
    pytest.importorskip("tf_keras")
    import tensorflow as tf
    from tf_keras.src.layers.rnn import gru, lstm

    # tf_keras logs, on every step, that nobody called get_scaled_loss.
    tf.get_logger().setLevel("ERROR")
    tf.random.set_seed(0)


@pytest.fixture(autouse=True)
def _fixed_seed():
    seed(0)


@pytest.fixture(scope="module", autouse=True)
def _one_kernel():
    """Leaves out what tf_keras would run on a GPU.

    Wherever it puts an LSTM or a GRU into a graph, as for the shapes of a model, it traces that
    beside what a CPU runs, and the gradients of both: half of the time of a recurrent model.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lstm, "lstm_with_backend_selection", lstm.standard_lstm)
        patched.setattr(gru, "gru_with_backend_selection", gru.standard_gru)
        yield
