"""Keras 3 on TensorFlow and tf_keras: eager, in a `tf.function`, and compiled by XLA."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# TensorFlow has no public name for it.
from tensorflow.python.framework.ops import gradient_registry

from benchmarks import models
from benchmarks.frameworks import Framework
from benchmarks.machine import peak_above_rest
from benchmarks.methods import SCALE, method
from benchmarks.rows import Row
from benchmarks.timing import Program
from benchmarks.workloads import Rows

# Each row makes functions of its own; TensorFlow takes that for retracing.
tf.get_logger().setLevel("ERROR")


class Step(Program):
    """A step of a stateful function, run in one of the modes.

    Args:
        function: Called without arguments.
        mode: "eager", "function" or "xla".
        counter: A variable that each step moves; reading it waits for the step.
        variables: What is trained.
    """

    def __init__(
        self, function: Callable[[], None], mode: str, counter: Any, variables: list[Any]
    ) -> None:
        def counted() -> None:
            self.traces += 1
            function()

        self._counter, self._variables, self._mode = counter, variables, mode
        self._run: Any = function
        if mode != "eager":
            self._run = tf.function(counted, jit_compile=mode == "xla", autograph=False)

    def step(self) -> None:
        self._run()

    def wait(self) -> None:
        self._counter.numpy()

    def parameters(self) -> list[Any]:
        return [variable.numpy() for variable in self._variables]

    def structure(self) -> dict[str, Any]:
        """The peak of memory, and nodes of the graph; under XLA instructions, not optimized."""
        found = {"memory_bytes": self._peak_memory()}
        if self._mode == "xla":
            text = self._run.experimental_get_compiler_ir()(stage="hlo")
            found["graph_size"] = len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", text, re.M))
        elif self._mode == "function":
            graph = self._run.get_concrete_function().graph.as_graph_def()
            nodes = (len(each.node_def) for each in graph.library.function)
            found["graph_size"] = len(graph.node) + sum(nodes)
        return found

    def _peak_memory(self) -> int | None:
        memory = tf.config.experimental
        try:
            memory.reset_memory_stats("CPU:0")
        except ValueError:
            # Without oneDNN, TensorFlow's allocator keeps no count.
            return peak_above_rest(self._run)
        rest = memory.get_memory_info("CPU:0")["current"]
        self._run()
        return memory.get_memory_info("CPU:0")["peak"] - rest


def _tensors(gradients: list[Any]) -> list[Any]:
    return [
        tf.IndexedSlices(tf.constant(g.values), tf.constant(g.rows), tf.constant(g.shape, tf.int64))
        if isinstance(g, Rows)
        else tf.constant(g)
        for g in gradients
    ]


def _read(gradients: list[Any]) -> Any:
    parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.add_n([tf.reduce_sum(part) for part in parts])


def _unscale(gradients: list[Any], scale: Any) -> list[Any]:
    reciprocal = tf.math.reciprocal(scale)
    return [tf.math.scalar_mul(reciprocal, gradient) for gradient in gradients]


def _alone(row: Row, name: str) -> Step:
    """`apply` of Keras 3 on gradients that were computed before."""
    optimizer, variables = models.alone(row, name, _read, _unscale)
    gradients = _tensors(models.gradients(row, name))
    counter = optimizer.variables[0].value
    return Step(lambda: optimizer.apply(gradients, variables), row.mode, counter, variables)


def _alone_with_tf_keras(row: Row, name: str) -> Step:
    """`get_unscaled_gradients` and `apply_gradients` on gradients that were computed before."""
    optimizer, floor = models.new_optimizer(row, name), method(name)
    variables = [tf.Variable(value) for value in row.workload.values()]
    gradients = _tensors(models.gradients(row, name))
    # Variables, so that no compiler knows the scale, and that the sum is not left out.
    scale, total = tf.Variable(SCALE), tf.Variable(0.0)
    if floor.wrapped is not None:
        optimizer.get_scaled_loss(tf.constant(1.0))

    def step() -> None:
        given = gradients
        if floor.reads:
            total.assign(_read(given))
        if floor.unscales:
            given = _unscale(given, scale)
        if floor.wrapped is not None:
            given = optimizer.get_unscaled_gradients(given)
        optimizer.apply_gradients(zip(given, variables, strict=True))

    return Step(step, row.mode, optimizer.iterations, variables)


def _training(row: Row, name: str, small: bool) -> Step:
    """The train step of the trainer."""
    optimizer, model, batch = models.training(row, name, small)
    data = tuple(tf.constant(array) for array in batch)
    if "tf_keras" in row.wrapper:
        counter = optimizer.iterations
    else:
        counter = optimizer.variables[0].value
        model._symbolic_build(data_batch=data)

    def step() -> None:
        model.train_step(data)

    return Step(step, row.mode, counter, model.trainable_variables)


def _program(row: Row, name: str, small: bool) -> Program:
    if row.case == "monitor":
        return models.Epoch(row, name, small)
    if row.model:
        return _training(row, name, small)
    return (_alone_with_tf_keras if "tf_keras" in row.wrapper else _alone)(row, name)


def _forget() -> None:
    """Lets go of the graphs of programs that are gone.

    Keras sums gradients over replicas with an operation that has a gradient of its own.
    TensorFlow keeps such a gradient for ever, and with it the graph and all that it captured.
    """
    known = gradient_registry._registry
    for name in [name for name in known if name.startswith("CustomGradient-")]:
        del known[name]


FRAMEWORK = Framework(_program, on_device=lambda kind: tf.device(f"{kind}:0"), forget=_forget)
