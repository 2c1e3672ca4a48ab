"""Keras 3 on TensorFlow: eager, in a `tf.function`, and compiled by XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import models
from benchmarks.frameworks.floors import with_floors
from benchmarks.frameworks.replicas import Replicated
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
    "Replicated",
    "Train",
    "devices",
    "forget",
    "on_device",
    "optimizers",
    "versions",
]

PACKAGE = keras


def versions() -> dict[str, str]:
    """The versions of what is measured."""
    return {"keras": keras.__version__, "tensorflow": tf.__version__}


def optimizers(shell: str) -> Any:
    """The module of the inner optimizers."""
    return keras.optimizers


class Apply(Step):
    """`apply` on gradients that were computed before."""

    def __init__(
        self,
        method: Method,
        workload: Workload,
        new_inner: Callable[..., Any],
        *,
        mode: str,
        scale: float,
    ) -> None:
        self.variables = [keras.Variable(value) for value in workload.values()]
        self.optimizer = method.optimizer(new_inner, scale, keras)
        self.optimizer.build(self.variables)
        self.optimizer.scale_loss(1.0)
        gradients = tensors(workload, np.float32(scale if method.scaled else 1))
        floors = Floors(method, scale)
        super().__init__(
            lambda: self.optimizer.apply(floors.before(gradients), self.variables),
            mode,
            self.optimizer.variables[0].value,
        )

    def parameters(self) -> list[Any]:
        return [variable.numpy() for variable in self.variables]


class Train(Step):
    """The train step of Keras' trainer."""

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
        self._model = models.new_model(model_name, keras, small)
        optimizer = with_floors(method.optimizer(new_inner, scale, keras), method, scale)
        models.compile_without_scaling(self._model, keras, optimizer)
        data = tuple(tf.constant(array) for array in models.batch(model_name, small))
        self._model._symbolic_build(data_batch=data)

        def step() -> None:
            self._model.train_step(data)

        super().__init__(step, mode, optimizer.variables[0].value)
        self.first_parameters = self.parameters()

    def parameters(self) -> list[Any]:
        return [variable.numpy() for variable in self._model.trainable_variables]
