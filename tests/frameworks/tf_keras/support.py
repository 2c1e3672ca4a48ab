"""What the tests of tf_keras share."""

import random

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras.src import backend

import lossscale
from kerases import INF


def wrapped(inner, **arguments):
    """Returns our optimizer, with a small dynamic scale unless something else is asked for."""
    if not arguments:
        arguments = {"initial_scale": 8, "dynamic_growth_steps": 2}
    return lossscale.LossScaleOptimizer(inner, **arguments)


def step(optimizer, variables, gradients):
    """One step by the documented calls, of a loss with these gradients."""
    with tf.GradientTape() as tape:
        products = [tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)]
        loss = optimizer.get_scaled_loss(tf.add_n(products))
    found = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
    return optimizer.apply_gradients(zip(found, variables, strict=True))


def trained(optimizer, variables, spoiled=(False, False, True, False)):
    """Runs a few steps, some of them with an overflow; returns the optimizer."""
    for bad in spoiled:
        step(optimizer, variables, [np.full(v.shape, INF if bad else 0.5) for v in variables])
    return optimizer


def seed_initial_values():
    """Not `set_random_seed`: TensorFlow's drops every kernel, which eager steps would make anew."""
    backend._SEED_GENERATOR.generator = random.Random(0)


def dense(units, **arguments):
    """Returns a layer that always starts with the same values."""
    initial = tf_keras.initializers.GlorotUniform(seed=units)
    return tf_keras.layers.Dense(units, kernel_initializer=initial, **arguments)


def small_model():
    """Returns a network with the same weights every time."""
    return tf_keras.Sequential(
        [
            tf_keras.Input((4,)),
            dense(8, activation="relu", name="hidden"),
            dense(1, dtype="float32", name="out"),
        ]
    )
