"""A transformation around `loss_scaled` that tracks, for a monitor, which gradients overflow."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

import lossscale.optax.gating as gating
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax import overflow_tracker
from lossscale.jax.apply_or_skip import ArrayTree, Path
from lossscale.jax.gradients import Gradient, unscaled
from lossscale.jax.overflow_tracker import TrackedSteps
from lossscale.optax.gating import GradientTransformationExtraArgs
from lossscale.optax.scale_state import LossScaleState, may_be_below_one
from lossscale.optax.transformation import LossScaled
from lossscale.rules import ScaleRule


class OverflowTrackingState(NamedTuple):
    """The state of `track_overflows`.

    Attributes:
        iterations: int32 scalar; number of steps so far, skipped ones included.
        tracked: Arrays: `scales`, those of the last step and of the last skipped one; `skip_step`,
            the number of the last skipped step; `nonfinite`, uint32 of shape (gradients, 2), the
            infinities and NaN of its gradients.
        loss_scaled: The state of `loss_scaled`.
    """

    iterations: Array
    tracked: TrackedSteps
    loss_scaled: LossScaleState


def track_overflows(
    tx: optax.GradientTransformation,
) -> GradientTransformationExtraArgs[OverflowTrackingState]:
    """Makes an optimizer with loss scaling track, for a `Monitor`, which gradients overflow.

    The state then holds the scale of the last step, and the number of infinities and NaN in each
    gradient on the last skipped step. It stays on the device, and nothing waits for it. Elements
    are counted on skipped steps only. Training gives the same numbers as without it.

    With `pmap` each replica tracks its own gradients.

    Args:
        tx: The result of `loss_scaled`.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Its state is an `OverflowTrackingState`. To
        continue with a state of `tx`, write
        `track_overflows(tx).init(params)._replace(loss_scaled=state)`.

    Raises:
        ArgumentTypeError: If `tx` is not the result of `loss_scaled`.

    Examples:
        >>> tx = lossscale.optax.loss_scaled(optax.sgd(0.5))
        >>> tx = lossscale.optax.track_overflows(tx)
        >>> opt_state = tx.init({"w": jnp.ones(2)})
        >>> _, opt_state = tx.update({"w": jnp.float32([1.0, jnp.inf])}, opt_state)
        >>> opt_state.tracked.nonfinite
        Array([[1, 0]], dtype=uint32)
    """
    owner = gating.owner_of(tx)
    if not isinstance(owner, LossScaled):
        raise ArgumentTypeError(
            "`tx` must be what lossscale.optax.loss_scaled returned: "
            f"track_overflows(loss_scaled(optax.adamw(1e-3))). Received: a {type(tx).__name__}."
        )
    scaling = cast("GradientTransformationExtraArgs[LossScaleState]", tx)
    tracking = _OverflowTracking(scaling, owner.rule)
    return GradientTransformationExtraArgs(tracking.init, tracking.update)


@dataclasses.dataclass(eq=False)
class _OverflowTracking:
    """The two functions of the transformation."""

    scaling: GradientTransformationExtraArgs[LossScaleState]
    rule: ScaleRule

    def init(self, params: ArrayTree) -> OverflowTrackingState:
        """Returns the state before the first step."""
        empty = overflow_tracker.init(len(named_leaves(params)))
        return OverflowTrackingState(
            jnp.asarray(0, jnp.int32), jax.tree.map(jnp.array, empty), self.scaling.init(params)
        )

    def update(
        self,
        updates: ArrayTree,
        state: OverflowTrackingState,
        params: ArrayTree = None,
        **extra_args: Any,
    ) -> tuple[ArrayTree, OverflowTrackingState]:
        """Returns the updates and the state after a step.

        Args:
            updates: Gradients of the scaled loss.
            state: The state before the step.
            params: The parameters, for transformations that read them.
            extra_args: Further arguments of the inner transformation.
        """
        if not isinstance(state, OverflowTrackingState):
            raise ArgumentTypeError(
                "The state must be what `init` or `update` of track_overflows(tx) returned. "
                f"Received: a {type(state).__name__}. For a state of `tx`, write "
                "track_overflows(tx).init(params)._replace(loss_scaled=state)."
            )
        rows = state.tracked.nonfinite.shape[-2]
        gradients_now = gating.with_arrays(updates)
        by_row = rows_of(gradients_now if params is None else params, gradients_now)
        if len(by_row) != rows:
            raise ArgumentError(
                f"The number of gradients must not change. Received: {len(by_row)}, for a state "
                f"that tracks {rows}. Create it with the trained parameters: tx.init(params)."
            )
        before = state.loss_scaled
        new_updates, after = self.scaling.update(updates, before, params, **extra_args)
        number = jnp.asarray(state.iterations, jnp.int32) + 1

        def gradients() -> list[Gradient]:
            # A scale of 1 or more makes no difference: these are what `tx` has checked.
            if not may_be_below_one(self.rule):
                return by_row
            return unscaled(by_row, before.loss_scale, self.rule.powers_of_two)

        tracked = overflow_tracker.update(
            state.tracked,
            gradients,
            finite=jnp.logical_not(after.last_step_skipped) if self.rule.checks_gradients else True,
            scale=before.loss_scale,
            number=number,
        )
        return new_updates, OverflowTrackingState(number, tracked, after)


def named_leaves(tree: ArrayTree) -> list[tuple[str, Array]]:
    """Returns the leaves that have gradients, each with its path as its name; names may repeat."""
    return [(_name(path), leaf) for path, leaf in _with_paths(tree)]


def rows_of(params: ArrayTree, gradients: ArrayTree) -> list[Gradient]:
    """Returns the gradient of each leaf of the parameters, in their order, or None.

    A gradient belongs to the leaf with the same path. If the parameters contain that path deeper
    in the tree, as the pair of `optax.lookahead` does, it belongs to the first such leaf.
    """
    of_rows = [path for path, _ in _with_paths(params)]
    by_row: list[Gradient] = [None] * len(of_rows)
    rows = {path: row for row, path in enumerate(of_rows)}
    given = _with_paths(gradients)
    if len(given) == len(of_rows) and rows.keys().isdisjoint(path for path, _ in given):
        # The nodes are of different classes, such as a flax.nnx state and a dictionary.
        return [gradient for _, gradient in given]
    for path, gradient in given:
        row = rows.get(path)
        if row is None:
            deeper = (row for row, whole in enumerate(of_rows) if whole[-len(path) :] == path)
            row = next((each for each in deeper if by_row[each] is None), None)
        if row is not None:
            by_row[row] = gradient
    return by_row


def _with_paths(tree: ArrayTree) -> list[tuple[Path, Array]]:
    leaves = jax.tree.leaves_with_path(tree)
    return [(path, leaf) for path, leaf in leaves if gating.is_gradient(leaf)]


def _name(path: Path) -> str:
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # A flax.nnx variable is a node with one leaf. The user chose the key of a dictionary.
    is_key = bool(path) and isinstance(path[-1], jax.tree_util.DictKey)
    if not is_key and len(parts) > 1 and parts[-1] == "value":
        parts.pop()
    return "/".join(parts) or "params"
