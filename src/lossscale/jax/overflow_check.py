"""Whether gradients are finite, with JAX, reading each of them once.

The sum of an array is infinite or NaN if an element is, and reading it needs no second array.
But finite elements can add up to infinity too. So a sum that is not finite only asks the question
again, of each element. To look at each element at once makes a step of 100 large variables
1.08 (Adam) to 1.15 times (SGD) as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lossscale.common.sizes import small_and_large
from lossscale.jax.scaling import real_parts, unscaled, widened


def all_finite(gradients: Sequence[Any], scale: Any = None, powers_of_two: bool = True) -> Any:
    """Whether every element of every gradient is finite once it is unscaled.

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
