"""Finds the state of loss scaling in an optimizer's state, and the states around it."""

from __future__ import annotations

from collections import OrderedDict

import jax

from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax.apply_or_skip import ArrayTree
from lossscale.optax.scale_state import LossScaleState

_TRANSPARENT = {
    "InjectHyperparamsState": "inner_state",
    "InjectStatefulHyperparamsState": "inner_state",
    "OverflowTrackingState": "loss_scaled",
}
"""States of wrappers that change no gradients: class name, and field of the inner state."""


def states_below(tree: ArrayTree) -> list[tuple[tuple[object, ...], LossScaleState]]:
    """Returns every state of loss scaling in a tree, with the nodes above it, outermost first."""
    found: list[tuple[tuple[object, ...], LossScaleState]] = []

    def walk(node: object, above: tuple[object, ...]) -> None:
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


def held(opt_state: ArrayTree) -> ArrayTree:
    """The state of an optimizer, or the `opt_state` of an object that holds it."""
    if not isinstance(opt_state, tuple) and hasattr(opt_state, "opt_state"):
        return opt_state.opt_state
    return opt_state


def state_in(opt_state: ArrayTree) -> LossScaleState:
    """Returns the state of `loss_scaled` in the state of an optimizer.

    Args:
        opt_state: A state from `tx.init` or `tx.update`, or an object that holds it as
            `opt_state`, such as a `TrainState` or an `nnx.Optimizer`.

    Raises:
        ArgumentTypeError: If there is none.
        ArgumentError: If there are several, or another transformation is around it that must be
            inside.
    """
    opt_state = held(opt_state)
    found = states_below(opt_state)
    if not found:
        raise ArgumentTypeError(
            "`opt_state` must be the state of an optimizer with loss scaling: "
            "tx = lossscale.optax.loss_scaled(inner) and then tx.init(params), or what tx.update "
            f"returned. Received: a {type(opt_state).__name__}."
        )
    if len(found) > 1:
        path = " > ".join(type(node).__name__ for node in found[0][0]) or "it"
        raise ArgumentError(
            f"This state has {len(found)} loss scales, and one is needed. They are in "
            f"{path}. With several optimizers, pass the state of one. In one "
            "optimizer, wrap once, outermost: loss_scaled(optax.multi_transform({...}, labels))."
        )
    above, state = found[0]
    for node, below in zip(above, [*above[1:], state], strict=False):
        if not _is_transparent(node, below):
            names = {"tuple": "optax.chain", "OrderedDict": "optax.named_chain"}
            name = type(node).__name__
            around = names.get(name, name.removesuffix("State"))
            raise ArgumentError(
                f"loss_scaled must be the outermost transformation: {around} is around it. What is "
                "outside gets scaled gradients, and does not know which steps are skipped. Write "
                "loss_scaled(...) around the whole optimizer."
            )
    return state


def _is_transparent(node: ArrayTree, below: object) -> bool:
    name = type(node).__name__
    if name in _TRANSPARENT:
        # A schedule outside of loss_scaled counts skipped steps too.
        has_schedule = bool(getattr(node, "hyperparams_states", None))
        return getattr(node, _TRANSPARENT[name]) is below and not has_schedule
    # optax.named_chain keeps its states in an ordered dictionary.
    return type(node) in (tuple, OrderedDict) and len(node) == 1
