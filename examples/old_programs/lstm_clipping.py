"""An LSTM whose gradients are clipped, with a learning rate that decays, saved at the end."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.keras.mixed_precision import experimental as mixed_precision

mixed_precision.set_policy("mixed_float16")
tf.random.set_seed(0)

VOCABULARY = 6
CLIP_NORM = 1.0


def build_model():
    return tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(VOCABULARY, 8),
            tf.keras.layers.LSTM(16, return_sequences=True),
            tf.keras.layers.Dense(VOCABULARY, dtype="float32"),
        ]
    )


# A sequence that repeats itself: each token follows from the one before.
text = np.tile(np.arange(VOCABULARY), 200)
sequences = tf.data.Dataset.from_tensor_slices(text).batch(9, drop_remainder=True)
dataset = sequences.map(lambda chunk: (chunk[:-1], chunk[1:])).batch(16, drop_remainder=True)

model = build_model()
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
schedule = tf.keras.optimizers.schedules.ExponentialDecay(
    0.05, decay_steps=20, decay_rate=0.9, staircase=True
)
optimizer = mixed_precision.LossScaleOptimizer(tf.keras.optimizers.Adam(schedule), "dynamic")


@tf.function
def train_step(source, target):
    with tf.GradientTape() as tape:
        logits = model(source, training=True)
        loss = loss_fn(target, logits)
        scaled_loss = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(gradients)
    gradients, norm = tf.clip_by_global_norm(gradients, CLIP_NORM)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss, norm


with tempfile.TemporaryDirectory() as folder:
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=1)
    losses = []
    for epoch in range(6):
        for source, target in dataset:
            loss, norm = train_step(source, target)
            assert norm > 0
        losses.append(float(loss))
        manager.save()
    steps, scale = int(optimizer.iterations), float(optimizer.loss_scale())
    optimizer.iterations.assign(0)
    checkpoint.restore(manager.latest_checkpoint).expect_partial()
    assert os.path.exists(manager.latest_checkpoint + ".index")

assert losses[-1] < 0.5 * losses[0], losses
assert int(optimizer.iterations) == steps
assert float(optimizer.loss_scale()) == scale
print("lstm_clipping: the loss fell")
