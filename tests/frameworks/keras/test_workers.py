"""Two worker processes on this machine, under `tf.distribute.MultiWorkerMirroredStrategy`."""

import json

from two_workers import on_two_workers

LOOP = """
import json, sys
import tensorflow as tf, keras, lossscale, numpy as np

strategy = tf.distribute.MultiWorkerMirroredStrategy()


def trained(aggregate, spoiled):
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        inner = keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer = lossscale.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)
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

    for worker in spoiled:
        step(tf.constant(worker))
        state = (weight, optimizer.dynamic_scale, optimizer.step_counter, *inner.variables)
        yield (
            [np.array(variable.value.numpy()).tobytes().hex() for variable in state]
            + [int(optimizer.steps_skipped), float(optimizer.loss_scale)]
        )


spoiled = json.loads(sys.argv[1])
print(json.dumps([list(trained(aggregate, spoiled)) for aggregate in (True, False)]))
"""


def test_an_overflow_on_one_worker_skips_the_step_on_both():
    nobody = -1
    first, second = on_two_workers(LOOP, json.dumps([nobody, 0, 1, nobody]))
    assert first == second
    # Aggregated, and not.
    for seen in json.loads(first):
        weights = [state[0] for state in seen]
        assert weights[0] == weights[1] == weights[2] != weights[3]
        assert [state[-2:] for state in seen] == [[0, 8.0], [1, 4.0], [2, 2.0], [2, 2.0]]
