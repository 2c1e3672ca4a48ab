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


def loss_of_critic(model, batch):
    real, noise, _ = batch
    fake = model.generator(noise, training=True)
    of_real = ops.cast(model.critic(real, training=True), "float32")
    of_fake = ops.cast(model.critic(fake, training=True), "float32")
    return ops.mean(ops.softplus(-of_real)) + ops.mean(ops.softplus(of_fake))


def loss_of_generator(model, batch):
    _, noise, _ = batch
    of_fake = model.critic(model.generator(noise, training=True), training=True)
    return ops.mean(ops.softplus(-ops.cast(of_fake, "float32")))


rng = np.random.default_rng(0)
real, noise = rng.normal(size=(64, 4)), rng.normal(size=(64, 2))
model = Gan()
for loss_fn, part in ((loss_of_critic, model.critic), (loss_of_generator, model.generator)):
    trained = part.trainable_variables
    report = diagnose(model, real, noise, loss_fn=loss_fn, parameters=trained)
    print(f"{part.name}: loss scaling {report.verdict.value}")
