"""TensorFlow: tracks overflows in variables; eager, in a `tf.function`, under XLA, on replicas."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from lossscale.common import overflow_tracker
from lossscale.common.overflow_tracker import CheckedStep
from lossscale.framework_types import Array, Gradient, Tensor, Variable
from lossscale.monitoring.recorder import SkippedStep
from lossscale.tensorflow.scaling import real_parts


class OverflowTracker(overflow_tracker.OverflowTracker):
    """Tracks overflows in variables of which every replica has its own copy.

    So a replica can write inside a branch, without synchronizing, and the host combines the copies.
    It reads the copies of its process: each worker sees its own replicas.
    """

    _is_shared = True

    def _create(self) -> None:
        # Maybe in a function that is being traced.
        with tf.init_scope():
            self._scale = _variable("scale", tf.float32, ())
            self._skip_step = _variable("skip_step", tf.int64, ())
            self._skip_scale = _variable("skip_scale", tf.float32, ())
            self._nonfinite = _variable("nonfinite", tf.int64, (len(self.names), 2))

    def _track(self, step: CheckedStep) -> None:
        # In a replica context.
        self._is_shared = step.is_shared
        self._scale.assign(tf.cast(step.scale, tf.float32))
        if step.finite is not True:
            tf.cond(step.finite, lambda: tf.constant(False), lambda: self._track_skip(step))

    def _track_skip(self, step: CheckedStep) -> Tensor:
        gradients = self._unscaled_by_row(step)
        self._nonfinite.assign(tf.stack([_nonfinite(gradient) for gradient in gradients]))
        self._skip_step.assign(tf.cast(step.number, tf.int64))
        self._skip_scale.assign(tf.cast(step.scale, tf.float32))
        return tf.constant(False)

    def read(self, after: int, until: int) -> tuple[float, SkippedStep | None]:
        skip = None
        if after < (step := int(_copies(self._skip_step)[0])) <= until:
            together = np.max if self._is_shared else np.sum
            counts = together(_copies(self._nonfinite), axis=0)
            nonfinite = overflow_tracker.nonfinite_tensors(self.names, counts)
            skip = SkippedStep(step, float(_copies(self._skip_scale)[0]), nonfinite)
        return float(_copies(self._scale)[0]), skip


def _variable(name: str, dtype: tf.DType, shape: tuple[int, ...]) -> Variable:
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        name=f"tracked_{name}",
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _copies(variable: Variable) -> Array:
    """The values of this process's copies of a variable, in one NumPy array."""
    return np.stack([copy.numpy() for copy in getattr(variable, "values", (variable,))])


def _nonfinite(gradient: Gradient) -> Tensor:
    """Returns the numbers of infinite elements and of NaN, int64 of shape (2,)."""
    tests = (tf.math.is_inf, tf.math.is_nan)
    counts = tf.zeros(2, tf.int64)
    for part in real_parts(gradient):
        counts += tf.stack([tf.math.count_nonzero(test(part), dtype=tf.int64) for test in tests])
    return counts
