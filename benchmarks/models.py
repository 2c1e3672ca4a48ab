"""The models for Keras 3 and tf_keras; each row names its package."""

from __future__ import annotations

import functools
import importlib
import pathlib
import tempfile
from typing import Any

import numpy as np

import lossscale
from benchmarks.methods import MONITORS, SCALE, SKIPPED, method
from benchmarks.rows import Row
from benchmarks.timing import Program

CLASSES = 10
OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "Adam": ("Adam", {"learning_rate": 1e-3}),
    "SGD": ("SGD", {"learning_rate": 1e-2}),
    "SGD momentum": ("SGD", {"learning_rate": 1e-2, "momentum": 0.9}),
    "AdamW clipnorm": ("AdamW", {"learning_rate": 1e-3, "weight_decay": 1e-2, "clipnorm": 1.0}),
}


def package(row: Row) -> Any:
    """Returns `keras` or `tf_keras`."""
    return importlib.import_module("tf_keras" if "tf_keras" in row.wrapper else "keras")


def new_optimizer(row: Row, name: str) -> Any:
    """Returns the optimizer of a method around a row's inner optimizer, except for floors."""
    optimizers, (kind, settings) = package(row).optimizers, OPTIMIZERS[row.optimizer]
    if row.wrapper == "tf_keras-legacy":
        optimizers = optimizers.legacy
    new_inner = functools.partial(getattr(optimizers, kind), **settings)
    wrapped = method(name).wrapped
    return new_inner() if wrapped is None else wrapped(new_inner, package(row))


def _read(gradients: list[Any]) -> Any:
    return sum(importlib.import_module("keras").ops.sum(gradient) for gradient in gradients)


def _unscale(gradients: list[Any], scale: Any) -> list[Any]:
    reciprocal = 1.0 / scale
    return [gradient * reciprocal for gradient in gradients]


def with_floors(row: Row, name: str, read: Any = _read, unscale: Any = _unscale) -> Any:
    """Returns the Keras 3 optimizer of a method; for a floor, it reads or unscales first."""
    optimizer, floor, ops = new_optimizer(row, name), method(name), package(row).ops
    if not (floor.reads or floor.unscales):
        return optimizer
    inner = type(optimizer)

    class Floor(inner):  # type: ignore[misc, valid-type]
        def scale_loss(self, loss: Any) -> Any:
            return loss * ops.cast(self._scale, loss.dtype) if floor.unscales else loss

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            if floor.reads:
                self._total.assign(read(grads))
            if floor.unscales:
                grads = unscale(grads, ops.convert_to_tensor(self._scale))
            super().apply(grads, trainable_variables)

    # Variables, so that the scale is not a constant, and the sum is not optimized away.
    optimizer._scale = optimizer.add_variable((), initializer="ones", name="floor_scale")
    optimizer._scale.assign(SCALE)
    optimizer._total = optimizer.add_variable((), name="floor_total")
    optimizer.__class__ = Floor
    return optimizer


def alone(row: Row, name: str, *floors: Any) -> tuple[Any, list[Any]]:
    """Returns a built Keras 3 optimizer, and its variables."""
    variables = [package(row).Variable(value) for value in row.workload.values()]
    optimizer = with_floors(row, name, *floors)
    optimizer.build(variables)
    if method(name).wrapped is not None:
        optimizer.scale_loss(1.0)
    return optimizer, variables


def gradients(row: Row, name: str) -> list[Any]:
    """Returns the gradients for a method: scaled, and overflowing if it skips."""
    scale = SCALE if method(name).scaled else 1.0
    return row.workload.gradients(scale, overflow=name.endswith(SKIPPED))


def mlp(layers: Any, small: bool) -> list[Any]:
    """Returns the layers of a perceptron of 0.67 million parameters."""
    hidden = [layers.Dense(512, activation="relu") for _ in range(2)] if not small else []
    return [layers.Input((784,)), *hidden, layers.Dense(CLASSES, dtype="float32")]


def cnn(layers: Any, small: bool) -> list[Any]:
    """Returns the layers of a small convolutional network: float16 is slow on a CPU."""
    width = 2 if small else 16
    return [
        layers.Input((16, 16, 3)),
        layers.Conv2D(width, 3, padding="same", activation="relu"),
        layers.Conv2D(2 * width, 3, strides=2, padding="same", activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(CLASSES, dtype="float32"),
    ]


MODELS = {"mlp": (mlp, (784,), 128), "cnn": (cnn, (16, 16, 3), 32)}
"""Maps a name to the layers, the shape of an example, and the batch size."""


def training(row: Row, name: str, small: bool) -> tuple[Any, Any, tuple[Any, Any]]:
    """Returns an optimizer, a model compiled with it, always with the same weights, and a batch."""
    keras, (build, shape, size) = package(row), MODELS[row.model]
    keras.mixed_precision.set_global_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(build(keras.layers, small))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if keras.__name__ == "tf_keras":
        # compile() would wrap a bare optimizer, so the optimizer is set afterwards.
        model.compile(optimizer="sgd", loss=loss)
        model.optimizer = optimizer = new_optimizer(row, name)
    else:
        optimizer = with_floors(row, name)
        model.compile(optimizer=optimizer, loss=loss, auto_scale_loss=False)
    # Legacy optimizers of tf_keras are built in the first step.
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    random, size = np.random.default_rng(0), 4 if small else size
    inputs = random.standard_normal((size, *shape), np.float32)
    return optimizer, model, (inputs, random.integers(0, CLASSES, size))


class Epoch(Program):
    """An epoch of `fit` with a monitor that writes its records.

    Its many short steps are the worst case: the cost of a monitor per step does not grow with the
    model.
    """

    def __init__(self, row: Row, name: str, small: bool) -> None:
        self.inner_steps, self._batch = 2 if small else 300, 64
        keras, examples = package(row), self.inner_steps * self._batch
        keras.mixed_precision.set_global_policy("float32")
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(256, activation="relu") for _ in range(2)]
        self._model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(CLASSES)])
        self._model.compile(
            lossscale.LossScaleOptimizer(keras.optimizers.Adam()),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        random = np.random.default_rng(0)
        self._x = random.normal(size=(examples, 64)).astype("float32")
        self._y = random.integers(0, CLASSES, examples)
        self._callbacks: list[Any] = []
        settings = MONITORS[name]
        if settings:
            path = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
            part = importlib.import_module(f"lossscale.{keras.__name__}")
            monitor = part.LossScaleMonitor(path, **settings)
            self._callbacks = [monitor]

    def step(self) -> None:
        # `fit` waits for its last step.
        data, callbacks = (self._x, self._y), list(self._callbacks)
        self._model.fit(*data, batch_size=self._batch, verbose=0, callbacks=callbacks)
