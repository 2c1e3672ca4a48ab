"""The monitor on TensorFlow alone: replicas, checkpoints, models without a shape."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from frameworks.keras.support import assert_same, values
from lossscale import LossScaleOptimizer
from lossscale.callbacks import LossScaleMonitor
from lossscale.errors import ArgumentError
from lossscale.monitoring import read_records
from records import column, nonfinite, skipped_steps
from root_layer import fit, net


def test_what_replicas_have_is_counted_together_and_once_and_changes_nothing(
    two_replicas, tmp_path
):
    # Of a batch of 8, replica 0 gets the first four rows: after a step without any overflow one of
    # the first, one of the second, and one of both.
    overflows, path, results = [(9, 2), (21, 2), (24, 1), (28, 2)], tmp_path / "run.jsonl", []
    for callbacks in ([], [LossScaleMonitor(path)]):
        with two_replicas.scope():
            model = net(keras, keras.optimizers.Adam(0.01))
        fit(model, 4, overflows, *callbacks)
        results.append(values(model.variables) + values(model.optimizer.variables))
    assert_same(*results)
    assert skipped_steps(path) == [2, 3, 4]
    assert column(path, "scale") == [256.0, 256.0, 128.0, 64.0]
    name = "net/root/kernel"
    assert nonfinite(path) == [[], [(name, 2, 0)], [(name, 2, 0)], [(name, 3, 0)]]


def test_checkpoints_are_those_of_a_run_without_a_monitor(tmp_path):
    monitored, plain = (
        net(keras, keras.optimizers.Adam(0.01), run_eagerly=True) for _ in ("monitored", "plain")
    )
    fit(monitored, 3, [(9, 1)], LossScaleMonitor(tmp_path / "run.jsonl"))
    fit(plain, 3, [])
    for source, target in ((monitored, plain), (plain, monitored)):
        saved = tf.train.Checkpoint(model=source).save(str(tmp_path / "checkpoint"))
        tf.train.Checkpoint(model=target).restore(saved).assert_consumed()
        assert_same(values(source.optimizer.variables), values(target.optimizer.variables))
    assert not [name for name, _ in tf.train.list_variables(saved) if "track" in name]
    monitored.export(tmp_path / "exported", verbose=False)


@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {"jit_compile": False}], ids=str)
def test_a_model_that_gets_its_shape_in_fit(tmp_path, mode):
    fit(net(keras, shape=None, **mode), 3, [(9, 1)], LossScaleMonitor(tmp_path / "run.jsonl"))
    assert nonfinite(tmp_path / "run.jsonl") == [[], [("net/root/kernel", 1, 0)], []]


def test_sparse_gradients_are_counted_as_they_are_stored(tmp_path):
    layers = [keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 3, name="words")]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD()), "mse", jit_compile=False)
    x, y = np.zeros((8, 2), "int32"), np.full((8, 1), np.inf, "float32")
    monitor = LossScaleMonitor(tmp_path / "run.jsonl")
    with pytest.warns(UserWarning, match="loss of step 1 is inf"):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[monitor])
    [record] = read_records(tmp_path / "run.jsonl")
    words = next(tensor for tensor in record.nonfinite if "words" in tensor.name)
    assert words.infs + words.nans == 8 * 2 * 3


def test_a_model_of_the_other_generation_is_refused():
    import tf_keras

    with pytest.raises(ArgumentError, match="framework='tf_keras'"):
        fit(net(tf_keras), 1, [], LossScaleMonitor())
