"""tf_keras (Keras 2), with its new and its legacy optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import models
from benchmarks.frameworks.tensorflow_graphs import (
    GRAPH,
    MEMORY,
    Floors,
    Step,
    devices,
    forget,
    on_device,
    tensors,
)
from benchmarks.methods import Method
from benchmarks.workloads import Workload

__all__ = [
    "GRAPH",
    "MEMORY",
    "PACKAGE",
    "Apply",
    "Train",
    "devices",
    "forget",
    "on_device",
    "optimizers",
    "versions",
]

PACKAGE = tf_keras


def versions() -> dict[str, str]:
    """The versions of what is measured."""
    return {"tf_keras": tf_keras.__version__, "tensorflow": tf.__version__}


def optimizers(shell: str) -> Any:
    """The module of the inner optimizers of this family."""
    return tf_keras.optimizers.legacy if shell == "tf_keras-legacy" else tf_keras.optimizers


class Apply(Step):
    """`get_unscaled_gradients` and `apply_gradients` on gradients that were computed before."""

    def __init__(
        self,
        method: Method,
        workload: Workload,
        new_inner: Callable[..., Any],
        *,
        mode: str,
        scale: float,
    ) -> None:
        self.variables = [tf.Variable(value) for value in workload.values()]
        optimizer = method.optimizer(new_inner, scale, tf_keras)
        wraps = method.wrapped is not None
        if wraps:
            optimizer.get_scaled_loss(tf.constant(1.0))
        self.optimizer = optimizer
        gradients = tensors(workload, np.float32(scale if method.scaled else 1))
        floors = Floors(method, scale)

        def step() -> None:
            given = floors.before(gradients)
            if wraps:
                given = optimizer.get_unscaled_gradients(given)
            optimizer.apply_gradients(zip(given, self.variables, strict=True))

        super().__init__(step, mode, optimizer.iterations)

    def parameters(self) -> list[Any]:
        return [variable.numpy() for variable in self.variables]


class Train(Step):
    """The train step of tf_keras' trainer."""

    def __init__(
        self,
        method: Method,
        model_name: str,
        new_inner: Callable[..., Any],
        *,
        mode: str,
        scale: float,
        small: bool,
    ) -> None:
        self._model = models.new_model(model_name, tf_keras, small)
        optimizer = method.optimizer(new_inner, scale, tf_keras)
        models.compile_without_scaling(self._model, tf_keras, optimizer)
        data = tuple(tf.constant(array) for array in models.batch(model_name, small))

        def step() -> None:
            self._model.train_step(data)

        super().__init__(step, mode, optimizer.iterations)
        self.first_parameters = self.parameters()

    def parameters(self) -> list[Any]:
        return [variable.numpy() for variable in self._model.trainable_variables]
