"""What Keras 3 on TensorFlow and tf_keras share: how a step is run, and how big it is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# TensorFlow has no public name for it.
from tensorflow.python.framework.ops import gradient_registry

from benchmarks.memory import peak_above_rest
from benchmarks.methods import Method
from benchmarks.workloads import Rows, Workload

MEMORY = "the peak of TensorFlow's allocator in a step; resident memory where it keeps no count"
GRAPH = "nodes of the graph and its functions; under XLA instructions before they are optimized"

# Each row makes functions of its own; TensorFlow takes that for retracing.
tf.get_logger().setLevel("ERROR")


def devices() -> dict[str, str]:
    """The kinds of device that are measured."""
    return {"cpu": ""}


def on_device(device: str) -> contextlib.AbstractContextManager[Any]:
    """Within it tensors are made on a device of this kind."""
    return tf.device(f"{device}:0")


def forget() -> None:
    """Lets go of the graphs of programs that are gone.

    Keras sums gradients over replicas with an operation that has a gradient of its own.
    TensorFlow keeps such a gradient for ever, and with it the graph and all that it captured.
    """
    known = gradient_registry._registry
    for name in [name for name in known if name.startswith("CustomGradient-")]:
        del known[name]


class Step:
    """A step of a stateful function, run in one of the modes.

    Args:
        function: Called without arguments.
        mode: "eager", "function" or "xla".
        counter: A variable that each step moves; reading it waits for the step.
    """

    fresh_each_step = False

    def __init__(self, function: Callable[[], None], mode: str, counter: Any) -> None:
        self.traces = 0
        self._counter = counter

        def counted() -> None:
            self.traces += 1
            function()

        self._mode = mode
        self._run: Any = function
        if mode != "eager":
            self._run = tf.function(counted, jit_compile=mode == "xla", autograph=False)

    def prepare(self) -> None:
        """The inputs do not change."""

    def step(self) -> None:
        self._run()

    def wait(self) -> None:
        self._counter.numpy()

    def structure(self) -> dict[str, Any]:
        found: dict[str, Any] = {"memory_bytes": self._peak_memory()}
        if self._mode != "eager":
            found["graph_size"] = self._graph_size()
        return found

    def _peak_memory(self) -> int | None:
        try:
            tf.config.experimental.reset_memory_stats("CPU:0")
            rest = tf.config.experimental.get_memory_info("CPU:0")["current"]
        except ValueError:
            return peak_above_rest(self._run)
        self._run()
        peak: int = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return peak - rest

    def _graph_size(self) -> int:
        if self._mode == "xla":
            text = self._run.experimental_get_compiler_ir()(stage="hlo")
            return len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", text, re.M))
        graph = self._run.get_concrete_function().graph.as_graph_def()
        return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)


def tensors(workload: Workload, factor: float) -> list[Any]:
    """Returns the gradients of a workload, times a factor, as tensors."""
    return [
        tf.IndexedSlices(
            tf.constant(g.values * factor), tf.constant(g.rows), tf.constant(g.shape, tf.int64)
        )
        if isinstance(g, Rows)
        else tf.constant(g * factor)
        for g in workload.gradients()
    ]


class Floors:
    """The floors: a bare read of all gradients, and unscaling them without a check."""

    def __init__(self, method: Method, scale: float) -> None:
        self._method = method
        self._scale = tf.Variable(scale, dtype=tf.float32)
        self._total = tf.Variable(0.0)

    def before(self, gradients: list[Any]) -> list[Any]:
        """Does what the method does before the inner optimizer; returns the gradients for it."""
        if self._method.reads:
            parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
            self._total.assign(tf.add_n([tf.reduce_sum(part) for part in parts]))
        if self._method.unscales:
            reciprocal = tf.math.reciprocal(self._scale)
            return [_times(gradient, reciprocal) for gradient in gradients]
        return gradients


def _times(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
