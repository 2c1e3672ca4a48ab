"""The monitor in `fit` of tf_keras: replicas, float16, and what it leaves out of files.

What both families share is in tests/conformance/test_fit_monitor.py.
"""

import pytest
import tensorflow as tf
import tf_keras

from frameworks.tf_keras.support import assert_same, data, small_model, values
from lossscale import DynamicScale, LossScaleOptimizer
from lossscale.callbacks import LossScaleMonitor
from lossscale.monitoring import read_records
from records import nonfinite
from root_layer import fit, net, root_layer

LEGACY = tf_keras.optimizers.legacy


def test_an_overflow_on_one_replica_is_counted_once(two_replicas, tmp_path):
    with two_replicas.scope():
        model = net(tf_keras, LEGACY.SGD(0.01))
    path = tmp_path / "run.jsonl"
    # In the second batch on the first replica, in the third on the other one.
    fit(model, 4, [(9, 2), (21, 2)], LossScaleMonitor(path))
    overflow = [("root/kernel", 2, 0)]
    assert nonfinite(path) == [[], overflow, overflow, []]


def test_float16_gradients_are_counted(mixed_float16, tmp_path):
    path, model = tmp_path / "run.jsonl", small_model()
    rule = DynamicScale(initial_scale=2.0**30)
    model.compile(LossScaleOptimizer(LEGACY.SGD(0.01), rule=rule), "mse")
    model.fit(*data(8), batch_size=8, verbose=0, callbacks=[LossScaleMonitor(path)])
    [record] = read_records(path)
    assert record.skipped
    assert {tensor.name.partition("/")[0] for tensor in record.nonfinite} == {"hidden"}


@pytest.mark.parametrize(
    ("optimizers", "run_eagerly"), [("new", True), ("legacy", False)], indirect=["optimizers"]
)
def test_what_is_watched_changes_no_weight_and_is_not_saved(optimizers, run_eagerly, tmp_path):
    monitored, plain = (
        net(tf_keras, optimizers.Adam(0.01), run_eagerly=run_eagerly) for _ in ("one", "other")
    )
    fit(monitored, 6, [(9, 1)], LossScaleMonitor(tmp_path / "run.jsonl", every=2))
    fit(plain, 6, [(9, 1)])
    assert_same(values(monitored.variables), values(plain.variables))
    assert_same(monitored.optimizer.get_weights(), plain.optimizer.get_weights())
    for source, target in ((monitored, plain), (plain, monitored)):
        saved = tf.train.Checkpoint(model=source).save(str(tmp_path / "checkpoint"))
        tf.train.Checkpoint(model=target).restore(saved).assert_consumed()
        source.save_weights(tmp_path / "model.weights.h5")
        target.load_weights(tmp_path / "model.weights.h5")
    assert not [name for name, _ in tf.train.list_variables(saved) if "track" in name]


def test_what_is_watched_is_in_no_saved_model(tmp_path):
    inner, folder = tf_keras.optimizers.Adam(0.01), tmp_path / "saved"
    monitored = net(tf_keras, inner, run_eagerly=True)
    fit(monitored, 2, [(9, 1)], LossScaleMonitor(tmp_path / "run.jsonl"))
    monitored.save(folder, save_format="tf")
    names = [name for name, _ in tf.train.list_variables(str(folder / "variables/variables"))]
    assert names
    assert not [name for name in names if "track" in name]
    again = tf_keras.models.load_model(folder, custom_objects={"Root": root_layer(tf_keras)})
    # A SavedModel restores no optimizer.
    assert_same(values(again.trainable_variables), values(monitored.trainable_variables))
