"""Gradients of losses in eager mode, by variables and by tensors inside: for both Kerases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
