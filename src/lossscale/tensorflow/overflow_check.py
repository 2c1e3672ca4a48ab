"""Checks with TensorFlow whether gradients are finite.

The check reads each gradient once. The sum of a tensor is infinite or NaN if an element is, and
needs no second tensor. But finite elements can add up to infinity too. So if a sum is not finite,
each element is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from lossscale.common.sizes import MOST_JOINED, SMALL, grouped_by_size
from lossscale.framework_types import Gradient, Scalar, Tensor
from lossscale.tensorflow.scaling import quotient_of, real_parts, unscaled, widened
from lossscale.tensorflow.tracing import in_xla


def all_finite(
    gradients: Sequence[Gradient], scale: Scalar | None = None, powers_of_two: bool = True
) -> Tensor:
    """Whether every element of every gradient is finite after unscaling.

    Args:
        gradients: Tensors, `tf.IndexedSlices` (their values are checked) or None (ignored).
        scale: The divisor of the gradients; None if they are already unscaled.
        powers_of_two: As for `unscaled`.

    Returns:
        A boolean scalar tensor.
    """
    if scale is None:
        quotients = [quotient_of(gradient) for gradient in gradients if gradient is not None]
        first = quotients[0] if quotients else None
        if first is not None and all(q is not None and q.scale is first.scale for q in quotients):
            # XLA would not keep the quotients, but divide again here, which is slower than reading
            # the gradients from memory: a step of tf_keras would take 1.2 times as long.
            gradients = [quotient.scaled for quotient in quotients if quotient is not None]
            _, scale, powers_of_two = first
    parts = [widened(part) for gradient in gradients for part in real_parts(gradient)]
    if not parts:
        return tf.constant(True)
    compiled = in_xla()
    most = MOST_JOINED if compiled else SMALL
    small, large = grouped_by_size(parts, lambda part: part.shape.num_elements(), most)
    if large and not compiled:
        # Joining tensors pays only if there are few elements in all, so that the branch below is
        # not needed: with sums and a branch, a step with many small tensors took 1.2 times as long.
        small, large = [], parts
    looked_at = [
        tf.concat([tf.reshape(p, [-1]) for p in group], 0) if len(group) > 1 else group[0]
        for group in small
    ]
    if compiled:
        # XLA would convert these again for the sum, which is slower than checking each element
        # on the way.
        looked_at += [part for part in large if part.op.type == "Cast"]
        large = [part for part in large if part.op.type != "Cast"]

    def each_finite(parts: list[Tensor]) -> list[Tensor]:
        results = parts if scale is None else unscaled(parts, scale, powers_of_two)
        return [tf.reduce_all(tf.math.is_finite(result)) for result in results]

    # A branch takes longer than these elements.
    verdicts = each_finite(looked_at)
    if large:
        fits = _sums(large)
        if scale is not None:
            # A scale below 1 makes numbers larger.
            fits = tf.logical_and(fits, tf.logical_not(scale < 1.0))

        def ask_again() -> Tensor:
            return _in_turn(each_finite, large) if compiled else _all_true(each_finite(large))

        verdicts.append(tf.cond(fits, lambda: tf.constant(True), ask_again))
    return _all_true(verdicts)


def _in_turn(each_finite: Callable[[list[Tensor]], list[Tensor]], parts: list[Tensor]) -> Tensor:
    # XLA would need memory for a copy of every tensor here, and reserves it in each step.
    finite = tf.constant(True)
    for part in parts:
        finite = tf.cond(
            finite, lambda part=part: each_finite([part])[0], lambda: tf.constant(False)
        )
    return finite


def _all_true(verdicts: list[Tensor]) -> Tensor:
    return verdicts[0] if len(verdicts) == 1 else tf.reduce_all(tf.stack(verdicts))


def _sums(parts: list[Tensor]) -> Tensor:
    """Whether the sum of each tensor is finite: a boolean scalar tensor."""
    sums: dict[tf.DType, list[Tensor]] = {}
    for part in parts:
        sums.setdefault(part.dtype, []).append(tf.reduce_sum(part))
    finite = [tf.math.is_finite(tf.stack(totals)) for totals in sums.values()]
    return tf.reduce_all(finite[0] if len(finite) == 1 else tf.concat(finite, 0))
