"""Runs an inner transformation so that a step which is skipped changes nothing.

Choosing between the new and the old state after the update costs memory: the new moments are used
twice, as the output and in the update, and XLA copies the old ones to compute them twice. Here each
new leaf of the state is chosen where it is made, and everything after reads what was chosen. If
the step is applied, that is the new leaf. If not, it is the old one, and what is computed from it
is not used. So nothing is copied, nothing branches, and all devices run the same operations.

To know where a leaf is made, the transformation is traced once, and what was traced is evaluated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.jax import jaxprs
from lossscale.optax.judging import (
    each_finite,
    is_gradient,
    is_laid_out,
    is_traced,
    varying,
)

Update = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Takes gradients, state and parameters; returns updates and the new state."""


def skipped_like(update: Any) -> Any:
    """An update that leaves a parameter as it is, bit for bit: adding +0.0 would lose -0.0."""
    if not is_gradient(update):
        return jnp.zeros_like(update)
    zero = complex(-0.0, -0.0) if jnp.issubdtype(update.dtype, jnp.complexfloating) else -0.0
    return jnp.full_like(update, zero)


def is_array(leaf: Any) -> bool:
    # Gradients by integers are arrays of float0 that no operation takes. A model of Equinox that is
    # given as the parameters has functions in it.
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (bool, int, float, complex))
    return bool(dtype != jax.dtypes.float0)


def chosen(finite: Any, new: Any, old: Any) -> Any:
    """The new leaf of a state if the step is applied, else the old one, in the dtype of that."""
    if new is old:
        return old
    return _strong(jnp.where(finite, jnp.asarray(new, old.dtype), old))


class Traced(NamedTuple):
    """What a transformation does, as JAX traced it.

    Attributes:
        jaxpr: From the leaves of gradients, state and parameters to those of updates and state.
        inputs: The leaves.
        updates: How many of the outputs are updates.
        rebuild: Makes the updates and the new state from the outputs.
    """

    jaxpr: Any
    inputs: list[Any]
    updates: int
    rebuild: Callable[[Sequence[Any]], tuple[Any, Any]]


def trace(update: Update, gradients: Any, state: Any, params: Any) -> Traced:
    """Traces an update without running it."""
    leaves, structure = jax.tree.flatten((gradients, state, params))
    inputs = [leaf for leaf in leaves if is_array(leaf)]
    found: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        filled = [next(given) if is_array(leaf) else leaf for leaf in leaves]
        updates, new_state = update(*jax.tree.unflatten(structure, filled))
        parts = [jax.tree.flatten(updates), jax.tree.flatten(new_state)]
        found["structures"] = [part[1] for part in parts]
        # Of what is no array nothing is traced, and nothing of this trace may stay.
        found["kept"] = [[None if is_array(x) else x for x in part[0]] for part in parts]
        return [x for part in parts for x in part[0] if is_array(x)]

    jaxpr = jax.make_jaxpr(flat)(*inputs)

    def rebuild(outputs: Sequence[Any]) -> tuple[Any, Any]:
        rest = iter(outputs)
        updates, new_state = (
            jax.tree.unflatten(whole, [next(rest) if x is None else x for x in kept])
            for whole, kept in zip(found["structures"], found["kept"], strict=True)
        )
        return updates, new_state

    number = sum(x is None for x in found["kept"][0])
    return Traced(jaxpr, inputs, number, rebuild)


def run(
    update: Update, finite: Any, gradients: Any, state: Any, params: Any, *, looks_itself: bool
) -> tuple[Any, Any, Any]:
    """Runs an update if a step is finite, and otherwise leaves everything as it is.

    Args:
        update: The transformation inside.
        finite: The verdict, a boolean scalar array; None if every step is applied.
        gradients: Unscaled, and 0 on a step that is not finite.
        state: The state of the transformation inside.
        params: The parameters, or None.
        looks_itself: Whether it takes gradients of its own, so that the updates have to be looked
            at too.

    Returns:
        The verdict, of the updates too if they were looked at; the updates, -0.0 on a skip; the
        new state.
    """
    if finite is None:
        updates, new_state = update(gradients, state, params)
        return None, updates, _in_dtypes_of(state, new_state)
    if not is_traced([finite]):
        return _run_at_once(update, finite, gradients, state, params, looks_itself)
    traced = trace(update, gradients, state, params)
    old = [leaf for leaf in jax.tree.leaves(state) if is_array(leaf)]
    old = [jnp.asarray(leaf) for leaf in old]
    if looks_itself:
        outputs = jaxprs.evaluate(traced.jaxpr, traced.inputs)
        finite = finite & each_finite(outputs[: traced.updates])
        news = _chosen_after(finite, outputs[traced.updates :], old)
        updates = outputs[: traced.updates]
    elif jaxprs.made_by_control_flow(traced.jaxpr, traced.updates) and _may_branch(finite, traced):
        outputs = _branch(finite, traced, old)
        return finite, *traced.rebuild(outputs)
    else:
        outputs = jaxprs.evaluate(
            traced.jaxpr,
            traced.inputs,
            gates=dict(enumerate(old, start=traced.updates)),
            choose=lambda new, previous: chosen(finite, new, previous),
        )
        updates, news = outputs[: traced.updates], outputs[traced.updates :]
    updates = [jnp.where(finite, update, skipped_like(update)) for update in updates]
    return finite, *traced.rebuild([*updates, *news])


def _chosen_after(finite: Any, news: Sequence[Any], olds: Sequence[Any]) -> list[Any]:
    return [chosen(finite, new, old) for new, old in zip(news, olds, strict=True)]


def _may_branch(finite: Any, traced: Traced) -> bool:
    # The two sides of a branch must agree on how devices hold what they return.
    return not any(varying(leaf) or is_laid_out(leaf) for leaf in [finite, *traced.inputs])


def _branch(finite: Any, traced: Traced, old: list[Any]) -> list[Any]:
    shapes = traced.jaxpr.out_avals

    def applied() -> list[Any]:
        outputs = jaxprs.evaluate(traced.jaxpr, traced.inputs)
        updates, news = outputs[: traced.updates], outputs[traced.updates :]
        same = [jnp.asarray(n, o.dtype) for n, o in zip(news, old, strict=True)]
        return [*map(_strong, updates), *map(_strong, same)]

    def skipped() -> list[Any]:
        updates = [
            skipped_like(jnp.zeros(shape.shape, shape.dtype)) for shape in shapes[: traced.updates]
        ]
        return [*map(_strong, updates), *map(_strong, old)]

    outputs: list[Any] = jax.lax.cond(finite, applied, skipped)
    return outputs


def _strong(array: Any) -> Any:
    return jax.lax.convert_element_type(array, array.dtype)


def _run_at_once(
    update: Update, finite: Any, gradients: Any, state: Any, params: Any, looks_itself: bool
) -> tuple[Any, Any, Any]:
    """Outside a compiled function, where a branch of JAX would be compiled at every call."""
    if bool(jax.device_get(finite)):
        updates, new_state = update(gradients, state, params)
        if looks_itself:
            finite = each_finite(jax.tree.leaves(updates))
        if not looks_itself or bool(jax.device_get(finite)):
            return finite, updates, _in_dtypes_of(state, new_state)
    else:
        updates = gradients
    traced = trace(update, gradients, state, params)
    shapes = traced.jaxpr.out_avals
    nothing = _no_updates(finite, shapes[: traced.updates], jax.tree.leaves(updates))
    updates, _ = traced.rebuild([*nothing, *shapes[traced.updates :]])
    return finite, updates, state


def _no_updates(finite: Any, shapes: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Updates of these types that change nothing, divided among devices as the leaves are."""
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    if [array.shape for array in arrays] != [shape.shape for shape in shapes]:
        arrays = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
    dtypes = tuple(shape.dtype for shape in shapes)
    nothing: list[Any] = _skipped_jit(dtypes, finite, arrays)
    return nothing


@functools.partial(jax.jit, static_argnums=0)
def _skipped_jit(dtypes: tuple[Any, ...], finite: Any, arrays: list[Any]) -> list[Any]:
    # Chosen by a verdict that is known: of constants every device would hold the whole.
    same = [array.astype(dtype) for dtype, array in zip(dtypes, arrays, strict=True)]
    return [jnp.where(finite, array, skipped_like(array)) for array in same]


def _in_dtypes_of(old_state: Any, new_state: Any) -> Any:
    def same(old: Any, new: Any) -> Any:
        # A user may have put a Python number into the state.
        dtype = getattr(old, "dtype", None)
        return _strong(jnp.asarray(new, dtype)) if is_array(new) else new

    return jax.tree.map(same, old_state, new_state)
