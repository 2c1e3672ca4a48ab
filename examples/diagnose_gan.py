"""Diagnoses a GAN: two losses, each with the variables that its optimizer trains."""

import keras
import numpy as np
from keras import ops

from lossscale.diagnosis import diagnose

keras.utils.set_random_seed(0)


def network(inputs, outputs, name):
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(outputs)]
    return keras.Sequential([keras.Input((inputs,)), *layers], name=name)


class Gan(keras.Model):
    def __init__(self):
        super().__init__(name="gan")
        self.generator = network(2, 4, "generator")
        self.critic = network(4, 1, "critic")

    def train_step(self, data):
        raise NotImplementedError("`diagnose` calls loss_fn instead")


def loss_fn(model, batch):
    real, noise, _ = batch
    fake = model.generator(noise, training=True)
    of_real = ops.cast(model.critic(real, training=True), "float32")
    of_fake = ops.cast(model.critic(fake, training=True), "float32")
    return {
        "critic": ops.mean(ops.softplus(-of_real)) + ops.mean(ops.softplus(of_fake)),
        "generator": ops.mean(ops.softplus(-of_fake)),
    }


rng = np.random.default_rng(0)
real, noise = rng.normal(size=(64, 4)), rng.normal(size=(64, 2))
model = Gan()
owned = {
    "critic": model.critic.trainable_variables,
    "generator": model.generator.trainable_variables,
}
report = diagnose(model, real, noise, loss_fn=loss_fn, parameters=owned)
print({name: each.verdict.value for name, each in report.recommendations.items()})
