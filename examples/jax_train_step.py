# KERAS_BACKEND=jax
"""A Keras model on JAX with its own `train_step`, trained with `fit` in float16."""

import jax
import keras
import numpy as np

import lossscale


class Model(keras.Sequential):
    def train_step(self, state, data):
        weights, others, optimizer_state, metrics = state
        x, y = data

        def scaled_loss(weights, others):
            prediction, others = self.stateless_call(weights, others, x, training=True)
            loss = keras.ops.mean((prediction - y) ** 2)
            with keras.StatelessScope(list(zip(self.optimizer.variables, optimizer_state))):
                return self.optimizer.scale_loss(loss), (loss, others)

        grads, (loss, others) = jax.grad(scaled_loss, has_aux=True)(weights, others)
        weights, optimizer_state = self.optimizer.stateless_apply(optimizer_state, grads, weights)
        return {"loss": loss}, (weights, others, optimizer_state, metrics)


keras.mixed_precision.set_dtype_policy("mixed_float16")
model = Model([keras.Input((8,)), keras.layers.Dense(1, dtype="float32")])
model.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam()))
model.fit(np.ones((64, 8)), np.ones((64, 1)), verbose=0)
print(float(model.optimizer.loss_scale))  # 32768.0
