"""Optimizers of one's own around which ours is put: what they override is called."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from frameworks.keras.support import INF
from lossscale import LossScaleOptimizer


class Halving(keras.optimizers.SGD):
    """Applies half of each gradient."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * g, v) for g, v in grads_and_vars])


def by_hand(optimizer, weight):
    with tf.GradientTape() as tape:
        scaled_loss = optimizer.get_scaled_loss(weight**2)
    gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled_loss, [weight]))
    optimizer.apply_gradients(zip(gradients, [weight], strict=True))


def as_keras_trainer(optimizer, weight):
    with tf.GradientTape() as tape:
        scaled_loss = optimizer.scale_loss(weight**2)
    optimizer.apply_gradients([(tape.gradient(scaled_loss, weight), weight)])


def in_one_call(optimizer, weight):
    optimizer.minimize(lambda: weight**2, [weight])


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        *itertools.product(["eager", "function"], [by_hand, as_keras_trainer, in_one_call]),
        ("xla", as_keras_trainer),
    ],
)
def test_apply_gradients_of_the_inner_optimizer_is_called(step, mode):
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(Halving(0.5))
    run = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    for expected in (0.5, 0.25):
        run(optimizer, weight)
        assert weight.numpy() == expected
    assert int(optimizer.inner_optimizer.iterations) == 2


def test_a_step_that_is_skipped_does_not_reach_it():
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(Halving(0.5))
    gradient = optimizer.scale_loss(tf.constant([1.0, INF]))
    optimizer.apply_gradients([(gradient, weight)])
    np.testing.assert_array_equal(weight.numpy(), [1.0, 2.0])
    assert int(optimizer.steps_skipped) == 1
    assert int(optimizer.inner_optimizer.iterations) == 0
