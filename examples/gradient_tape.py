"""The documented calls of a custom training loop, on the TensorFlow backend."""

import keras
import tensorflow as tf

import lossscale

optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.25))
weight = tf.Variable(4.0)


@tf.function
def train_step():
    with tf.GradientTape() as tape:
        loss = (weight - 1.0) ** 2
        scaled_loss = optimizer.get_scaled_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, [weight])
    gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    optimizer.apply_gradients(zip(gradients, [weight]))  # the loss scale moves here
    return loss


for step in range(5):
    loss = train_step()
    print(f"step {step}: loss {float(loss):.4f}, weight {float(weight):.4f}")

# One call that does all of the above.
optimizer.minimize(lambda: (weight - 1.0) ** 2, [weight])
print(f"after minimize: weight {float(weight):.4f}")
