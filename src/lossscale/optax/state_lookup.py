"""Finds the state of loss scaling in an optimizer's state."""

from __future__ import annotations

from typing import Any

import jax

from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax.apply_or_skip import ArrayTree
from lossscale.optax.scale_state import LossScaleState


def nodes(tree: ArrayTree, *names: str) -> list[Any]:
    """Returns the outermost nodes of a tree whose classes have these names."""
    found = jax.tree.leaves(tree, is_leaf=lambda node: type(node).__name__ in names)
    return [node for node in found if type(node).__name__ in names]


def state_in(opt_state: ArrayTree) -> LossScaleState:
    """Returns the state of `loss_scaled`.

    Args:
        opt_state: A state from `tx.init` or `tx.update`, or an object that holds it as
            `opt_state`, such as a `TrainState` or an `nnx.Optimizer`.

    Raises:
        ArgumentTypeError: If there is none.
        ArgumentError: If another transformation is around it, or there are several.
    """
    if not isinstance(opt_state, tuple) and hasattr(opt_state, "opt_state"):
        opt_state = opt_state.opt_state
    if isinstance(opt_state, LossScaleState):
        return opt_state
    around, found = type(opt_state).__name__, nodes(opt_state, LossScaleState.__name__)
    if len(found) > 1:
        raise ArgumentError(
            f"This state has {len(found)} loss scales, and one is needed. With several optimizers, "
            "pass the state of one. In one optimizer, wrap once, outermost: "
            "loss_scaled(optax.multi_transform({...}, labels))."
        )
    if found:
        name = _NAMES.get(around, around.removesuffix("State"))
        whole = f"{name}(...)" if around in _NAMES else "..."
        raise ArgumentError(
            f"loss_scaled must be the outermost transformation: {name} is around it. What is "
            "outside gets scaled gradients, and does not know which steps are skipped. Write "
            f"loss_scaled({whole}) around the whole optimizer."
        )
    raise ArgumentTypeError(
        "`opt_state` must be the state of an optimizer with loss scaling: "
        "tx = lossscale.optax.loss_scaled(inner) and then tx.init(params), or what tx.update "
        f"returned. Received: a {around}."
    )


_NAMES = {
    "tuple": "optax.chain",
    "OrderedDict": "optax.named_chain",
    "InjectHyperparamsState": "optax.inject_hyperparams",
    "InjectStatefulHyperparamsState": "optax.inject_hyperparams",
}
"""Functions of Optax whose states have other names."""
