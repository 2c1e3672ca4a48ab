"""Measures whether a network that labels the pixels of an image needs loss scaling in float16."""

import keras
import numpy as np

from lossscale.diagnosis import diagnose

keras.utils.set_random_seed(0)


def pixel_labeller():
    """Finds the bright parts of an image: a label for each pixel."""
    model = keras.Sequential(
        [
            keras.Input((None, None, 1)),
            keras.layers.Conv2D(8, 8, strides=8, activation="relu", name="edges"),
            keras.layers.Conv2D(8, 3, padding="same", activation="relu", name="shapes"),
            keras.layers.Conv2D(1, 1, name="labels"),
            keras.layers.UpSampling2D(8, name="pixels"),
            keras.layers.Activation("sigmoid", name="shares"),
        ],
        name="pixel_labeller",
    )
    model.compile("adam", loss="binary_crossentropy")
    return model


# The loss is averaged over all pixels of a batch, so that gradients shrink as images grow.
reports = {}
for side in (32, 1024):
    images = np.random.default_rng(0).uniform(size=(8, side, side, 1)).astype("float32")
    labels = (images > 0.9).astype("float32")
    reports[side] = diagnose(pixel_labeller(), images, labels, batch_size=8)

print(reports[1024])
print()
for side, report in reports.items():
    print(f"{side} x {side} pixels: loss scaling {report.verdict.value}")
