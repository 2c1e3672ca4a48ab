"""Optimizer steps of Optax with and without loss scaling: pure functions of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale

from lossscale import optax as ours

SCALE = 2.0**15
INTERVAL = 2000

State = Any
Loss = Callable[[Any, Any], Any]
"""Takes parameters and a batch, returns the loss."""


class Alone:
    """The optimizer alone: the gradients are inputs.

    Args:
        name: The method.
        inner: The optimizer.
    """

    def __init__(self, name: str, inner: Any) -> None:
        self.scaled = name not in ("bare", "read", "apply_if_finite")
        self._step = _ALONE[name]
        self._tx = {
            "lossscale": lambda: ours.loss_scaled(inner, initial_scale=SCALE),
            "apply_if_finite": lambda: optax.apply_if_finite(inner, 5),
        }.get(name, lambda: inner)()

    def init(self, params: Any) -> State:
        """Returns the state before the first step."""
        scale = {
            # Its numbers, since the object itself cannot be lowered on this JAX.
            _jmp: lambda: (jnp.float32(SCALE), jnp.int32(0)),
            _flax: lambda: (jnp.float32(SCALE), jnp.int32(0)),
        }.get(self._step, lambda: None)()
        return params, self._tx.init(params), scale

    def step(self, state: State, gradients: Any) -> tuple[State, Any]:
        """Returns the state after a step, and what the host reads."""
        return self._step(self._tx, *state, gradients)


def _bare(tx: Any, params: Any, opt_state: Any, scale: Any, gradients: Any) -> Any:
    updates, opt_state = tx.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, scale), None


def _read(tx: Any, params: Any, opt_state: Any, scale: Any, gradients: Any) -> Any:
    total = sum(jnp.sum(gradient) for gradient in jax.tree.leaves(gradients))
    return _bare(tx, params, opt_state, scale, gradients)[0], total


def _jmp(tx: Any, params: Any, opt_state: Any, scale: Any, gradients: Any) -> Any:
    scale = jmp.DynamicLossScale(*scale)
    gradients = scale.unscale(gradients)
    finite = jmp.all_finite(gradients)
    (new, new_state, _), _ = _bare(tx, params, opt_state, None, gradients)
    kept = jmp.select_tree(finite, (new, new_state), (params, opt_state))
    scale = scale.adjust(finite)
    return (*kept, (scale.loss_scale, scale.counter)), None


def _flax(tx: Any, params: Any, opt_state: Any, scale: Any, gradients: Any) -> Any:
    # What `DynamicScale.value_and_grad` does after the backward pass, and its example after that.
    number, good = scale
    gradients = jax.tree.map(lambda g: g / number, gradients)
    finite = jnp.array(True)
    for gradient in jax.tree.leaves(gradients):
        finite &= jnp.all(jax.lax.is_finite(gradient))
    grows = good == INTERVAL
    grown = jnp.where(grows & finite, jnp.minimum(number * 2.0, 3.4e38), number)
    number = jnp.where(finite, grown, jnp.maximum(number * 0.5, 1.2e-38))
    good = jnp.where(grows | ~finite, 0, good + 1)
    (new, new_state, _), _ = _bare(tx, params, opt_state, None, gradients)
    kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), (new, new_state), (params, opt_state))
    return (*kept, (number, good)), None


_ALONE = {
    "bare": _bare,
    "read": _read,
    "lossscale": _bare,
    "apply_if_finite": _bare,
    "jmp": _jmp,
    "flax": _flax,
}


class Whole:
    """A whole training step in float16, with parameters in float32.

    Args:
        name: The method.
        inner: The optimizer.
        loss: The loss.
    """

    def __init__(self, name: str, inner: Any, loss: Loss) -> None:
        self._alone, self._name, self._loss = Alone(name, inner), name, loss

    def init(self, params: Any) -> State:
        """Returns the state before the first step."""
        if self._name == "flax":
            return params, self._alone._tx.init(params), DynamicScale(scale=jnp.float32(SCALE))
        return self._alone.init(params)

    def step(self, state: State, batch: Any) -> tuple[State, Any]:
        """Returns the state after a step, and the loss."""
        params, opt_state, scale = state
        if self._name == "lossscale":
            loss, gradients = ours.value_and_grad(self._loss)(opt_state, params, batch)
        elif self._name == "jmp":

            def scaled(params: Any) -> Any:
                loss = self._loss(params, batch)
                return jmp.DynamicLossScale(*scale).scale(loss), loss

            gradients, loss = jax.grad(scaled, has_aux=True)(params)
        elif self._name == "flax":
            scale, finite, loss, gradients = scale.value_and_grad(self._loss)(params, batch)
            (new, new_state, _), _ = _bare(self._alone._tx, params, opt_state, None, gradients)
            kept = jax.tree.map(
                lambda n, o: jnp.where(finite, n, o), (new, new_state), (params, opt_state)
            )
            return (*kept, scale), loss
        else:
            loss, gradients = jax.value_and_grad(self._loss)(params, batch)
        state, _ = self._alone.step((params, opt_state, scale), gradients)
        return state, loss
