"""Loops of JAX in the shapes of public programs.

Each takes what wraps an optimizer, what derives a loss by parameters, and batches; it returns the
arrays that it ends with.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def new_params():
    return {"w": jnp.array([0.5, -0.25, 1.0]), "b": jnp.array(0.125)}


def loss_of(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


class TrainState(NamedTuple):
    """What a loop carries."""

    params: Any
    state: Any
    average: Any


def a_scan_with_an_average_of_the_weights(wrap, value_and_grad, batches, folder):
    """The whole epoch in a `lax.scan`, with an average of the weights beside it."""
    tx, params = wrap(optax.adam(0.125)), new_params()

    def step(carry, batch):
        _, grads = value_and_grad(loss_of)(carry.state, carry.params, batch)
        updates, state = tx.update(grads, carry.state, carry.params)
        params = optax.apply_updates(carry.params, updates)
        # The weights do not move on a skipped step, and neither must the average.
        average = jax.tree.map(
            lambda a, new, old: jnp.where(jnp.all(new == old), a, 0.5 * a + 0.5 * new),
            carry.average,
            params,
            carry.params,
        )
        return TrainState(params, state, average), None

    start = TrainState(params, tx.init(params), params)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    end, _ = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))(start, stacked)
    return jax.tree.leaves((end.params, end.average))


def a_file_after_every_step(wrap, value_and_grad, batches, folder):
    """The leaves are pickled, and the program begins anew from them."""
    path = folder / "state.pickle"
    for batch in batches:
        tx, params = wrap(optax.adam(0.125)), new_params()
        state = tx.init(params)
        if path.exists():
            leaves = pickle.loads(path.read_bytes())
            params, state = jax.tree.unflatten(jax.tree.structure((params, state)), leaves)
        _, grads = value_and_grad(loss_of)(state, params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        path.write_bytes(pickle.dumps(jax.tree.leaves(jax.device_get((params, state)))))
    return jax.tree.leaves(params)


PROGRAMS = a_scan_with_an_average_of_the_weights, a_file_after_every_step
