"""Gradients as JAX arrays: scaled, unscaled, checked, and what a rule sees of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from lossscale.common.sizes import small_and_large
from lossscale.rules import Needs, Seen


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


def all_finite(gradients: Sequence[Any], scale: Any = None, powers_of_two: bool = True) -> Any:
    """Whether every element of every gradient is finite once it is unscaled; reads each once.

    The sum of an array is infinite or NaN if an element is, and reading it needs no second array.
    But finite elements can add up to infinity too. So a sum that is not finite only asks the
    question again, of each element. To look at each element at once makes a step of 100 large
    variables 1.08 (Adam) to 1.15 times (SGD) as long.

    Args:
        gradients: Arrays, `BCOO` (their data are looked at) or None (skipped).
        scale: What they will be divided by; None if they are unscaled already.
        powers_of_two: As for `unscaled`.

    Returns:
        A boolean scalar array.
    """
    parts = [widened(part) for gradient in gradients for part in real_parts(gradient)]
    if not parts:
        return jnp.asarray(True)
    small, large = small_and_large(parts, lambda part: part.size)
    joined = [jnp.concatenate([part.ravel() for part in group]) for group in small]

    def each_finite(part: Any) -> Any:
        result = part if scale is None else unscaled([part], scale, powers_of_two)[0]
        return jnp.all(jnp.isfinite(result))

    # A branch takes longer than these elements.
    verdicts = list(map(each_finite, joined))
    if large:
        # A scale below 1 makes numbers larger.
        may_grow = False if scale is None else scale < 1.0
        fits = _sums(large) & jnp.logical_not(may_grow)
        verdicts.append(_or_in_turn(fits, each_finite, large))
    return _all_true(verdicts)


def _or_in_turn(fits: Any, each_finite: Callable[[Any], Any], parts: list[Any]) -> Any:
    """Whether `fits`, or else each of the parts is finite."""
    if not isinstance(fits, jax.core.Tracer):
        # Outside a compiled function a branch would be compiled anew at every call.
        return fits if bool(fits) else _all_true(list(map(each_finite, parts)))

    def in_turn() -> Any:
        # XLA would hold a copy of every array at once for this, and sets the room aside at each
        # step.
        finite = jnp.asarray(True)
        for part in parts:
            looked = functools.partial(each_finite, part)
            finite = jax.lax.cond(finite, looked, lambda: jnp.asarray(False))
        return finite

    return jax.lax.cond(fits, lambda: jnp.asarray(True), in_turn)


def _all_true(verdicts: list[Any]) -> Any:
    return verdicts[0] if len(verdicts) == 1 else jnp.all(jnp.stack(verdicts))


def _sums(parts: list[Any]) -> Any:
    """Whether the sum of each array is finite: a boolean scalar array."""
    # Not added up: finite sums of several arrays could overflow together.
    return jnp.isfinite(jnp.stack([jnp.sum(part) for part in parts])).all()


def seen(
    needs: Needs, finite: Any, gradients: Sequence[Any], scale: Any, *, are_scaled: bool
) -> Seen:
    """Returns what a rule sees of a step.

    Args:
        needs: What the rule needs, something; nothing else is computed.
        finite: The verdict, a boolean scalar array, or True if nobody looked.
        gradients: Arrays, `BCOO` or None.
        scale: The loss scale of the step, float32 scalar array.
        are_scaled: Whether the gradients still have to be divided by it.
    """
    parts = [jnp.abs(widened(p)) for gradient in gradients for p in real_parts(gradient)]
    largest = None
    if needs.largest:
        maxima = [jnp.max(part, initial=0).astype(jnp.float32) for part in parts]
        largest = jnp.max(jnp.stack(maxima)) if maxima else jnp.zeros((), jnp.float32)
        largest = jnp.where(finite, largest / scale if are_scaled else largest, jnp.inf)
    if not needs.counts_from:
        return Seen(finite, largest)
    scaled = parts if are_scaled else [part * jnp.asarray(scale, part.dtype) for part in parts]
    counts = tuple(
        sum(
            (jnp.sum(part >= edge, dtype=jnp.int32).astype(jnp.float32) for part in scaled),
            jnp.zeros((), jnp.float32),
        )
        for edge in needs.counts_from
    )
    elements = jnp.asarray(float(sum(part.size for part in parts)), jnp.float32)
    return Seen(finite, largest, counts, elements)
