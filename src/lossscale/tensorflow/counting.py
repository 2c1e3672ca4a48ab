"""Gradients of a loss in a `tf.function`: for both generations of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lossscale.diagnostics.exponents import ExponentTable
from lossscale.diagnostics.measurement import Derived
from lossscale.diagnostics.tapping import Tap
from lossscale.tensorflow import exponents as histograms


def differentiator(
    loss_of: Callable[[Sequence[Any], Any, Tap], Any],
    values: Callable[[], Sequence[Any]],
    *,
    autograph: bool,
    tapped: bool,
) -> Callable[[Any, float], list[Derived]]:
    """Returns what takes a batch and a scale, and gives the gradients of the scaled loss.

    In a `tf.function` nothing is drawn from the random seed of eager mode.

    Args:
        loss_of: Given the values, a batch and a tap, returns the loss.
        values: Returns what to derive by, tensors or variables; called in the function.
        autograph: Whether the control flow of the model's layers has to be translated.
        tapped: Whether to derive by the tensors that are tapped as well.
    """
    described: list[tuple[int | str, str]] = []

    @tf.function(autograph=autograph)  # type: ignore[untyped-decorator]
    def compute(batch: Any, scale: Any) -> list[Any]:
        watched = list(values())
        inside: list[tuple[str, Any]] = []
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)

            def tap(name: str, tensor: Any) -> Any:
                if not tapped:
                    return tensor
                own = tf.identity(tensor)
                tape.watch(own)
                inside.append((name, own))
                return own

            loss = loss_of(watched, batch, tap)
            loss = loss * tf.cast(scale, loss.dtype)
        sources: list[tuple[int | str, Any]] = [*enumerate(watched), *inside]
        described[:] = [(key, tensor.dtype.name) for key, tensor in sources]
        gradients = tape.gradient(loss, [tensor for _, tensor in sources])
        return [None if g is None else summed(g) for g in gradients]

    def derive(batch: Any, scale: float) -> list[Derived]:
        tensors = tf.nest.map_structure(_to_tensor, tuple(batch))
        arguments = tensors, tf.constant(scale, tf.float32)
        # A concrete function, because TensorFlow warns of functions that are traced each time: it
        # tells them apart by their names, and would take the models of several reports for one.
        found = compute.get_concrete_function(*arguments)(*arguments)
        return [
            Derived(*each, None, 0) if gradient is None else Derived(*each, *gradient)
            for each, gradient in zip(described, found, strict=True)
        ]

    return derive


def count(gradient: Any) -> ExponentTable:
    """Returns the table of exponents of a gradient, on the host."""
    return histograms.on_host(_count_bins(gradient))


def on_host(gradient: Any) -> Any:
    """Returns a gradient as a NumPy array."""
    return np.asarray(gradient)


# Compiled once for each dtype and number of dimensions.
_count_bins = tf.function(histograms.count_bins, reduce_retracing=True, autograph=False)


def summed(gradient: Any) -> tuple[Any, Any]:
    """A gradient, of slices summed for each row as a step does; and how many zeros it lacks."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient, tf.constant(0, tf.int64)
    rows, place = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(rows))
    if gradient.dense_shape is None:
        return values, tf.constant(0, tf.int64)
    whole = tf.reduce_prod(tf.cast(gradient.dense_shape, tf.int64))
    return values, whole - tf.size(values, tf.int64)


def _to_tensor(array: Any) -> Any:
    return None if array is None else tf.convert_to_tensor(array)
