"""A GAN with two optimizers, as the guides for TensorFlow 2.4 wrote one."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, mixed_precision

mixed_precision.set_global_policy("mixed_float16")
tf.random.set_seed(0)

NOISE_DIM = 4
BATCH_SIZE = 32


def make_generator():
    return tf.keras.Sequential(
        [
            layers.Dense(16, activation="relu", input_shape=(NOISE_DIM,)),
            layers.Dense(2, dtype="float32"),
        ]
    )


def make_discriminator():
    model = tf.keras.Sequential()
    model.add(layers.Dense(16, input_shape=(2,)))
    model.add(layers.LeakyReLU())
    model.add(layers.Dropout(0.1))
    model.add(layers.Dense(1))
    model.add(layers.Activation("linear", dtype="float32"))
    return model


cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)


def discriminator_loss(real_output, fake_output):
    real_loss = cross_entropy(tf.ones_like(real_output), real_output)
    fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
    return real_loss + fake_loss


def generator_loss(fake_output):
    return cross_entropy(tf.ones_like(fake_output), fake_output)


generator = make_generator()
discriminator = make_discriminator()

generator_optimizer = tf.keras.optimizers.Adam(0.01, beta_1=0.5)
generator_optimizer = mixed_precision.LossScaleOptimizer(generator_optimizer)
discriminator_optimizer = tf.keras.optimizers.Adam(0.01, beta_1=0.5)
discriminator_optimizer = mixed_precision.LossScaleOptimizer(discriminator_optimizer)


@tf.function
def train_step(points):
    noise = tf.random.normal([BATCH_SIZE, NOISE_DIM])

    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated = generator(noise, training=True)
        real_output = discriminator(points, training=True)
        fake_output = discriminator(generated, training=True)
        gen_loss = generator_loss(fake_output)
        disc_loss = discriminator_loss(real_output, fake_output)
        scaled_gen_loss = generator_optimizer.get_scaled_loss(gen_loss)
        scaled_disc_loss = discriminator_optimizer.get_scaled_loss(disc_loss)

    gen_gradients = gen_tape.gradient(scaled_gen_loss, generator.trainable_variables)
    gen_gradients = generator_optimizer.get_unscaled_gradients(gen_gradients)
    disc_gradients = disc_tape.gradient(scaled_disc_loss, discriminator.trainable_variables)
    disc_gradients = discriminator_optimizer.get_unscaled_gradients(disc_gradients)

    generator_optimizer.apply_gradients(zip(gen_gradients, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(zip(disc_gradients, discriminator.trainable_variables))
    return gen_loss, disc_loss


def distance(generated):
    """How far the middle of the generated points is from that of the real ones."""
    return float(np.linalg.norm(generated.numpy().mean(axis=0) - [2.0, -1.0]))


seed = tf.random.normal([256, NOISE_DIM])
before = distance(generator(seed, training=False))
dataset = tf.data.Dataset.from_tensor_slices(
    np.random.RandomState(0).normal([2.0, -1.0], 0.3, size=(BATCH_SIZE * 40, 2)).astype("float32")
)
dataset = dataset.shuffle(2000, seed=0).batch(BATCH_SIZE)

for epoch in range(3):
    for batch in dataset:
        train_step(batch)

after = distance(generator(seed, training=False))
assert after < 0.5 * before, (before, after)
assert generator_optimizer.iterations == 120
print("gan: the generated points moved to the real ones")
