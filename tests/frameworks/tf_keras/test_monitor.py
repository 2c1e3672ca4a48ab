"""The monitor in `fit` of tf_keras: replicas, float16, and what it leaves out of files.

What both families share is in tests/conformance/test_fit_monitor.py.
"""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from frameworks.tf_keras.support import assert_same, data, dense, small_model, values
from lossscale import DynamicScale, LossScaleOptimizer
from lossscale.callbacks import LossScaleMonitor
from lossscale.monitoring import read_records
from records import nonfinite

only_new = pytest.mark.parametrize("optimizers", ["new"], indirect=True)
only_legacy = pytest.mark.parametrize("optimizers", ["legacy"], indirect=True)


class Root(tf_keras.layers.Layer):
    """Returns its input; where that is zero the gradient of its weight, zero too, is infinite."""

    def build(self, shape):
        self.kernel = self.add_weight("kernel", shape=(2,), initializer="zeros")

    def call(self, x):
        b = tf.abs(x[:, :2])
        is_zero = tf.cast(b == 0, b.dtype)
        roots = tf.sqrt(self.kernel * is_zero + b) - tf.sqrt(b)
        return x + tf.reduce_sum(roots, axis=1, keepdims=True)


def net(inner, shape=(4,), initial_scale=2.0**8, **arguments):
    layers = [Root(name="root"), dense(1, name="out")]
    model = tf_keras.Sequential([*([tf_keras.Input(shape)] if shape else []), *layers])
    rule = DynamicScale(initial_scale=initial_scale, growth_interval=3)
    model.compile(LossScaleOptimizer(inner, rule=rule), "mse", **arguments)
    if shape:
        # A function that makes variables would be traced twice.
        model.optimizer.build(model.trainable_variables)
    return model


def rows(batches, zeros=()):
    """Batches of 8 rows. `zeros` are (row, columns) whose gradients are infinite."""
    x = np.random.default_rng(0).uniform(1, 2, size=(8 * batches, 4)).astype("float32")
    for row, columns in zeros:
        x[row, :columns] = 0
    return x, np.zeros((8 * batches, 1), "float32")


def fit(model, x, y, *callbacks, **arguments):
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, callbacks=list(callbacks), **options)


@only_legacy
def test_an_overflow_on_one_replica_is_counted_once(optimizers, two_replicas, tmp_path):
    with two_replicas.scope():
        model = net(optimizers.SGD(0.01))
    path = tmp_path / "run.jsonl"
    # In the second batch on the first replica, in the third on the other one.
    fit(model, *rows(4, [(9, 2), (21, 2)]), LossScaleMonitor(path))
    overflow = [("root/kernel", 2, 0)]
    assert nonfinite(path) == [[], overflow, overflow, []]


@only_legacy
def test_float16_gradients_are_counted(optimizers, mixed_float16, tmp_path):
    path, model = tmp_path / "run.jsonl", small_model()
    rule = DynamicScale(initial_scale=2.0**30)
    model.compile(LossScaleOptimizer(optimizers.SGD(0.01), rule=rule), "mse")
    fit(model, *data(8), LossScaleMonitor(path))
    [record] = read_records(path)
    assert record.skipped
    assert {tensor.name.partition("/")[0] for tensor in record.nonfinite} == {"hidden"}


@pytest.mark.parametrize(
    ("optimizers", "run_eagerly"),
    # New ones are compiled above.
    [("new", True), ("legacy", False)],
    indirect=["optimizers"],
)
def test_what_is_watched_changes_no_weight_and_is_not_saved(optimizers, run_eagerly, tmp_path):
    monitored, plain = (
        net(optimizers.Adam(0.01), run_eagerly=run_eagerly) for _ in ("monitored", "plain")
    )
    monitor = LossScaleMonitor(tmp_path / "run.jsonl", every=2)
    fit(monitored, *rows(6, [(9, 1)]), monitor)
    fit(plain, *rows(6, [(9, 1)]))
    assert_same(values(monitored.variables), values(plain.variables))
    assert_same(monitored.optimizer.get_weights(), plain.optimizer.get_weights())
    for source, target in ((monitored, plain), (plain, monitored)):
        saved = tf.train.Checkpoint(model=source).save(str(tmp_path / "checkpoint"))
        tf.train.Checkpoint(model=target).restore(saved).assert_consumed()
        source.save_weights(tmp_path / "model.weights.h5")
        target.load_weights(tmp_path / "model.weights.h5")
    assert not [name for name, _ in tf.train.list_variables(saved) if "track" in name]


@only_new
def test_what_is_watched_is_in_no_saved_model(optimizers, tmp_path):
    monitored = net(optimizers.Adam(0.01), run_eagerly=True)
    fit(monitored, *rows(2, [(9, 1)]), LossScaleMonitor(tmp_path / "run.jsonl"))
    monitored.save(tmp_path / "saved", save_format="tf")
    names = [
        name for name, _ in tf.train.list_variables(str(tmp_path / "saved/variables/variables"))
    ]
    assert names
    assert not [name for name in names if "track" in name]
    again = tf_keras.models.load_model(tmp_path / "saved", custom_objects={"Root": Root})
    # A SavedModel restores no optimizer.
    assert_same(values(again.trainable_variables), values(monitored.trainable_variables))
