"""A model with a custom `train_step`, compiled with the name of an optimizer."""

import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.mixed_precision.set_global_policy("mixed_float16")
tf.random.set_seed(0)

loss_fn = keras.losses.MeanSquaredError()


class Regressor(keras.Model):
    def __init__(self, units):
        super(Regressor, self).__init__()
        self.hidden = keras.layers.Dense(units, activation="tanh")
        self.out = keras.layers.Dense(1, dtype="float32")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    def call(self, inputs, training=False):
        return self.out(self.hidden(inputs))

    def train_step(self, data):
        x, y = data
        mixed = isinstance(self.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)

        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = loss_fn(y, y_pred)
            if mixed:
                scaled_loss = self.optimizer.get_scaled_loss(loss)

        if mixed:
            gradients = tape.gradient(scaled_loss, self.trainable_variables)
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        else:
            gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))

        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(tf.reduce_mean((y - y_pred) ** 2))
        self.mae_metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


rng = np.random.RandomState(0)
x = rng.normal(size=(256, 4)).astype("float32")
y = np.sin(x[:, :1]) + 0.5 * x[:, 1:2]

model = Regressor(16)
model.compile(optimizer="adam")
model.optimizer.learning_rate = 0.01
history = model.fit(x, y, batch_size=32, epochs=8, validation_split=0.25, verbose=0)

losses = history.history["loss"]
assert losses[-1] < 0.5 * losses[0], losses
assert history.history["val_loss"][-1] < 0.5 * history.history["val_loss"][0]
assert isinstance(model.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
assert float(model.optimizer.loss_scale) == 2.0**15
print("custom_train_step: the loss fell")
