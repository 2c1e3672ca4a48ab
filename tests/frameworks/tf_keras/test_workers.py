"""Two worker processes on this machine, in `fit` under `MultiWorkerMirroredStrategy`."""

import json

from two_workers import on_two_workers

FIT = """
import json, os, sys
import tensorflow as tf, tf_keras as keras, lossscale, numpy as np

folder, dies_in_epoch = sys.argv[1], int(sys.argv[2])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(8, input_shape=(4,)), keras.layers.Dense(1)])
    optimizer = lossscale.LossScaleOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=1024.0, dynamic_growth_steps=3
    )
    model.compile(optimizer, loss="mse")
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = x[:, :1].copy()
x[13] = np.nan  # one row, for one of the workers
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA


class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        # Both at once: alone, one waits for ten seconds until TensorFlow ends it.
        if epoch == dies_in_epoch:
            os._exit(7)


callbacks = [keras.callbacks.BackupAndRestore(folder), Dies()]
model.fit(data.with_options(options), epochs=4, verbose=0, callbacks=callbacks)
print(json.dumps([
    [weight.tobytes().hex() for weight in model.get_weights()],
    float(optimizer.loss_scale),
    int(optimizer.dynamic_counter.numpy()),
    int(optimizer.steps_skipped),
    int(optimizer.iterations),
]))
"""
NEVER = 99


def test_killed_workers_that_start_again_go_on_from_where_the_scale_was(tmp_path):
    environment = {"TF_USE_LEGACY_KERAS": "1", "module": "tf_keras"}
    whole = on_two_workers(FIT, str(tmp_path / "whole"), str(NEVER), **environment)
    assert whole[0] == whole[1] is not None
    _, *state = json.loads(whole[0])
    assert state == [512.0, 2, 4, 16]
    killed = on_two_workers(FIT, str(tmp_path / "killed"), "2", **environment)
    assert killed == [None, None]
    again = on_two_workers(FIT, str(tmp_path / "killed"), str(NEVER), **environment)
    assert again == whole
