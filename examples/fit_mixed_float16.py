"""Trains a small Keras model in float16 with loss scaling, and shows what the scale did."""

import keras
import numpy as np

import lossscale

keras.utils.set_random_seed(0)
keras.mixed_precision.set_dtype_policy("mixed_float16")

model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(1, dtype="float32"),
    ]
)
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.01), dynamic_growth_steps=50)
model.compile(optimizer, loss="mse")

x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
y = x[:, :1] * x[:, 1:2]
history = model.fit(x, y, batch_size=16, epochs=5, verbose=0)

print(f"loss {history.history['loss'][0]:.2f} -> {history.history['loss'][-1]:.2f}")
print(f"loss scale {optimizer.initial_scale:.0f} -> {float(optimizer.loss_scale):.0f}")
print(f"{int(optimizer.steps_skipped)} of {int(optimizer.iterations)} steps skipped")
