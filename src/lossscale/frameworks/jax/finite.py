"""Whether gradients are finite, with JAX, reading each of them once.

The sum of an array is infinite or NaN if an element is, and reading it needs no second array.
But finite elements can add up to infinity too. So a sum that is not finite only asks the question
again, of each element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from lossscale.frameworks.common.sizes import small_and_large


def all_finite(
    gradients: Sequence[Any],
    unscale: Callable[[Any], Any] | None = None,
    may_grow: Any = False,
) -> Any:
    """Whether every element of every gradient is finite: a boolean scalar array.

    Args:
        gradients: Arrays, `BCOO` (their data are looked at) or None (skipped).
        unscale: What is done to a gradient afterwards; the question is about its result. None if
            nothing is.
        may_grow: Whether `unscale` makes numbers larger, a boolean or a boolean scalar array.
    """
    parts = [part for gradient in gradients if gradient is not None for part in _parts(gradient)]
    if not parts:
        return jnp.asarray(True)
    small, large = small_and_large(parts, lambda part: part.size)
    joined = [jnp.concatenate([part.ravel() for part in group]) for group in small]

    def each_finite(part: Any) -> Any:
        return jnp.all(jnp.isfinite(part if unscale is None else unscale(part)))

    # A branch takes longer than these elements.
    verdicts = list(map(each_finite, joined))
    if large:
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


def _parts(gradient: Any) -> list[Any]:
    values = jnp.asarray(gradient.data if isinstance(gradient, BCOO) else gradient)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return [values.real, values.imag]
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return []
    wide = values.dtype in (jnp.float32, jnp.float64)
    return [values if wide else values.astype(jnp.float32)]


def _sums(parts: list[Any]) -> Any:
    """Whether the sum of each array is finite: a boolean scalar array."""
    # Not added up: finite sums of several arrays could overflow together.
    return jnp.isfinite(jnp.stack([jnp.sum(part) for part in parts])).all()
