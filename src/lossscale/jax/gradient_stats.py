"""How large gradients are, with JAX, for rules that need to see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from lossscale.jax.scaling import real_parts, widened
from lossscale.rules import Needs, Seen


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
