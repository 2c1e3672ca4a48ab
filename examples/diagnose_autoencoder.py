"""Diagnoses a variational autoencoder, whose loss is in its own `train_step`."""

import keras
import numpy as np
from keras import ops

from lossscale.diagnosis import diagnose

keras.utils.set_random_seed(0)
seeds = keras.random.SeedGenerator(0)


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__(name="vae")
        self.encoder = keras.layers.Dense(4, name="encoder")
        self.decoder = keras.layers.Dense(3, name="decoder")

    def call(self, x, training=None):
        mean, log_var = ops.split(self.encoder(x), 2, axis=-1)
        noise = ops.cast(keras.random.normal(ops.shape(mean), seed=seeds), mean.dtype)
        return self.decoder(mean + ops.exp(log_var / 2) * noise), mean, log_var

    def train_step(self, data):
        raise NotImplementedError("`diagnose` calls loss_fn instead")


def loss_fn(model, batch):
    x, _, _ = batch
    decoded, mean, log_var = (ops.cast(each, "float32") for each in model(x, training=True))
    divergence = ops.mean(ops.exp(log_var) + mean**2 - 1 - log_var) / 2
    return ops.mean((decoded - x) ** 2) + divergence


x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
model = Autoencoder()
model(x)
print(diagnose(model, x, loss_fn=loss_fn).verdict.value)
