"""Finds the state of loss scaling in an optimizer's state."""

from __future__ import annotations

import jax

from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax.apply_or_skip import ArrayTree
from lossscale.optax.scale_state import LossScaleState


def states_below(tree: ArrayTree) -> list[LossScaleState]:
    """Returns every state of loss scaling in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LossScaleState))
    return [node for node in nodes if isinstance(node, LossScaleState)]


def state_in(opt_state: ArrayTree) -> LossScaleState:
    """Returns the state of `loss_scaled`.

    Args:
        opt_state: A state from `tx.init` or `tx.update`, or an object that holds it as
            `opt_state`, such as a `TrainState` or an `nnx.Optimizer`.

    Raises:
        ArgumentTypeError: If there is none.
        ArgumentError: If another transformation is around it.
    """
    if not isinstance(opt_state, tuple) and hasattr(opt_state, "opt_state"):
        opt_state = opt_state.opt_state
    if isinstance(opt_state, LossScaleState):
        return opt_state
    around = type(opt_state).__name__
    if states_below(opt_state):
        raise ArgumentError(
            f"loss_scaled must be the outermost transformation: {around} is around it. What is "
            "outside gets scaled gradients, and does not know which steps are skipped. Write "
            "loss_scaled(...) around the whole optimizer."
        )
    raise ArgumentTypeError(
        "`opt_state` must be the state of an optimizer with loss scaling: "
        "tx = lossscale.optax.loss_scaled(inner) and then tx.init(params), or what tx.update "
        f"returned. Received: a {around}."
    )
