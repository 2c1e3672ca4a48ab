"""Whether gradients are finite, and how devices with different gradients agree on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lossscale.errors import ArgumentError, GradientsError
from lossscale.jax.apply_or_skip import varying
from lossscale.jax.gradients import all_finite
from lossscale.jax.jaxprs import static_size
from lossscale.rules import GradientStats


def is_gradient(leaf: Any) -> bool:
    """Whether a leaf is a floating-point or complex array, not integers or float0."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def with_arrays(tree: Any) -> Any:
    """Converts Python floats in a tree to arrays: outside `jit` a gradient may be a float."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, (float, complex)) else x, tree)


def has_elements(leaves: Sequence[Any]) -> bool:
    """Whether there is an element to check."""
    return any(is_gradient(leaf) and static_size(leaf) != 0 for leaf in leaves)


def each_finite(leaves: Sequence[Any], scale: Any = None, powers_of_two: bool = True) -> Any:
    """Whether every element of every array is finite, a boolean scalar array.

    Args:
        leaves: Arrays; those that are not gradients are ignored.
        scale: The divisor of the gradients, if dividing can make them infinite; otherwise None.
        powers_of_two: As for `unscaled`.
    """
    return all_finite(list(filter(is_gradient, leaves)), scale, powers_of_two)


def agreed(finite: Any, axis_names: tuple[str, ...], scale: Any) -> Any:
    """Whether gradients are finite on all devices along these axes.

    Args:
        finite: Whether the gradients of this device are finite, a boolean scalar array.
        axis_names: Names of axes of `pmap`, `shard_map` or `vmap`.
        scale: The loss scale. An axis along which it varies is one where each device has its own.

    Raises:
        ArgumentError: If there is no such axis.
        GradientsError: If devices that share one loss scale would decide differently.
    """
    if axis_names:
        try:
            finite = jax.lax.pmin(finite.astype(jnp.int32), axis_names) > 0
        except NameError as error:
            said = str(error).rstrip(".")
            raise ArgumentError(
                "`axis_name` must name axes of the pmap, shard_map or vmap around `update`. "
                f"Received: axis_name={axis_names!r}; JAX reports: {said}. Elsewhere, as under jit "
                "with sharded arrays, leave it out."
            ) from error
    apart = varying(finite) - varying(scale)
    if apart:
        names = ", ".join(map(repr, sorted(apart)))
        raise GradientsError(
            f"Gradients differ between devices along the mesh axis {names}. Some devices would "
            "skip a step that others apply. Average them first (jax.lax.pmean), or if each device "
            f"has its own parameters, pass it: loss_scaled(..., axis_name={names})."
        )
    return finite


def combined_stats(stats: GradientStats, axis_names: tuple[str, ...]) -> GradientStats:
    """Combines the statistics of the devices along these axes.

    Args:
        stats: The statistics of this device; `finite` is already the decision of all devices.
        axis_names: Names of axes along which the gradients differ between devices.
    """
    if not axis_names:
        return stats
    largest = jax.tree.map(lambda each: jax.lax.pmax(each, axis_names), stats.largest)
    sums = (stats.counts, stats.elements)
    counts, elements = jax.tree.map(lambda each: jax.lax.psum(each, axis_names), sums)
    return GradientStats(stats.finite, largest, counts, elements)
