"""What the pages say of Keras' own LossScaleOptimizer, on TensorFlow.

    python -m pytest -p conftest tools/peers/keras_own_class.py

When one of these fails, Keras has mended it, and the page has to be changed. It takes seconds, and
needs the test environment.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import two_devices
from kerases import INF
from tensorflow_steps import step_by_scale_loss, variables

two_devices.split_cpu()
KerasOwn = keras.optimizers.LossScaleOptimizer


def own(**arguments):
    """Keras' class around an SGD whose update is the gradient."""
    return KerasOwn(keras.optimizers.SGD(1.0), **arguments)


def test_the_scale_reaches_zero_and_destroys_the_weights():
    optimizer, targets = own(), variables([1.0])
    optimizer.build(targets)
    for _ in range(200):
        optimizer.apply([tf.constant([INF])], targets)
    assert float(optimizer.dynamic_scale) == 0
    step_by_scale_loss(optimizer, targets, [np.array([0.5])])
    assert not np.isfinite(targets[0].numpy()).any()


def test_the_scale_becomes_infinite_and_stays():
    optimizer, targets = own(initial_scale=2.0**120, dynamic_growth_steps=1), variables([1.0])
    optimizer.build(targets)
    for _ in range(10):
        step_by_scale_loss(optimizer, targets, [np.array([0.0])])
    assert float(optimizer.dynamic_scale) == INF
    for _ in range(10):
        step_by_scale_loss(optimizer, targets, [np.array([1.0])])
    assert float(optimizer.dynamic_scale) == INF
    assert targets[0].numpy().tolist() == [1.0]


def test_an_overflow_on_the_second_replica_is_applied(two_replicas):
    with two_replicas.scope():
        weight, optimizer = keras.Variable([1.0]), own()
        optimizer.build([weight])

    def step(gradient):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value * gradient))
        optimizer.apply_gradients([(tape.gradient(loss, weight.value), weight)])

    gradient = two_replicas.experimental_distribute_values_from_function(
        lambda context: tf.constant([INF if context.replica_id_in_sync_group else 0.25])
    )
    two_replicas.run(step, args=(gradient,))
    weights = two_replicas.experimental_local_results(weight.value)
    assert [each.numpy().tolist() for each in weights] == [[-INF], [-INF]]
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**15


@pytest.mark.parametrize("arguments", [{"dynamic": False, "initial_scale": 8.0}, {"rule": None}])
def test_a_fixed_scale_and_rules_are_refused(arguments):
    with pytest.raises(ValueError):
        own(**arguments)
