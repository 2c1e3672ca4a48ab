"""Diagnoses a gradient penalty, the derivative of a derivative, with `tf.GradientTape`."""

import keras
import numpy as np
import tensorflow as tf

from lossscale.diagnosis import diagnose

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((3,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)],
    name="critic",
)


def loss_fn(model, batch):
    x, _, _ = batch
    with tf.GradientTape() as tape:
        tape.watch(x)
        score = tf.cast(model(x, training=True), "float32")
    slope = tf.cast(tape.gradient(score, x), "float32")
    length = tf.sqrt(tf.reduce_sum(slope**2, axis=-1) + 1e-12)
    return tf.reduce_mean(score) + 10 * tf.reduce_mean((length - 1) ** 2)


x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
print(diagnose(model, x, loss_fn=loss_fn).verdict.value)
