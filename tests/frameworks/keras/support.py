"""What the tests of Keras 3 share."""

import keras
import numpy as np
import tensorflow as tf

import lossscale


def wrapped(inner=None, **arguments):
    """Returns our optimizer around `inner`, or around an SGD whose update is the gradient."""
    return lossscale.LossScaleOptimizer(inner or keras.optimizers.SGD(1.0), **arguments)


def variables(*values):
    """Returns float32 variables of these values."""
    return [keras.Variable(np.asarray(value, "float32")) for value in values]


def gradients_for(targets, steps, seed=0):
    """Returns `steps` lists of random gradients, one for each variable."""
    random = np.random.default_rng(seed)
    return [
        [random.normal(size=tuple(v.shape)).astype("float32") for v in targets]
        for _ in range(steps)
    ]


def loss_with_gradients(targets, gradients):
    """Returns a loss whose gradient with respect to each variable is the one given, exactly."""
    products = [tf.reduce_sum(v.value * g) for v, g in zip(targets, gradients, strict=True)]
    return tf.add_n(products)


def native(targets):
    """Returns the TensorFlow variables behind Keras variables."""
    return [v.value for v in targets]


def taken(targets, gradients, scale=lambda loss: loss):
    """Returns the gradients of a scaled loss whose own gradients are given."""
    with tf.GradientTape() as tape:
        loss = scale(loss_with_gradients(targets, gradients))
    return tape.gradient(loss, native(targets))


def step_by_scale_loss(optimizer, targets, gradients, **arguments):
    """One step in the way of Keras' trainer, with arguments of `apply_gradients`."""
    found = taken(targets, gradients, optimizer.scale_loss)
    optimizer.apply_gradients(zip(found, targets, strict=True), **arguments)


def step_by_documented_calls(optimizer, targets, gradients, **arguments):
    """One step in the way of TensorFlow's pages, with arguments of `apply_gradients`."""
    found = taken(targets, gradients, optimizer.get_scaled_loss)
    found = optimizer.get_unscaled_gradients(found)
    optimizer.apply_gradients(zip(found, targets, strict=True), **arguments)


def step_by_minimize(optimizer, targets, gradients):
    """One step by the one call that does everything."""
    optimizer.minimize(lambda: loss_with_gradients(targets, gradients), targets)


def step_by_apply(optimizer, targets, gradients):
    """One step in the way of Keras 3's other training entry."""
    optimizer.apply(taken(targets, gradients, optimizer.scale_loss), targets)


STEPS = {
    "scale_loss": step_by_scale_loss,
    "documented": step_by_documented_calls,
    "minimize": step_by_minimize,
    "apply": step_by_apply,
}


def plain_step(optimizer, targets, gradients):
    """One step of an optimizer without loss scaling."""
    optimizer.apply_gradients(zip(taken(targets, gradients), targets, strict=True))
