"""What is trained: small networks of the kinds that people train in float16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from benchmarks.calibration import data
from benchmarks.calibration.data import Split


@dataclasses.dataclass(frozen=True)
class Task:
    """A training, up to the number of outputs that its loss is averaged over.

    Attributes:
        name: For the table.
        split: Returns the data.
        layers: Returns the layers after the input, made under the dtype policy in force.
        loss: A Keras loss by name.
        optimizer: Returns the optimizer for a loss that was divided by a number: one that takes
            the same steps then.
        batch: Samples in a step.
        steps: Steps of the training.
        quality: A Keras metric by name, or "bits" for a cross-entropy in bits: an accuracy may
            hide that a model has become unsure.
        outputs: What the loss is divided by besides the samples, one training for each: how many
            outputs a sample would have, or how many more samples a step.
        noise: How much of the quality is no more than luck.
    """

    name: str
    split: Callable[[], Split]
    layers: Callable[[Split], list[Any]]
    loss: str
    optimizer: Callable[[float], Any]
    batch: int
    steps: int
    quality: str
    outputs: tuple[int, ...]
    noise: float

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the quality is better."""
        return "accuracy" in self.quality


class Attention(layers.Layer):
    """A block of a transformer: attention and a dense layer, each normalized and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.dense = [layers.Dense(2 * width, activation="gelu"), layers.Dense(width)]

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        for norm in self.norms:
            norm.build(shape)
        self.dense[0].build(shape)
        self.dense[1].build((*shape[:-1], self.dense[0].units))
        self.built = True

    def call(self, x: Any) -> Any:
        normal = self.norms[0](x)
        x = x + self.attention(normal, normal)
        return x + self.dense[1](self.dense[0](self.norms[1](x)))


def _sgd(rate: float, outputs: float) -> Any:
    return keras.optimizers.SGD(rate * outputs, momentum=0.9)


def _adam(rate: float, outputs: float) -> Any:
    return keras.optimizers.Adam(rate, epsilon=1e-7 / outputs)


def _softmax(classes: int) -> list[Any]:
    # float32, as Keras advises; its gradient enters the float16 part where the logits are.
    return [layers.Dense(classes), layers.Activation("softmax", dtype="float32")]


def _dense(split: Split) -> list[Any]:
    return [layers.Flatten(), layers.Dense(64, activation="relu"), *_softmax(10)]


def _pixels(split: Split) -> list[Any]:
    return [
        layers.Conv2D(8, 3, padding="same", activation="relu"),
        layers.Conv2D(8, 3, padding="same", activation="relu"),
        layers.Conv2D(1, 1),
        layers.Activation("sigmoid", dtype="float32"),
    ]


def _characters(split: Split) -> list[Any]:
    signs = int(split.x.max()) + 1
    return [
        layers.Embedding(signs, 16),
        layers.Flatten(),
        layers.Dense(128, activation="tanh"),
        *_softmax(signs),
    ]


def _recurrent(split: Split) -> list[Any]:
    return [layers.GRU(32), layers.Dense(1), layers.Activation("linear", dtype="float32")]


def _transformer(split: Split) -> list[Any]:
    return [
        layers.Dense(32),
        Attention(32, heads=2),
        Attention(32, heads=2),
        layers.LayerNormalization(),
        layers.GlobalAveragePooling1D(),
        *_softmax(10),
    ]


def _embedding(split: Split) -> list[Any]:
    return [
        layers.Embedding(int(split.x.max()) + 1, 32),
        layers.GlobalAveragePooling1D(),
        *_softmax(10),
    ]


_CATEGORIES = "sparse_categorical_crossentropy"

TASKS = (
    Task(
        "digits, dense layers",
        data.digits,
        _dense,
        _CATEGORIES,
        functools.partial(_sgd, 0.1),
        64,
        440,
        "bits",
        (1, 2**10, 2**15, 2**16, 2**24),
        0.02,
    ),
    Task(
        "pixels of 512 x 512, convolutions",
        functools.partial(data.shapes, 4, 512),
        _pixels,
        "binary_crossentropy",
        functools.partial(_sgd, 0.3),
        4,
        60,
        "bits",
        (1, 2**2, 2**4, 2**6),
        0.005,
    ),
    Task(
        "characters, embedding and dense layers",
        data.text,
        _characters,
        _CATEGORIES,
        functools.partial(_adam, 3e-3),
        512,
        400,
        "bits",
        (1, 2**6, 2**9, 2**11, 2**15),
        0.05,
    ),
    Task(
        "sums over 32 steps, GRU",
        data.sums,
        _recurrent,
        "mean_squared_error",
        functools.partial(_adam, 1e-2),
        128,
        400,
        "mean_squared_error",
        (1, 2**7, 2**13, 2**20),
        0.006,
    ),
    Task(
        "digits, transformer",
        data.digits,
        _transformer,
        _CATEGORIES,
        functools.partial(_adam, 3e-3),
        64,
        330,
        "bits",
        (1, 2**8, 2**12, 2**14, 2**20),
        0.1,
    ),
    Task(
        "topics of 32 words, embedding",
        data.baskets,
        _embedding,
        _CATEGORIES,
        functools.partial(_adam, 1e-2),
        128,
        200,
        "bits",
        (1, 2**6, 2**10, 2**12, 2**16),
        0.01,
    ),
)
"""The plain training comes first in each. Above that the loss is divided by `outputs` more."""
