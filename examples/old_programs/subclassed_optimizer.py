"""A custom optimizer (gradient centralization), as in many repositories of 2020."""

import numpy as np
import tensorflow as tf

tf.keras.mixed_precision.set_global_policy("mixed_float16")
tf.random.set_seed(0)


class CentralizedSGD(tf.keras.optimizers.SGD):
    """SGD that takes the mean out of the gradients of kernels."""

    def __init__(self, learning_rate=0.1, centralize=True, **kwargs):
        super(CentralizedSGD, self).__init__(learning_rate, **kwargs)
        self.centralize = centralize

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        centralized = []
        for gradient, variable in grads_and_vars:
            if self.centralize and len(gradient.shape) > 1:
                axes = list(range(len(gradient.shape) - 1))
                gradient -= tf.reduce_mean(gradient, axis=axes, keepdims=True)
            centralized.append((gradient, variable))
        return super(CentralizedSGD, self).apply_gradients(centralized, *args, **kwargs)

    def get_config(self):
        config = super(CentralizedSGD, self).get_config()
        config.update({"centralize": self.centralize})
        return config


rng = np.random.RandomState(0)
x = rng.normal(size=(256, 6)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("float32")[:, np.newaxis]

model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(8, use_bias=False, input_shape=(6,)),
        tf.keras.layers.Dense(1, dtype="float32"),
    ]
)
kernel = model.layers[0].kernel
before = tf.reduce_mean(kernel, axis=0).numpy()

model.compile(
    optimizer=CentralizedSGD(0.2, momentum=0.9),
    loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[tf.keras.metrics.BinaryAccuracy(threshold=0.0)],
)
assert isinstance(model.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
losses = model.fit(x, y, batch_size=32, epochs=5, verbose=0).history["loss"]

# What is taken out of every gradient cannot move.
np.testing.assert_allclose(tf.reduce_mean(kernel, axis=0).numpy(), before, atol=1e-5)
assert losses[-1] < 0.6 * losses[0], losses
assert model.optimizer.centralize
assert model.optimizer.get_config()["inner_optimizer"]["config"]["centralize"]
print("subclassed_optimizer: the loss fell")
