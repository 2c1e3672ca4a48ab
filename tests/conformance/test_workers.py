"""Two worker processes on this machine, under `tf.distribute.MultiWorkerMirroredStrategy`."""

import json

import pytest

from conformance.wrappers import BACKEND, KERAS
from two_workers import on_two_workers

if BACKEND != "tensorflow":
    pytest.skip("a strategy of TensorFlow", allow_module_level=True)

# A loop with an overflow on nobody, on either worker, on nobody; and `fit`, which dies, and goes on
# when the program starts again. In `fit` under this strategy Keras 3 fails with any optimizer.
PROGRAM = """
import importlib, json, os, sys
import numpy as np, tensorflow as tf
import lossscale

keras, folder = importlib.import_module(sys.argv[1]), sys.argv[2]
is_first = not os.path.exists(folder)
strategy = tf.distribute.MultiWorkerMirroredStrategy()


def wrapped(rate, **settings):
    inner = keras.optimizers.SGD(rate, momentum=0.9)
    return lossscale.LossScaleOptimizer(inner, **settings)


def report(optimizer, *variables):
    arrays = [np.array(tf.convert_to_tensor(v)) for v in (*variables, *optimizer.variables)]
    return [
        [array.tobytes().hex() for array in arrays],
        float(optimizer.loss_scale),
        int(tf.convert_to_tensor(optimizer.dynamic_counter)),
        int(optimizer.steps_skipped),
        int(optimizer.iterations),
    ]


def loop(aggregate):
    with strategy.scope():
        weight = getattr(keras, "Variable", tf.Variable)([1.0, 2.0])
        optimizer = wrapped(0.5, initial_scale=8.0, dynamic_growth_steps=2)
        optimizer.build([weight])

    @tf.function
    def step(worker):
        def on_replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.where(tf.equal(number, worker), [np.nan, 1.0], [1.0, 1.0])
            scaled = optimizer.get_scaled_loss(gradient)
            gradients = optimizer.get_unscaled_gradients([scaled])
            optimizer.apply_gradients(
                zip(gradients, [weight]), experimental_aggregate_gradients=aggregate
            )
        strategy.run(on_replica)

    for worker in (-1, 0, 1, -1):
        step(tf.constant(worker))
        yield report(optimizer, weight)


class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        # Both at once: alone, one waits for ten seconds until TensorFlow ends it.
        if epoch == 2:
            os._exit(7)


def fit(*callbacks):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(8, input_shape=(4,)), keras.layers.Dense(1)])
        optimizer = wrapped(0.01, initial_scale=1024.0, dynamic_growth_steps=3)
        model.compile(optimizer, loss="mse")
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    y = x[:, :1].copy()
    x[13] = np.nan  # one row, for one of the workers
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    model.fit(data.with_options(options), epochs=4, verbose=0, callbacks=list(callbacks))
    return report(optimizer, *model.variables)


if is_first:
    print(json.dumps([list(loop(aggregate)) for aggregate in (True, False)]))
if keras.__name__ == "tf_keras":
    if is_first:
        print(json.dumps(fit()), flush=True)
    dies = [Dies()] if is_first else []
    print(json.dumps(fit(keras.callbacks.BackupAndRestore(folder), *dies)))
"""


def reports(folder, status):
    """What the program prints on both workers."""
    first, second = on_two_workers(PROGRAM, KERAS, folder, module=KERAS)
    assert [first.returncode, second.returncode] == [status] * 2, first.stderr + second.stderr
    assert first.stdout == second.stdout
    return [json.loads(line) for line in first.stdout.splitlines()]


def test_an_overflow_on_one_worker_skips_on_both_and_killed_ones_go_on_with_the_scale(tmp_path):
    in_fit = KERAS == "tf_keras"
    loops, *whole = reports(tmp_path / "backup", status=7 if in_fit else 0)
    # Aggregated, and not.
    for seen in loops:
        weights = [arrays[0] for arrays, *_ in seen]
        assert weights[0] == weights[1] == weights[2] != weights[3]
        assert [numbers for _, *numbers in seen] == [
            [8.0, 1, 0, 1],
            [4.0, 0, 1, 2],
            [2.0, 0, 2, 3],
            [2.0, 1, 2, 4],
        ]
    if in_fit:
        assert whole[0][1:] == [512.0, 2, 4, 16]
        assert reports(tmp_path / "backup", status=0) == whole
