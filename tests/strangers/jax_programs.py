"""Loops of JAX in the shapes of public programs.

Each takes batches and a `Scaling`, and returns what it ends with: arrays.
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


def a_jitted_loop(scaling, batches, folder):
    """`value_and_grad`, `update`, `apply_updates`."""
    tx, params = scaling.wrapped(optax.sgd(0.125, momentum=0.5)), new_params()

    @jax.jit
    def step(params, state, batch):
        _, grads = scaling.value_and_grad(loss_of)(state, params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return jax.tree.leaves(params)


def a_monitor_inside(scaling, batches, folder):
    """`optax.monitor` measures the updates that are applied, and no others."""
    measured = optax.monitor({"largest": lambda updates: jnp.max(jnp.abs(updates["w"]))})
    tx, params = scaling.wrapped(optax.chain(measured, optax.sgd(0.125))), new_params()

    @jax.jit
    def step(params, state, batch):
        _, grads = scaling.value_and_grad(loss_of)(state, params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return [*jax.tree.leaves(params), *jax.tree.leaves(scaling.inner(state)[0])]


class TrainState(NamedTuple):
    """What a loop carries."""

    params: Any
    state: Any
    average: Any


def a_scan_with_an_average_of_the_weights(scaling, batches, folder):
    """The whole epoch in a `lax.scan`, with an average of the weights beside it."""
    tx, params = scaling.wrapped(optax.adam(0.125)), new_params()

    def step(carry, batch):
        _, grads = scaling.value_and_grad(loss_of)(carry.state, carry.params, batch)
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


def gradients_added_up(scaling, batches, folder):
    """`optax.MultiSteps` inside: it takes the mean of two steps that were applied."""
    tx = scaling.wrapped(optax.MultiSteps(optax.sgd(0.125, momentum=0.5), 2))
    params = new_params()
    state = tx.init(params)
    for batch in batches:
        _, grads = scaling.value_and_grad(loss_of)(state, params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.leaves(params)


def a_file_after_every_step(scaling, batches, folder):
    """The leaves are pickled, and the program begins anew from them."""
    path = folder / "state.pickle"
    for batch in batches:
        tx, params = scaling.wrapped(optax.adam(0.125)), new_params()
        state = tx.init(params)
        if path.exists():
            leaves = pickle.loads(path.read_bytes())
            params, state = jax.tree.unflatten(jax.tree.structure((params, state)), leaves)
        _, grads = scaling.value_and_grad(loss_of)(state, params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        path.write_bytes(pickle.dumps(jax.tree.leaves(jax.device_get((params, state)))))
    return jax.tree.leaves(params)


# With how many batches there are to a step.
PROGRAMS = {
    a_jitted_loop: 1,
    a_monitor_inside: 1,
    a_scan_with_an_average_of_the_weights: 1,
    gradients_added_up: 1,
    a_file_after_every_step: 1,
}
