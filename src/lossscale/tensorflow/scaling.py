"""Gradients as TensorFlow tensors: their parts, widening, scaling and unscaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from lossscale.common.private_names import private_name
from lossscale.framework_types import Array, Gradient, Scalar, Structure, Tensor
from lossscale.tensorflow.tracing import in_xla

_xla_optimization_barrier: Callable[[list[Tensor]], list[Tensor]] = private_name(
    "tensorflow.compiler.tf2xla.ops.gen_xla_ops",
    "xla_optimization_barrier",
    "keep XLA from taking a fixed scale together with a learning rate",
    # Without the name, an update may be 0 at a fixed scale above 2**100.
    fallback=lambda input: input,
)


def real_parts(gradient: Gradient) -> list[Tensor]:
    """The tensors of real numbers that a gradient consists of, as they are stored.

    Args:
        gradient: Tensor or `tf.IndexedSlices` of any dtype, or None.

    Returns:
        One tensor, two for a complex dtype, none for None or integers.
    """
    if gradient is None:
        return []
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    values = tf.convert_to_tensor(gradient.values if is_sparse else gradient)
    if values.dtype.is_complex:
        return [tf.math.real(values), tf.math.imag(values)]
    return [values] if values.dtype.is_floating else []


def widened(tensor: Array) -> Tensor:
    """A tensor in float32 or wider."""
    tensor = tf.convert_to_tensor(tensor)
    wide = tensor.dtype in (tf.float32, tf.float64) or tensor.dtype.is_complex
    return tensor if wide else tf.cast(tensor, tf.float32)


def scaled(loss: Array, scale: Scalar) -> Tensor:
    """Multiplies a loss by the scale, in float32 or wider."""
    loss = widened(loss)
    return loss * tf.cast(scale, loss.dtype)


def unscaled(gradients: Sequence[Gradient], scale: Scalar, powers_of_two: bool) -> list[Gradient]:
    """Divides gradients by the scale, in float32 or wider.

    Args:
        gradients: Tensors or `tf.IndexedSlices` of any dtype, or None. Slices stay slices.
        scale: float32 scalar tensor, or a Python float.
        powers_of_two: Whether the scale is a power of two. Then XLA multiplies by the reciprocal,
            which is exact and faster; otherwise it divides.
    """
    divisors: dict[tf.DType, Tensor] = {}
    compiled = in_xla()
    # Elsewhere the graph optimizer would rewrite (g * r) * lr as g * (r * lr), which is 0 for a
    # large scale and a small learning rate.
    multiplies = compiled and powers_of_two

    def divided(gradient: Gradient) -> Gradient:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            values = divided(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        gradient = widened(gradient)
        if gradient.dtype not in divisors:
            divisor = _not_constant(tf.cast(scale, gradient.dtype))
            divisors[gradient.dtype] = tf.math.reciprocal(divisor) if multiplies else divisor
        divisor = divisors[gradient.dtype]
        result = gradient * divisor if multiplies else gradient / divisor
        if compiled:
            _quotients(result)[result.name] = Quotient(gradient, scale, powers_of_two)
        return result

    return [divided(gradient) for gradient in gradients]


def _not_constant(divisor: Tensor) -> Tensor:
    """The same scalar, hidden from constant folding, which would merge it with other constants."""
    if tf.executing_eagerly() or tf.get_static_value(divisor) is None:
        return divisor
    if in_xla():
        return _xla_optimization_barrier([divisor])[0]
    return tf.raw_ops.PlaceholderWithDefault(input=divisor, shape=[])


class Quotient(NamedTuple):
    """The scaled gradient and the divisor that an unscaled gradient was computed from."""

    scaled: Tensor
    scale: Scalar
    powers_of_two: bool


def _quotients(tensor: Tensor) -> dict[str, Quotient]:
    """The unscaled gradients of a tensor's graph, by name."""
    # Stored in the graph, so that they are freed with it.
    collection: list[dict[str, Quotient]] = tensor.graph.get_collection_ref("lossscale_quotients")
    if not collection:
        collection.append({})
    return collection[0]


def quotient_of(gradient: Gradient) -> Quotient | None:
    """The scaled gradient and the divisor of an unscaled one; under XLA only."""
    if not isinstance(gradient, tf.Tensor) or not in_xla():
        return None
    # The sum over a single replica passes its gradients on through an identity.
    while gradient.op.type in ("Identity", "IdentityN"):
        gradient = gradient.op.inputs[gradient.value_index]
    return _quotients(gradient).get(gradient.name)


def flat_gradients(gradients: Structure) -> list[Gradient]:
    """The gradients in a nested structure, without None; per-replica values are unpacked."""
    return [
        gradient
        for value in tf.nest.flatten(gradients)
        for gradient in tf.distribute.get_strategy().experimental_local_results(value)
        if gradient is not None
    ]
