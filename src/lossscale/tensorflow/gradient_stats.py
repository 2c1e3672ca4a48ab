"""Gradient statistics with TensorFlow, for rules that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lossscale.rules import GradientStats, StatsRequest
from lossscale.tensorflow.scaling import real_parts, widened


def compute(
    needs: StatsRequest,
    finite: Any,
    gradients: Sequence[Any],
    scale: Any,
    *,
    are_scaled: bool,
    are_shared: bool = False,
) -> GradientStats:
    """Returns the statistics of a step for a rule, over all replicas.

    Args:
        needs: The statistics that the rule needs; nothing else is computed.
        finite: The decision of all replicas, a boolean scalar tensor; True if unchecked.
        gradients: The gradients of this replica: tensors, `tf.IndexedSlices` or None.
        scale: The loss scale of the step, float32 scalar tensor.
        are_scaled: Whether the gradients are still multiplied by the scale.
        are_shared: Whether all replicas have the same gradients, already summed.
    """

    def together(value: Any, reduce: Any) -> Any:
        return value if are_shared else _over_replicas(value, reduce)

    parts = [tf.abs(widened(p)) for gradient in gradients for p in real_parts(gradient)]
    largest = None
    if needs.largest:
        # The maximum of no elements is minus infinity.
        maxima = [tf.cast(tf.reduce_max(part), tf.float32) for part in parts]
        largest = together(tf.reduce_max(tf.stack([tf.constant(0.0), *maxima])), tf.reduce_max)
        largest = tf.where(finite, largest / scale if are_scaled else largest, float("inf"))
    if not needs.counts_from:
        return GradientStats(finite, largest)
    scaled = parts if are_scaled else [part * tf.cast(scale, part.dtype) for part in parts]

    def count_from(edge: float) -> Any:
        numbers = [tf.math.count_nonzero(part >= edge, dtype=tf.float32) for part in scaled]
        return together(tf.add_n([tf.constant(0.0), *numbers]), tf.reduce_sum)

    counts = tuple(map(count_from, needs.counts_from))
    sizes = [tf.size(part, tf.int64) for part in parts]
    elements = tf.cast(tf.add_n([tf.constant(0, tf.int64), *sizes]), tf.float32)
    return GradientStats(finite, largest, counts, together(elements, tf.reduce_sum))


def _over_replicas(value: Any, reduce: Any) -> Any:
    """Reduces a scalar of each replica to the maximum or the sum."""
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return value
    # Strategies reduce by sums and means only.
    return reduce(replica.all_gather(value[tf.newaxis], axis=0))
