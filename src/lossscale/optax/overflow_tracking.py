"""What a step tracks for a monitor: which gradients overflow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from lossscale.errors import ArgumentError
from lossscale.jax import overflow_tracker
from lossscale.jax.apply_or_skip import ArrayTree, Path
from lossscale.jax.gradients import unscaled
from lossscale.optax.gating import is_gradient
from lossscale.optax.scale_state import LossScaleState, Tracked, may_be_below_one
from lossscale.rules import ScaleRule


def first(params: ArrayTree) -> Tracked:
    """Returns what is tracked before the first step."""
    empty = overflow_tracker.init(len(named_leaves(params)))
    return Tracked(jnp.asarray(0, jnp.int32), jax.tree.map(jnp.array, empty))


def check_state(state: LossScaleState, tracks: bool, gradients: ArrayTree) -> None:
    """Checks that a state tracks these gradients, or none.

    Raises:
        ArgumentError: If it does not do what the optimizer does, or tracks others.
    """
    tracked, wanted = state.tracked, len(named_leaves(gradients)) if tracks else None
    rows = None if tracked is None else tracked.steps.nonfinite.shape[-2]
    if rows != wanted:
        raise ArgumentError(
            f"With track_overflows={tracks} and these gradients, the state must track "
            f"{wanted or 'none'}. Received: a state that tracks {rows or 'none'}. Write opt_state."
            "_replace(tracked=tx.init(params).tracked), with a parameter for each gradient."
        )


def after_step(
    rule: ScaleRule,
    axis_names: tuple[str, ...],
    before: LossScaleState,
    after: LossScaleState,
    gradients: ArrayTree,
) -> Tracked:
    """Returns what is tracked after a step, given its scaled gradients."""
    tracked: Tracked = before.tracked
    given = [leaf for _, leaf in named_leaves(gradients)]
    number = jnp.asarray(tracked.iterations, jnp.int32) + 1
    # A scale of 1 or more makes no difference.
    divide = may_be_below_one(rule)
    steps = overflow_tracker.update(
        tracked.steps,
        lambda: unscaled(given, before.loss_scale, rule.powers_of_two) if divide else given,
        finite=jnp.logical_not(after.last_step_skipped) if rule.checks_gradients else True,
        scale=before.loss_scale,
        number=number,
        axis_names=axis_names,
    )
    return Tracked(number, steps)


def named_leaves(tree: ArrayTree) -> list[tuple[str, Array]]:
    """Returns the leaves that have gradients, each with its path as its name; names may repeat."""
    leaves = jax.tree.leaves_with_path(tree)
    return [(_name(path), leaf) for path, leaf in leaves if is_gradient(leaf)]


def _name(path: Path) -> str:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # A flax.nnx variable is a node with one leaf. The user chose the key of a dictionary.
    is_key = bool(path) and isinstance(path[-1], jax.tree_util.DictKey)
    if not is_key and len(parts) > 1 and parts[-1] == "value":
        parts.pop()
    return "/".join(parts) or "params"
