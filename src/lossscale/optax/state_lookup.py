"""Finds the state of loss scaling in an optimizer's state, and the states around it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import jax

from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.optax.scale_state import LossScaleState

_TRANSPARENT = {
    "InjectHyperparamsState": "inner_state",
    "InjectStatefulHyperparamsState": "inner_state",
    "OverflowTrackingState": "loss_scaled",
}
"""States of wrappers that change no gradients: class name, and field of the inner state."""


def states_below(tree: Any) -> list[tuple[tuple[Any, ...], LossScaleState]]:
    """Yields every state of loss scaling in a tree, with the nodes above it, outermost first."""
    found: list[tuple[tuple[Any, ...], LossScaleState]] = []

    def walk(node: Any, above: tuple[Any, ...]) -> None:
        if isinstance(node, LossScaleState):
            found.append((above, node))
            return
        children = jax.tree.leaves(node, is_leaf=lambda below: below is not node)
        if len(children) == 1 and children[0] is node:
            return
        for child in children:
            walk(child, (*above, node))

    walk(tree, ())
    return found


def has_loss_scale(opt_state: Any) -> bool:
    """Whether a tree contains a state of loss scaling."""
    return bool(states_below(_held(opt_state)))


def _held(opt_state: Any) -> Any:
    """The state of an optimizer, or the `opt_state` of an object that holds it."""
    if not isinstance(opt_state, tuple) and hasattr(opt_state, "opt_state"):
        return opt_state.opt_state
    return opt_state


def state_in(opt_state: Any) -> LossScaleState:
    """Returns the state of `loss_scaled` in the state of an optimizer.

    Args:
        opt_state: A state from `tx.init` or `tx.update`, or an object that holds it as
            `opt_state`, such as a `TrainState` or an `nnx.Optimizer`.

    Raises:
        ArgumentTypeError: If there is none.
        ArgumentError: If there are several, or another transformation is around it that must be
            inside.
    """
    opt_state = _held(opt_state)
    if isinstance(opt_state, LossScaleState):
        return opt_state
    found = states_below(opt_state)
    if not found:
        raise ArgumentTypeError(
            "`opt_state` must be the state of an optimizer with loss scaling: "
            "tx = lossscale.optax.loss_scaled(inner) and then tx.init(params), or what tx.update "
            f"returned. Received: {described(opt_state)}."
        )
    if len(found) > 1:
        path = " > ".join(type(node).__name__ for node in found[0][0]) or "it"
        raise ArgumentError(
            f"This state has {len(found)} loss scales, and one is needed. They are in "
            f"{path}. With several optimizers, pass the state of one. In one "
            "optimizer, wrap once, outermost: loss_scaled(optax.multi_transform({...}, labels))."
        )
    above, state = found[0]
    for node, below in zip(above, [*above[1:], state], strict=True):
        if not _is_transparent(node, below):
            raise ArgumentError(_wrong_order(node, below))
    return state


def _is_transparent(node: Any, below: Any) -> bool:
    name = type(node).__name__
    if name in _TRANSPARENT:
        # A schedule outside of loss_scaled counts skipped steps too.
        has_schedule = bool(getattr(node, "hyperparams_states", None))
        return getattr(node, _TRANSPARENT[name]) is below and not has_schedule
    # optax.named_chain keeps its states in an ordered dictionary.
    return type(node) in (tuple, OrderedDict) and len(node) == 1


def _wrong_order(node: Any, below: Any) -> str:
    names = list(node) if isinstance(node, OrderedDict) else []
    if names:
        node = tuple(node.values())
    if isinstance(node, (dict, list)) or not isinstance(node, tuple):
        return (
            "`opt_state` must be the state that `init` or `update` of one optimizer returned. "
            f"Received: {described(node)} that contains one. Pass that one."
        )
    if type(node) is tuple:
        position = next(index for index, child in enumerate(node) if child is below)
        others = [
            type(child).__name__
            if not isinstance(child, tuple) or hasattr(child, "_fields")
            else "a tuple"
            for index, child in enumerate(node)
            if index != position
        ]
        chain = "optax.named_chain" if names else "optax.chain"
        around = (
            f"it is number {position + 1} of {len(node)} in {chain}, alongside transformations "
            f"with the states {', '.join(others)}. Earlier ones get scaled gradients, later ones "
            "run on skipped steps too"
        )
        right = f"loss_scaled({chain}(...))"
    elif type(node).__name__ in _TRANSPARENT:
        moved = ", ".join(map(repr, getattr(node, "hyperparams_states", ())))
        around = (
            "it is inside optax.inject_hyperparams with a schedule, which would advance on skipped "
            f"steps too: {moved}"
        )
        right = "loss_scaled(optax.inject_hyperparams(...))"
    else:
        name = type(node).__name__.removesuffix("State")
        right = f"loss_scaled({_FUNCTIONS.get(name, name)}(...))"
        around = (
            f"{name} (with the state {type(node).__name__}) is around it, gets scaled gradients "
            "and does not know which steps are skipped"
        )
    return f"loss_scaled must be the outermost transformation: {around}. Write {right}."


_FUNCTIONS = {
    "MultiSteps": "optax.MultiSteps",
    "ApplyIfFinite": "optax.apply_if_finite",
    "Partition": "optax.partition",
    "Masked": "optax.masked",
    "ScheduleFree": "optax.contrib.schedule_free",
    "SAM": "optax.contrib.sam",
    "Lookahead": "optax.lookahead",
}


def described(value: Any) -> str:
    """Describes, for a message, what was passed instead of a state."""
    name = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, LossScaleState):
        return "a state of loss_scaled"
    if type(value) in (tuple, list):
        return f"a {name} of {len(value)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {value.shape}"
    if hasattr(value, "init") and hasattr(value, "update"):
        return f"a {name}, which is the optimizer and not its state"
    return f"a {name}"
