"""The monitor on TensorFlow alone: replicas, checkpoints, TensorBoard, models without a shape."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from frameworks.keras.support import assert_same, values
from lossscale import DynamicScale, LossScaleOptimizer
from lossscale.callbacks import LossScaleMonitor
from lossscale.errors import ArgumentError
from lossscale.monitoring import read_records
from records import column, nonfinite, skipped_steps
from seeding import seed


@keras.saving.register_keras_serializable("lossscale.tests")
class Root(keras.layers.Layer):
    """Returns its input; where that is zero the gradient of its weight, zero too, is infinite."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(2,), initializer="zeros", name="kernel")

    def call(self, x):
        b = tf.abs(x[:, :2])
        is_zero = tf.cast(b == 0, b.dtype)
        roots = tf.sqrt(self.kernel * is_zero + b) - tf.sqrt(b)
        return x + tf.reduce_sum(roots, axis=1, keepdims=True)


def net(optimizer=None, **arguments):
    seed(0)
    layers = [keras.Input((3,)), Root(name="root"), keras.layers.Dense(1, name="out")]
    model = keras.Sequential(layers, name="net")
    rule = DynamicScale(initial_scale=2.0**8, growth_interval=3)
    inner = optimizer or keras.optimizers.SGD(0.0)
    given = arguments or {"jit_compile": False}
    model.compile(LossScaleOptimizer(inner, rule=rule), "mse", **given)
    return model


def data(batches, zeros=()):
    """Batches of 8 rows. `zeros` are (row, columns) whose gradients are infinite."""
    x = np.random.default_rng(0).uniform(1, 2, size=(8 * batches, 3)).astype("float32")
    for row, columns in zeros:
        x[row, :columns] = 0
    return x, np.zeros((8 * batches, 1), "float32")


def fit(model, x, y, monitor, **arguments):
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[monitor], **arguments)


def test_what_replicas_have_is_counted_together_and_once_and_changes_nothing(
    two_replicas, tmp_path
):
    # Of a batch of 8, replica 0 gets the first four rows: after a step without any overflow one of
    # the first, one of the second, and one of both.
    overflows = [(9, 2), (21, 2), (24, 1), (28, 2)]
    results = []
    for callbacks in ([], [LossScaleMonitor(tmp_path / "run.jsonl")]):
        with two_replicas.scope():
            model = net(keras.optimizers.Adam(0.01))
        x, y = data(4, overflows)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
        results.append(values(model.variables) + values(model.optimizer.variables))
    assert_same(*results)
    path = tmp_path / "run.jsonl"
    assert skipped_steps(path) == [2, 3, 4]
    assert column(path, "scale") == [256.0, 256.0, 128.0, 64.0]
    name = "net/root/kernel"
    assert nonfinite(path) == [[], [(name, 2, 0)], [(name, 2, 0)], [(name, 3, 0)]]


def test_checkpoints_are_those_of_a_run_without_a_monitor(tmp_path):
    monitored, plain = (
        net(keras.optimizers.Adam(0.01), run_eagerly=True) for _ in ("monitored", "plain")
    )
    x, y = data(3, [(9, 1)])
    fit(monitored, x, y, LossScaleMonitor(tmp_path / "run.jsonl"))
    plain.fit(x, y, batch_size=8, verbose=0)
    for source, target in ((monitored, plain), (plain, monitored)):
        saved = tf.train.Checkpoint(model=source).save(str(tmp_path / "checkpoint"))
        status = tf.train.Checkpoint(model=target).restore(saved)
        status.assert_consumed()
        assert_same(values(source.optimizer.variables), values(target.optimizer.variables))
    names = [name for name, _ in tf.train.list_variables(saved)]
    assert not [name for name in names if "track" in name]
    monitored.export(tmp_path / "exported", verbose=False)


@pytest.mark.parametrize("eager", [False, True])
def test_a_model_that_gets_its_shape_in_fit(tmp_path, eager):
    model = keras.Sequential([Root(name="root"), keras.layers.Dense(1)], name="net")
    mode = {"run_eagerly": True} if eager else {"jit_compile": False}
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0)), "mse", **mode)
    fit(model, *data(3, [(9, 1)]), LossScaleMonitor(tmp_path / "run.jsonl"))
    assert nonfinite(tmp_path / "run.jsonl") == [[], [("net/root/kernel", 1, 0)], []]


def test_sparse_gradients_are_counted_as_they_are_stored(tmp_path):
    seed(0)
    layers = [keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 3, name="words")]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD()), "mse", jit_compile=False)
    x, y = np.zeros((8, 2), "int32"), np.full((8, 1), np.inf, "float32")
    with pytest.warns(UserWarning, match="loss of step 1 is inf"):
        fit(model, x, y, LossScaleMonitor(tmp_path / "run.jsonl"))
    [record] = read_records(tmp_path / "run.jsonl")
    words = next(tensor for tensor in record.nonfinite if "words" in tensor.name)
    assert words.infs + words.nans == 8 * 2 * 3


def test_what_tensorboard_shows(tmp_path):
    """The three lines of docs/monitoring.md, read by TensorFlow's reader of TensorBoard's files."""
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:

        def log(record):
            writer.add_scalar("loss_scale", record["scale"], record["step"])
            writer.add_scalar("steps_skipped", record["steps_skipped"], record["step"])

        model = net(keras.optimizers.SGD(1.0), run_eagerly=True)
        fit(model, *data(2, [(9, 1)]), LossScaleMonitor(log=log))
    [file] = tmp_path.iterdir()
    events = list(tf.compat.v1.train.summary_iterator(str(file)))
    shown = {(v.tag, event.step): v.simple_value for event in events for v in event.summary.value}
    assert shown == {
        ("loss_scale", 1): 256.0,
        ("loss_scale", 2): 256.0,
        ("steps_skipped", 1): 0.0,
        ("steps_skipped", 2): 1.0,
    }


def test_a_model_of_the_other_generation_is_refused():
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(tf_keras.optimizers.SGD()), "mse")
    with pytest.raises(ArgumentError, match="framework='tf_keras'"):
        model.fit(*data(1), verbose=0, callbacks=[LossScaleMonitor()])
