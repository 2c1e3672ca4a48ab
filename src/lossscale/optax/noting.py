"""A transformation around `loss_scaled` that notes what a monitor wants to know of the steps."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import lossscale.optax.overflow_check as overflow_check
from lossscale.common.notes import unique
from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentError,
    ArgumentTypeError,
    UnsupportedError,
)
from lossscale.jax import notes
from lossscale.jax.apply_or_skip import varying
from lossscale.jax.gradients import unscaled
from lossscale.jax.notes import NoteState
from lossscale.optax.scale_state import LossScaleState
from lossscale.optax.transformation import LossScaled
from lossscale.rules import ScaleRule


class NotedState(NamedTuple):
    """The state of `noted`.

    Attributes:
        noted_steps: int32 scalar; how many steps were noted, skipped ones included.
        notes: What was noted, arrays.
        loss_scaled: The state of `loss_scaled`.
    """

    noted_steps: Any
    notes: NoteState
    loss_scaled: LossScaleState


def noted(tx: Any) -> Any:
    """Lets an optimizer with loss scaling note, for a `Monitor`, what overflows.

    It notes the scale of each step, and how many infinities and NaN each gradient had on the last
    skipped step. All of it is part of the state and stays on the device; nothing waits for it. What
    is counted is counted only on skipped steps. What the optimizer does is the same.

    With `pmap` each replica notes its own gradients.

    Args:
        tx: What `loss_scaled` returned.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Its state is a `NotedState`; a state of `tx`
        goes in as `noted(tx).init(params)._replace(loss_scaled=state)`.

    Raises:
        ArgumentTypeError: If `tx` is not what `loss_scaled` returned. It is a `TypeError`.
        AlreadyWrappedError: If it notes already. It is a `TypeError`.
        UnsupportedError: In `update`, if it is in a `shard_map` whose devices have gradients of
            their own. It is a `NotImplementedError`.

    Examples:
        >>> tx = lossscale.optax.noted(lossscale.optax.loss_scaled(optax.sgd(0.5)))
        >>> opt_state = tx.init({"w": jnp.ones(2)})
        >>> _, opt_state = tx.update({"w": jnp.float32([1.0, jnp.inf])}, opt_state)
        >>> opt_state.notes.nonfinite
        Array([[1, 0]], dtype=uint32)
    """
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    if isinstance(owner, _Noted):
        raise AlreadyWrappedError("This optimizer notes already. Use it as it is.")
    if not isinstance(owner, LossScaled):
        raise ArgumentTypeError(
            "`tx` must be what lossscale.optax.loss_scaled returned: "
            f"noted(loss_scaled(optax.adamw(1e-3))). Received: a {type(tx).__name__}."
        )
    made = _Noted(tx, owner.rule)
    return optax.GradientTransformationExtraArgs(made.init, made.update)


class _Noted:
    """The two functions of a transformation that notes."""

    def __init__(self, tx: Any, rule: ScaleRule) -> None:
        self._tx = tx
        self.rule = rule

    def init(self, params: Any) -> NotedState:
        """Returns the state before the first step."""
        empty = notes.init(len(named_leaves(params)))
        return NotedState(
            jnp.asarray(0, jnp.int32), jax.tree.map(jnp.array, empty), self._tx.init(params)
        )

    def update(
        self, updates: Any, state: NotedState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, NotedState]:
        """Returns the updates and the state after a step.

        Args:
            updates: Gradients of the scaled loss.
            state: The state before the step.
            params: The parameters, for transformations that read them.
            extra_args: What the transformation inside takes besides.
        """
        if not isinstance(state, NotedState):
            raise ArgumentTypeError(
                "The state must be what `init` or `update` of noted(tx) returned. Received: a "
                f"{type(state).__name__}. One of `tx` goes in as "
                "noted(tx).init(params)._replace(loss_scaled=state)."
            )
        rows = state.notes.nonfinite.shape[-2]
        gradients_now = overflow_check.with_arrays(updates)
        found = rows_of(gradients_now if params is None else params, gradients_now)
        if len(found) != rows:
            raise ArgumentError(
                f"The state has notes of {rows} gradients, and there are {len(found)} now. "
                "Make it with the parameters that are trained: tx.init(params)."
            )
        if any(varying(leaf) for leaf in found if leaf is not None):
            raise UnsupportedError(
                "noted() keeps what all devices have together, and in this shard_map each has "
                "gradients of its own. Leave noted() out, or use jit over sharded arrays."
            )
        before = state.loss_scaled
        new_updates, after = self._tx.update(updates, before, params, **extra_args)
        number = jnp.asarray(state.noted_steps, jnp.int32) + 1

        def gradients() -> list[Any]:
            return unscaled(found, before.loss_scale, self.rule.powers_of_two)

        noted_now = notes.update(
            state.notes,
            gradients,
            finite=jnp.logical_not(after.last_step_skipped) if self.rule.checks_gradients else True,
            scale=before.loss_scale,
            number=number,
        )
        same = jax.tree.map(
            lambda new, old: jnp.asarray(new, jnp.asarray(old).dtype), noted_now, state.notes
        )
        return new_updates, NotedState(number, same, after)


def names_of(params: Any) -> tuple[str, ...]:
    """Names the gradients by these parameters, in the order of their leaves."""
    return unique([name for name, _ in named_leaves(params)])


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves that have gradients, each with its path as a name to show; names may recur."""
    leaves = _with_paths(tree)
    below = Counter(path[:-1] for path, _ in leaves)
    return [(_name(path, alone=below[path[:-1]] == 1), leaf) for path, leaf in leaves]


def rows_of(params: Any, gradients: Any) -> list[Any]:
    """The gradient of each leaf of the parameters that has one, in their order; None of others.

    They belong together by their places. Where parameters hold gradients' places deeper down, as
    the pair of `optax.lookahead` does, the first such place counts.
    """
    of_rows = [path for path, _ in _with_paths(params)]
    found: list[Any] = [None] * len(of_rows)
    rows = {path: row for row, path in enumerate(of_rows)}
    given = _with_paths(gradients)
    if len(given) == len(of_rows) and rows.keys().isdisjoint(path for path, _ in given):
        # Nodes of other classes, such as a state of flax.nnx beside a dictionary.
        return [gradient for _, gradient in given]
    for path, gradient in given:
        row = rows.get(path)
        if row is None:
            deeper = (row for row, whole in enumerate(of_rows) if whole[-len(path) :] == path)
            row = next((each for each in deeper if found[each] is None), None)
        if row is not None:
            found[row] = gradient
    return found


def _with_paths(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(tuple(path), leaf) for path, leaf in leaves if overflow_check.is_gradient(leaf)]


def _name(path: Any, alone: bool) -> str:
    parts = [
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    ]
    # A variable of flax.nnx is a node with one leaf. A key of a dictionary is the user's.
    is_key = bool(path) and isinstance(path[-1], jax.tree_util.DictKey)
    if alone and not is_key and len(parts) > 1 and parts[-1] == "value":
        parts.pop()
    return "/".join(parts) or "params"
