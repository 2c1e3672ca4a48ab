"""Diagnoses a contrastive loss, whose negatives are the other rows of the batch."""

import keras
import numpy as np
from keras import ops

from lossscale.diagnosis import diagnose

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="tower")], name="pairs")


def loss_fn(model, batch):
    one, other, _ = batch
    one, other = (ops.cast(model(each, training=True), "float32") for each in (one, other))
    one, other = ops.normalize(one), ops.normalize(other)
    logits = ops.matmul(one, ops.transpose(other)) / 0.1
    return -ops.mean(ops.diagonal(ops.log_softmax(logits)))


x = np.random.default_rng(0).normal(size=(128, 8)).astype("float32")
other = x + 0.1 * np.random.default_rng(1).normal(size=x.shape).astype("float32")
report = diagnose(model, x, other, loss_fn=loss_fn, batch_size=64)
print(report.verdict.value)
