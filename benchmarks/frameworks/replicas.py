"""Keras 3 on TensorFlow with replicas: a MirroredStrategy over virtual CPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.frameworks.tensorflow_graphs import Step, tensors
from benchmarks.methods import Method
from benchmarks.workloads import Workload


@functools.cache
def strategy(replicas: int) -> Any:
    """Returns the process' strategy: two of them would mix up each other's sums."""
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


class Replicated(Step):
    """`apply` on every replica, each with gradients of its own, in a `tf.function`."""

    def __init__(
        self,
        method: Method,
        workload: Workload,
        new_inner: Callable[..., Any],
        replicas: int,
        *,
        scale: float,
    ) -> None:
        replicated = strategy(replicas)
        with replicated.scope():
            self.variables = [keras.Variable(value) for value in workload.values()]
            self.optimizer = method.optimizer(new_inner, scale, keras)
            self.optimizer.build(self.variables)
        factor = np.float32(scale if method.scaled else 1)
        gradients = replicated.experimental_distribute_values_from_function(
            lambda context: tuple(tensors(workload, factor))
        )

        def on_replica(gradients: Any) -> None:
            self.optimizer.scale_loss(1.0)
            self.optimizer.apply(list(gradients), self.variables)

        super().__init__(
            lambda: replicated.run(on_replica, args=(gradients,)),
            "function",
            self.optimizer.variables[0].value,
        )

    def parameters(self) -> list[Any]:
        return [variable.numpy() for variable in self.variables]

    def graph(self) -> Any:
        """The traced graph, with shapes."""
        return self._run.get_concrete_function().graph.as_graph_def(add_shapes=True)
