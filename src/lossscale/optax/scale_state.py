"""The state of `loss_scaled`, and how a step updates it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lossscale.checks import LARGEST_SCALE, SMALLEST_SCALE
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax.apply_or_skip import ArrayTree
from lossscale.jax.overflow_tracker import TrackedSteps
from lossscale.rules import ScaleRule, ScaleState


class Tracked(NamedTuple):
    """What a step tracks for a monitor.

    Attributes:
        iterations: int32 scalar; number of steps so far, skipped ones included.
        steps: Arrays: `scales`, those of the last step and of the last skipped one; `skip_step`,
            the number of the last skipped step; `nonfinite`, uint32 of shape (gradients, 2), the
            infinities and NaN of its gradients.
    """

    iterations: Array
    steps: TrackedSteps


class LossScaleState(NamedTuple):
    """The state of `loss_scaled`: arrays, each with its own buffer.

    Attributes:
        loss_scale: float32 scalar; multiplies the loss of the next step.
        rule_state: The other fields of the rule's state by name, scalars. A `DynamicScale` has
            `good_steps`, int32.
        steps_skipped: int32 scalar; number of skipped steps.
        consecutive_skips: int32 scalar; number of skipped steps since the last applied one.
        inner_state: The state of the inner transformation.
        tracked: With `track_overflows`, what a `Monitor` reads, arrays: `iterations`, the number of
            steps; `steps`, the scales of the last and of the last skipped one, and the infinities
            and NaN in each gradient of that. None without it.
    """

    loss_scale: Array
    rule_state: dict[str, Array]
    steps_skipped: Array
    consecutive_skips: Array
    inner_state: optax.OptState
    # A `Tracked` or None, which is not an `optax.OptState` to a type checker.
    tracked: Any = None

    @property
    def last_step_skipped(self) -> Array:
        """Boolean scalar; whether the last step was skipped. False before the first step."""
        return array_in(self.consecutive_skips) > 0


def array_in(leaf: ArrayTree) -> Array:
    """Returns a leaf of a state; of a variable of Flax NNX, its array."""
    array: Array = leaf.get_value() if hasattr(leaf, "get_value") else leaf
    return array


def state_of(scale_state: ScaleState, inner_state: ArrayTree) -> LossScaleState:
    """Returns a state for a rule's state of Python numbers, with no skipped step."""
    scale, rule_state = _as_arrays(scale_state, scale_state.scale, _others(scale_state))
    # Separate arrays: one buffer in two places cannot be donated.
    steps_skipped, consecutive_skips = jnp.asarray(0, jnp.int32), jnp.asarray(0, jnp.int32)
    return LossScaleState(scale, rule_state, steps_skipped, consecutive_skips, inner_state)


def scalars_of(rule: ScaleRule, state: LossScaleState) -> LossScaleState:
    """Returns a state without the inner one, with each value cast to its dtype.

    Raises:
        ArgumentTypeError: If it is not a state of `loss_scaled`.
        ArgumentError: If it belongs to another rule.
    """
    if not isinstance(state, LossScaleState):
        raise ArgumentTypeError(
            "The state must be what `init` or `update` of loss_scaled returned. Received: a "
            f"{type(state).__name__}. For the state of an optimizer without loss scaling, write "
            "tx.init(params)._replace(inner_state=state)."
        )
    first = rule.init()
    # A rule that lowers the scale at each overflow keeps no count, so the count starts at 0.
    kept = {"overflows": 0, **state.rule_state}
    if missing := sorted(_others(first).keys() - kept.keys()):
        raise ArgumentError(
            f"The state belongs to another rule: `rule_state` has no {missing[0]!r}, which "
            f"{type(rule).__name__} needs. Received: rule_state with {sorted(state.rule_state)}. "
            "Keep the inner state only: tx.init(params)._replace(inner_state=state.inner_state)."
        )
    scale, rule_state = _as_arrays(first, state.loss_scale, kept)
    steps_skipped = jnp.asarray(state.steps_skipped, jnp.int32)
    consecutive_skips = jnp.asarray(state.consecutive_skips, jnp.int32)
    return LossScaleState(scale, rule_state, steps_skipped, consecutive_skips, ())


# Outside of a compiled function, this is one dispatch instead of many.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def moved(rule: ScaleRule, state: LossScaleState, finite: Array | None) -> LossScaleState:
    """Returns the state after a step, without the inner one.

    Args:
        rule: The rule that moves the scale.
        state: The state before the step, from `scalars_of`.
        finite: Whether the step is applied, a boolean scalar array; None if steps are not checked.
    """
    finite = jnp.asarray(True) if finite is None else finite
    before = first = rule.init()
    if rule.is_dynamic:
        # The scale of a fixed rule comes from the program, never from a file.
        before = before._replace(scale=state.loss_scale, **state.rule_state)
    after = rule.update(before, finite, xp=jnp)
    steps_skipped = jnp.where(finite, state.steps_skipped, state.steps_skipped + 1)
    consecutive_skips = jnp.where(finite, 0, state.consecutive_skips + 1)
    scale, rule_state = _as_arrays(first, after.scale, _others(after))
    return LossScaleState(scale, rule_state, steps_skipped, consecutive_skips, ())


def is_usable(rule: ScaleRule, scale: Array) -> Array:
    """Whether gradients can be divided by a scale: a boolean scalar array.

    A user or a file may have set any number. With an unusable one the step is skipped, and the
    rule brings the scale back.
    """
    lowest = max(rule.lowest_scale or 0.0, SMALLEST_SCALE)
    usable: Array = (scale >= jnp.float32(lowest)) & (scale <= jnp.float32(LARGEST_SCALE))
    return usable


def may_be_below_one(rule: ScaleRule) -> bool:
    """Whether unscaling can make a finite gradient infinite."""
    return rule.lowest_scale is None or rule.lowest_scale < 1.0


def _others(state: ScaleState) -> dict[str, Any]:
    """The fields of a rule's state that are not the loss scale."""
    return {name: value for name, value in state._asdict().items() if name != "scale"}


def _as_arrays(
    first: ScaleState, scale: object, others: Mapping[str, object]
) -> tuple[Array, dict[str, Array]]:
    """Returns a rule's state as arrays: the loss scale, and the other fields by name.

    Args:
        first: The rule's first state, Python numbers, which have the dtypes.
        scale: The loss scale.
        others: The other fields, or more.
    """
    dtypes = {name: _dtype(value) for name, value in _others(first).items()}
    rule_state = {name: jnp.asarray(others[name], dtype) for name, dtype in dtypes.items()}
    return jnp.asarray(scale, jnp.float32), rule_state


def _dtype(value: object) -> jax.typing.DTypeLike:
    kinds: tuple[tuple[type, jax.typing.DTypeLike], ...] = ((bool, jnp.bool_), (int, jnp.int32))
    return next((dtype for kind, dtype in kinds if isinstance(value, kind)), jnp.float32)


def without_shared_buffers(inner_state: ArrayTree, params: ArrayTree) -> ArrayTree:
    """Returns the first state of a transformation, which can be donated and compiles once.

    An array that occurs twice, or also in the parameters, cannot be donated; the state of Optax's
    COCOB has such arrays. The first step drops a weak type, so the second would be
    compiled again.
    """
    known = {id(leaf) for leaf in jax.tree.leaves(params)}

    def own(leaf: ArrayTree) -> ArrayTree:
        if id(leaf) in known and isinstance(leaf, Array):
            leaf = jnp.copy(leaf)
        known.add(id(leaf))
        if getattr(leaf, "weak_type", False):
            leaf = jax.lax.convert_element_type(leaf, leaf.dtype)
        return leaf

    return jax.tree.map(own, inner_state)
