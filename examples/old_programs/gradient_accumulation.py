"""Gradients accumulated by hand over several batches, as in programs for TensorFlow 2.2."""

import numpy as np
import tensorflow as tf

policy = tf.keras.mixed_precision.experimental.Policy("mixed_float16", loss_scale="dynamic")
tf.keras.mixed_precision.experimental.set_policy(policy)
print("Compute dtype: %s" % policy.compute_dtype)
print("Variable dtype: %s" % policy.variable_dtype)
print("Loss scale: %s" % policy.loss_scale)
tf.random.set_seed(0)

ACCUMULATION_STEPS = 4

inputs = tf.keras.Input(shape=(8,), name="features")
x = tf.keras.layers.Dense(16, activation="relu", name="dense_1")(inputs)
x = tf.keras.layers.BatchNormalization()(x)
x = tf.keras.layers.Dense(3, name="dense_logits")(x)
outputs = tf.keras.layers.Activation("softmax", dtype="float32", name="predictions")(x)
model = tf.keras.Model(inputs=inputs, outputs=outputs)

loss_object = tf.keras.losses.SparseCategoricalCrossentropy()
optimizer = tf.keras.optimizers.SGD(learning_rate=0.2, momentum=0.9)
optimizer = tf.keras.mixed_precision.experimental.LossScaleOptimizer(
    optimizer, loss_scale=policy.loss_scale
)

accumulated = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in model.trainable_variables]
train_loss = tf.keras.metrics.Mean(name="train_loss")


@tf.function
def accumulate_step(features, labels):
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss = loss_object(labels, predictions)
        scaled_loss = optimizer.get_scaled_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    for total, gradient in zip(accumulated, gradients):
        total.assign_add(gradient / ACCUMULATION_STEPS)
    train_loss(loss)


@tf.function
def apply_step():
    optimizer.apply_gradients(zip(accumulated, model.trainable_variables))
    for total in accumulated:
        total.assign(tf.zeros_like(total))


rng = np.random.RandomState(0)
data = rng.normal(size=(256, 8)).astype("float32")
target = np.argmax(data[:, :3], axis=1)
dataset = tf.data.Dataset.from_tensor_slices((data, target)).batch(16)

losses = []
for epoch in range(4):
    for step, (features, labels) in enumerate(dataset):
        accumulate_step(features, labels)
        if (step + 1) % ACCUMULATION_STEPS == 0:
            apply_step()
    losses.append(float(train_loss.result()))
    train_loss.reset_state() if hasattr(train_loss, "reset_state") else train_loss.reset_states()

assert losses[-1] < 0.7 * losses[0], losses
assert optimizer.iterations == 16
assert optimizer.loss_scale() > 0
print("gradient_accumulation: the loss fell")
