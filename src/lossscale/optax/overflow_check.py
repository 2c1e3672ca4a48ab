"""Whether gradients are finite, for steps without a branch, and the division by the scale.

`sum(x - x)` is 0 for finite elements and NaN otherwise. It reads an array once and needs no second
look, as a plain sum does, which may overflow. So it is right under `vmap` and in a `shard_map` too,
where a branch is dear or not allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lossscale.common.sizes import small_and_large
from lossscale.errors import ArgumentError, GradientsError
from lossscale.jax.apply_or_skip import is_laid_out, varying
from lossscale.jax.gradients import real_parts, unscaled, widened
from lossscale.jax.jaxprs import static_size
from lossscale.rules import Seen


def is_gradient(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers that can be divided; integers and float0 cannot."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def with_arrays(tree: Any) -> Any:
    """Returns a tree whose Python floats are arrays: outside of `jit` a gradient may be one."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, (float, complex)) else x, tree)


def has_elements(leaves: Sequence[Any]) -> bool:
    """Whether there is anything to look at."""
    return any(is_gradient(leaf) and static_size(leaf) != 0 for leaf in leaves)


def is_traced(leaves: Sequence[Any]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def each_finite(leaves: Sequence[Any], scale: Any = None, powers_of_two: bool = True) -> Any:
    """Whether every element of every array is finite, a boolean scalar array.

    Args:
        leaves: Arrays; those that are no gradients are not looked at.
        scale: What they will be divided by, if that can make them infinite.
        powers_of_two: As for `unscaled`.
    """
    parts = [widened(part) for leaf in leaves if is_gradient(leaf) for part in real_parts(leaf)]
    if scale is not None:
        parts = unscaled(parts, scale, powers_of_two)
    apart = [part for part in parts if is_laid_out(part)]
    small, large = small_and_large([p for p in parts if not is_laid_out(p)], static_size)
    joined = [jnp.concatenate([part.ravel() for part in group]) for group in small]
    sums = [jnp.sum(part - part).astype(jnp.float32) for part in [*joined, *large, *apart]]
    # In a list that is added up, so that parts of different devices need no common layout.
    total = sum(sums[1:], sums[0]) if sums else jnp.zeros((), jnp.float32)
    return total == 0


def agreed(finite: Any, axis_names: tuple[str, ...], scale: Any) -> Any:
    """The verdict of all devices along these axes.

    Args:
        finite: The verdict of this device, a boolean scalar array.
        axis_names: Names of axes of `pmap`, `shard_map` or `vmap`.
        scale: The loss scale, which tells along which axes each device has its own.

    Raises:
        ArgumentError: If there is no such axis. It is a `ValueError`.
        GradientsError: If devices with one loss scale would come to different verdicts. It is a
            `ValueError`.
    """
    if axis_names:
        try:
            finite = jax.lax.pmin(finite.astype(jnp.int32), axis_names) > 0
        except NameError as error:
            said = str(error).rstrip(".")
            raise ArgumentError(
                f"`axis_name` must name axes of the pmap, shard_map or vmap around `update`. "
                f"Received: axis_name={axis_names!r}, and JAX says: {said}. Outside of these, as "
                "under jit with sharded arrays, leave it out."
            ) from error
    apart = varying(finite) - varying(scale)
    if apart:
        names = ", ".join(map(repr, sorted(apart)))
        raise GradientsError(
            f"The gradients differ between the devices along the mesh axis {names}, and the loss "
            "scale is the same there: some devices would skip a step that others apply. Average "
            "the gradients along it first (jax.lax.pmean), or if each device has parameters of "
            f"its own, say so: loss_scaled(..., axis_name={names})."
        )
    return finite


def seen_by_all(looked: Seen, axis_names: tuple[str, ...]) -> Seen:
    """What the devices along these axes have seen together.

    Args:
        looked: What one device has seen; its verdict is that of all.
        axis_names: Names of axes along which each device has gradients of its own.
    """
    if not axis_names:
        return looked
    largest, elements = looked.largest, looked.elements
    return Seen(
        looked.finite,
        None if largest is None else jax.lax.pmax(largest, axis_names),
        tuple(jax.lax.psum(count, axis_names) for count in looked.counts),
        None if elements is None else jax.lax.psum(elements, axis_names),
    )
