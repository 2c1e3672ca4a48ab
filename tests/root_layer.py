"""A model of either Keras whose gradients are infinite for chosen rows, and such rows."""

import numpy as np
import tensorflow as tf

from lossscale import DynamicScale, LossScaleOptimizer


def root_layer(keras):
    """A layer that returns its input, with weights 0; where it is zero the gradient is infinite."""

    class Root(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(name="kernel", shape=(2,), initializer="zeros")

        def call(self, x):
            b = tf.abs(x[:, :2])
            is_zero = tf.cast(b == 0, b.dtype)
            roots = tf.sqrt(self.kernel * is_zero + b) - tf.sqrt(b)
            return x + tf.reduce_sum(roots, axis=1, keepdims=True)

    return Root


def net(keras, inner=None, shape=(4,), **arguments):
    """A compiled model with that layer, which starts with the same weights every time."""
    initial = keras.initializers.GlorotUniform(seed=1)
    out = keras.layers.Dense(1, kernel_initializer=initial, name="out")
    first = [keras.layers.Input(shape)] if shape else []
    model = keras.Sequential([*first, root_layer(keras)(name="root"), out], name="net")
    rule = DynamicScale(initial_scale=2.0**8, growth_interval=3)
    optimizer = LossScaleOptimizer(inner or keras.optimizers.SGD(0.0), rule=rule)
    model.compile(optimizer, "mse", **(arguments or {"jit_compile": False}))
    if shape:
        # A function that makes variables would be traced twice.
        optimizer.build(model.trainable_variables)
    return model


def fit(model, batches, zeros, *callbacks):
    """Trains on batches of 8 rows. `zeros` are (row, columns) whose gradients are infinite."""
    x = np.random.default_rng(0).uniform(1, 2, size=(8 * batches, 4)).astype("float32")
    for row, columns in zeros:
        x[row, :columns] = 0
    y = np.zeros((8 * batches, 1), "float32")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks))
