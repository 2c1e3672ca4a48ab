"""Gradients as JAX arrays: what they are made of, widened, scaled and unscaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO


def stored(gradient: Any) -> Any:
    """The dense array that a gradient is stored in: of a `BCOO` its data."""
    return jnp.asarray(gradient.data if isinstance(gradient, BCOO) else gradient)


def real_parts(gradient: Any) -> list[Any]:
    """The arrays of real numbers that a gradient is made of, as they are stored.

    Args:
        gradient: Array or `BCOO` of any dtype, or None.

    Returns:
        One array; two for a complex dtype; none for None and for integers.
    """
    if gradient is None:
        return []
    values = stored(gradient)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return [values.real, values.imag]
    return [values] if jnp.issubdtype(values.dtype, jnp.floating) else []


def widened(array: Any) -> Any:
    """An array in float32 or wider."""
    array = jnp.asarray(array)
    wide = array.dtype == jnp.float64 or jnp.issubdtype(array.dtype, jnp.complexfloating)
    return array if wide else array.astype(jnp.float32)


def scaled(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the scale, in float32 or wider."""
    loss = widened(loss)
    return loss * jnp.asarray(scale, loss.dtype)


def unscaled(gradients: Sequence[Any], scale: Any, powers_of_two: bool) -> list[Any]:
    """Divides gradients by the scale, in float32 or wider.

    Args:
        gradients: Arrays or `BCOO` of any dtype, or None. Sparse stays sparse.
        scale: float32 scalar array, or a Python float.
        powers_of_two: Whether the scale is a power of two, so that multiplying by the reciprocal
            is exact. Others are divided by.
    """

    def divided(gradient: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, BCOO):
            return BCOO((divided(gradient.data), gradient.indices), shape=gradient.shape)
        gradient = widened(gradient)
        divisor = jnp.asarray(scale, gradient.dtype)
        return gradient * (1.0 / divisor) if powers_of_two else gradient / divisor

    return [divided(gradient) for gradient in gradients]


def flat_gradients(gradients: Any) -> list[Any]:
    """The gradients in a nest, without None."""
    leaves: list[Any] = jax.tree.leaves(gradients, is_leaf=lambda leaf: isinstance(leaf, BCOO))
    return leaves
