"""Applies an update or skips it: each of its outputs is chosen, new or old, where it is made.

Choosing after the update costs memory: the new moments are used twice, as outputs and in the
update, and XLA copies the old ones to compute them twice. Here everything that reads an output
reads what was chosen. If the step is applied, that is the new value. If not, it is the old one, and
what is computed from it is not used. So nothing is copied, nothing branches, and all devices run
the same operations.

To know where an output is made, the update is traced once, and what was traced is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lossscale.jax import jaxprs

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def chosen(finite: Any, new: Any, old: Any) -> Any:
    """The new value if the step is applied, else the old one, in `lasting_dtype`."""
    if new is old:
        return old
    dtype = lasting_dtype(new, old)
    return strong(jnp.where(finite, jnp.asarray(new, dtype), jnp.asarray(old, dtype)))


def lasting_dtype(new: Any, old: Any) -> Any:
    """The dtype of an array that a step writes: that of the old one.

    So the second step is not compiled anew. But a number that begins as an integer and becomes a
    fraction would lose it.
    """
    if new.dtype == old.dtype:
        return old.dtype
    return new.dtype if _kind(new) > _kind(old) else old.dtype


def _kind(array: Any) -> int:
    kinds = (n for n, kind in enumerate(_KINDS) if jnp.issubdtype(array.dtype, kind))
    return next(kinds, len(_KINDS))


def strong(array: Any) -> Any:
    """An array whose dtype no other one changes."""
    return jax.lax.convert_element_type(array, array.dtype)


def gated(closed: Any, inputs: Sequence[Any], olds: Mapping[int, Any], finite: Any) -> list[Any]:
    """Evaluates what was traced, with the old value of some outputs unless `finite`.

    Args:
        closed: What JAX traced, a closed jaxpr.
        inputs: Arrays, one for each of its inputs.
        olds: Old values by the number of the output.
        finite: A boolean scalar array.
    """

    def only_if_applied(run: Callable[[], list[Any]], types: Sequence[Any]) -> list[Any]:
        # What prints or logs is silent on a skipped step. What it makes there is not used.
        def silent() -> list[Any]:
            return [jnp.zeros(kind.shape, kind.dtype) for kind in types]

        made: list[Any] = jax.lax.cond(finite, run, silent)
        return made

    return jaxprs.evaluate(
        closed,
        inputs,
        gates=olds,
        choose=lambda new, old: chosen(finite, new, old),
        guard=only_if_applied,
    )


def must_branch(closed: Any, first: int, finite: Any, inputs: Sequence[Any]) -> bool:
    """Whether a branch takes less: large outputs from `first` on come out of control flow.

    Not where the two sides of a branch would have to agree on how devices hold what they return.
    """
    return jaxprs.made_by_control_flow(closed, first) and not any(
        varying(leaf) or is_laid_out(leaf) for leaf in [finite, *inputs]
    )


def varying(array: Any) -> frozenset[str]:
    """The axes of the `shard_map` around along which an array differs, as far as JAX knows."""
    kind = _type_of(array)
    # JAX 0.10 keeps it in one of these, earlier ones in the other.
    axes = getattr(getattr(kind, "mat", None), "varying", None) or getattr(kind, "vma", None)
    return frozenset(axes or ())


def is_laid_out(array: Any) -> bool:
    """Whether the type of an array says how it is divided among devices.

    Such an array cannot be joined with others, unless they are all brought to one place.
    """
    spec = getattr(getattr(_type_of(array), "sharding", None), "spec", None)
    return any(axis is not None for axis in spec or ())


def _type_of(array: Any) -> Any:
    return jax.typeof(array) if hasattr(jax, "typeof") else None
