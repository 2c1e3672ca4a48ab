"""Whether gradients are finite, with JAX, reading each of them once.

The sum of an array is infinite or NaN if an element is, and reading it needs no second array.
But finite elements can add up to infinity too. So a sum that is not finite only asks the question
again: there the elements are made so small before that no sum of finite ones overflows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

# Many small arrays cost more to start on than to read, so they are read as one.
_SMALL = 2**14
# The copy that reading them as one makes is at most this many elements large.
_JOINED = 2**20
# An array of up to 2**40 elements sums up to a finite number after this.
_SHRINK = 2.0**-40


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
    joined, large = _joined(parts)

    def changed(part: Any) -> Any:
        return part if unscale is None else unscale(part)

    # A branch takes longer than these elements.
    verdicts = [jnp.all(jnp.isfinite(changed(part))) for part in joined]
    if large:
        fits = _sums(large) & jnp.logical_not(may_grow)
        verdicts.append(_or_else(fits, lambda: _sums([changed(part) * _SHRINK for part in large])))
    return verdicts[0] if len(verdicts) == 1 else jnp.all(jnp.stack(verdicts))


def _or_else(answer: Any, ask: Callable[[], Any]) -> Any:
    if isinstance(answer, jax.core.Tracer):
        return jax.lax.cond(answer, lambda: jnp.asarray(True), ask)
    # Outside a compiled function a branch would be compiled anew at every call.
    return answer if bool(answer) else ask()


def _parts(gradient: Any) -> list[Any]:
    values = jnp.asarray(gradient.data if isinstance(gradient, BCOO) else gradient)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return [values.real, values.imag]
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return []
    wide = values.dtype in (jnp.float32, jnp.float64)
    return [values if wide else values.astype(jnp.float32)]


def _joined(parts: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the small arrays as one for each dtype, and the others."""
    small, large, total = [], [], 0
    for part in parts:
        if part.size < _SMALL and total + part.size <= _JOINED:
            total += part.size
            small.append(part)
        else:
            large.append(part)
    small.sort(key=lambda part: part.dtype.name)
    groups = itertools.groupby(small, key=lambda part: part.dtype.name)
    return [jnp.concatenate([part.ravel() for part in group]) for _, group in groups], large


def _sums(parts: list[Any]) -> Any:
    """Whether the sum of each array is finite: a boolean scalar array."""
    # Not added up: finite sums of several arrays could overflow together.
    return jnp.isfinite(jnp.stack([jnp.sum(part) for part in parts])).all()
