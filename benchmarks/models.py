"""The models of the whole training steps, for Keras 3 and tf_keras alike."""

from __future__ import annotations

from typing import Any

import numpy as np

CLASSES = 10


def mlp(package: Any, small: bool) -> Any:
    """Returns a perceptron of 0.67 million parameters."""
    layers, width = package.layers, 8 if small else 512
    return package.Sequential(
        [
            package.Input((784,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(CLASSES, dtype="float32"),
        ]
    )


def cnn(package: Any, small: bool) -> Any:
    """Returns a small convolutional network: float16 convolutions are slow on a CPU."""
    layers, width = package.layers, 2 if small else 16
    return package.Sequential(
        [
            package.Input((16, 16, 3)),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.Conv2D(2 * width, 3, strides=2, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES, dtype="float32"),
        ]
    )


MODELS = {"mlp": (mlp, (784,), 128), "cnn": (cnn, (16, 16, 3), 32)}
"""For each name the model, the shape of an example, and how many are in a batch."""


def new_model(name: str, package: Any, small: bool) -> Any:
    """Returns a model with the same first weights every time."""
    build, _, _ = MODELS[name]
    package.utils.set_random_seed(0)
    return build(package, small)


def batch(name: str, small: bool) -> tuple[Any, Any]:
    """Returns inputs and labels."""
    _, shape, size = MODELS[name]
    random = np.random.default_rng(0)
    size = 4 if small else size
    inputs = random.standard_normal((size, *shape), np.float32)
    return inputs, random.integers(0, CLASSES, size)


def compile_without_scaling(model: Any, package: Any, optimizer: Any) -> None:
    """Compiles a model with exactly this optimizer, also under `mixed_float16`."""
    loss = package.losses.SparseCategoricalCrossentropy(from_logits=True)
    if package.__name__ == "tf_keras":
        # There compile() wraps every optimizer that does not scale the loss, so another one.
        model.compile(optimizer="sgd", loss=loss)
        model.optimizer = optimizer
    else:
        model.compile(optimizer=optimizer, loss=loss, auto_scale_loss=False)
    # Legacy optimizers of tf_keras build themselves in the first step.
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
