"""Code written for TensorFlow 2.0 to 2.4, unedited, under `lossscale.install()`."""

import tensorflow as tf

import lossscale

with lossscale.install():
    # As it was written for TensorFlow 2.0:
    opt = tf.keras.optimizers.SGD(0.5)
    opt = tf.keras.mixed_precision.experimental.LossScaleOptimizer(opt, "dynamic")
    position = tf.Variable(8.0)
    opt.minimize(lambda: position * position / 2.0, [position])
    print("2.0:", float(position), "at scale", float(opt.loss_scale()))

    # As it was written for TensorFlow 2.4:
    opt = tf.keras.optimizers.SGD(0.5)
    opt = tf.keras.mixed_precision.LossScaleOptimizer(opt, dynamic=False, initial_scale=64)
    opt.minimize(lambda: position * position / 2.0, [position])
    print("2.4:", float(position), "at scale", float(opt.loss_scale))
