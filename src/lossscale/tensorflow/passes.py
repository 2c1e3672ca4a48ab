"""What passes of both Kerases need of TensorFlow: gradients of losses, and the same random numbers.

Operations such as `tf.random.normal` draw other numbers each time a compiled function runs, and
other ones in float16 than in float32. Two runs with them could not be compared.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf


def derive(
    forward: Callable[..., Any], values: Sequence[Any], scale: Any, inside: bool
) -> tuple[Any, Any, Any, Any]:
    """Computes losses and their gradients; see `lossscale.keras_common.passes.Derived`.

    Args:
        forward: Computes the losses.
        values: What to derive by, tensors or variables.
        scale: What each loss is multiplied by.
        inside: Whether to derive by the tensors inside as well.
    """
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(values)
        losses, kept = forward(values, lambda name, tensor: tensor)
    sources = [tensor for _, tensor in kept] if inside else []
    gradients, found_inside = {}, {}
    for name, loss in losses.items():
        found = tape.gradient(loss, [*values, *sources], output_gradients=tf.constant(scale))
        gradients[name] = [_summed(each) for each in found[: len(values)]]
        found_inside[name] = {
            index: tf.convert_to_tensor(each)
            for index, each in enumerate(found[len(values) :])
            if each is not None
        }
    return losses, gradients, kept, found_inside


def _summed(gradient: Any) -> Any:
    """A gradient; of slices the sum for each row that is in it, as a step computes it."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, place = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, place, tf.size(rows))


_NARROW = (tf.float16, tf.bfloat16)


class Draws:
    """Random numbers by the order in which they are asked for, from the same seed each time."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def seed(self) -> tuple[int, int]:
        """Returns the next seed."""
        return 0x5CA1E, next(self._numbers)

    def normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = tf.float32, **_: Any
    ) -> Any:
        """Stands in for `tf.random.normal`."""
        return self._in_float32(tf.random.stateless_normal, shape, dtype, mean, stddev)

    def truncated_normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = tf.float32, **_: Any
    ) -> Any:
        """Stands in for `tf.random.truncated_normal`."""
        return self._in_float32(tf.random.stateless_truncated_normal, shape, dtype, mean, stddev)

    def uniform(
        self, shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = tf.float32, **_: Any
    ) -> Any:
        """Stands in for `tf.random.uniform`."""
        top = 1 if maxval is None and tf.as_dtype(dtype).is_floating else maxval
        return self._in_float32(tf.random.stateless_uniform, shape, dtype, minval, top)

    def dropout(self, x: Any, rate: Any, noise_shape: Any = None, **_: Any) -> Any:
        """Stands in for `tf.nn.dropout`."""
        x = tf.convert_to_tensor(x)
        kept = tf.nn.experimental.stateless_dropout(
            tf.ones_like(x, tf.float32), rate, self.seed(), noise_shape=noise_shape
        )
        # An infinity that is dropped is none.
        return tf.where(kept != 0, x * tf.cast(kept, x.dtype), tf.zeros_like(x))

    def _in_float32(
        self, draw: Callable[..., Any], shape: Any, dtype: Any, first: Any, second: Any
    ) -> Any:
        wanted = tf.as_dtype(dtype)
        inner = tf.float32 if wanted in _NARROW else wanted
        first, second = (
            None if bound is None else tf.cast(bound, inner) for bound in (first, second)
        )
        return tf.cast(draw(shape, self.seed(), first, second, inner), wanted)


@contextlib.contextmanager
def repeatable_draws() -> Iterator[Draws]:
    """Within it functions that are traced draw numbers that are the same in every run."""
    draws = Draws()
    stand_ins = [
        (tf.random, name, getattr(draws, name))
        for name in ("normal", "truncated_normal", "uniform")
    ]
    stand_ins.append((tf.nn, "dropout", draws.dropout))
    before = [(module, name, getattr(module, name)) for module, name, _ in stand_ins]
    try:
        for module, name, function in stand_ins:
            setattr(module, name, function)
        yield draws
    finally:
        for module, name, function in before:
            setattr(module, name, function)
