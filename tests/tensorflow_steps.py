"""Steps on TensorFlow in each way to take one, of both Kerases, with gradients that are given."""

import importlib

import numpy as np
import tensorflow as tf

import lossscale
from conformance.harness import native
from conformance.wrappers import KERAS

keras = importlib.import_module(KERAS)


def wrapped(inner=None, **arguments):
    """Returns our optimizer around `inner`, or around an SGD whose update is the gradient."""
    return lossscale.LossScaleOptimizer(inner or keras.optimizers.SGD(1.0), **arguments)


def variables(*values):
    """Returns float32 variables of these values."""
    new = getattr(keras, "Variable", tf.Variable)
    return [new(np.asarray(value, "float32")) for value in values]


def gradients_for(targets, steps, seed=0):
    """Returns `steps` lists of random gradients, one for each variable."""
    random = np.random.default_rng(seed)
    return [
        [random.normal(size=tuple(v.shape)).astype("float32") for v in targets]
        for _ in range(steps)
    ]


def loss_with_gradients(targets, gradients):
    """Returns a loss whose gradient with respect to each variable is the one given, exactly."""
    products = [tf.reduce_sum(native(v) * g) for v, g in zip(targets, gradients, strict=True)]
    return tf.add_n(products)


def taken(targets, gradients, scale=lambda loss: loss):
    """Returns the gradients of a scaled loss whose own gradients are given."""
    with tf.GradientTape() as tape:
        loss = scale(loss_with_gradients(targets, gradients))
    return tape.gradient(loss, list(map(native, targets)))


def step_by_scale_loss(optimizer, targets, gradients, *third, **arguments):
    """One step in the way of Keras' trainer, with more arguments of `apply_gradients`."""
    found = taken(targets, gradients, optimizer.scale_loss)
    optimizer.apply_gradients(zip(found, targets, strict=True), *third, **arguments)


def step_by_documented_calls(optimizer, targets, gradients, *third, **arguments):
    """One step in the way of TensorFlow's pages, with more arguments of `apply_gradients`."""
    found = taken(targets, gradients, optimizer.get_scaled_loss)
    found = optimizer.get_unscaled_gradients(found)
    optimizer.apply_gradients(zip(found, targets, strict=True), *third, **arguments)


def step_by_minimize(optimizer, targets, gradients):
    """One step by the one call that does everything."""
    optimizer.minimize(lambda: loss_with_gradients(targets, gradients), targets)


def step_by_apply(optimizer, targets, gradients):
    """One step in the way of Keras 3's other training entry."""
    optimizer.apply(taken(targets, gradients, optimizer.scale_loss), targets)


def plain_step(optimizer, targets, gradients):
    """One step of an optimizer without loss scaling."""
    optimizer.apply_gradients(zip(taken(targets, gradients), targets, strict=True))
