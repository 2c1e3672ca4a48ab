"""One of two processes that train together: `main(index, port, folder, "first" or "resumed")`.

The first run writes a checkpoint after two steps, goes on to the end, and is killed there; the
other one goes on from the file. Each prints the scales of all steps and the bytes of the weights.
"""

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lossscale.optax import loss_scaled, value_and_grad

STEPS, SAVED_AFTER = 4, 2


def batch_of(number):
    """The inputs of both processes; in the second step, one number of the second one overflows."""
    inputs = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4) + number / 8
    if number == 1:
        inputs[3, 2] = np.inf
    return inputs


def on_all(mesh, array, *axes):
    array = np.asarray(array)
    sharding = NamedSharding(mesh, P(*axes))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def step(tx, params, opt_state, batch, reduced=False):
    _, gradients = value_and_grad(loss_fn)(opt_state, params, batch)
    if reduced:
        gradients = jax.lax.pmean(gradients, "data")
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def optimizer(axis_name=None):
    return loss_scaled(
        optax.adam(0.1), initial_scale=8, dynamic_growth_steps=2, axis_name=axis_name
    )


def cases(mesh):
    """An optimizer and the step to compile, by name."""

    def mapped(axis_name, reduced):
        tx = optimizer(axis_name)
        return tx, jax.shard_map(
            lambda *a: step(tx, *a, reduced=reduced),
            mesh=mesh,
            in_specs=(P(), P(), P("data")),
            out_specs=(P(), P()),
            check_vma=False,
        )

    plain = optimizer()
    return {
        "jit": (plain, lambda *a: step(plain, *a)),
        "pmean": mapped(None, reduced=True),
        "axis_name": mapped("data", reduced=True),
    }


def run(mesh, tx, compiled, state, numbers, after_each=lambda number, state: None):
    scales = []
    for number in numbers:
        state = compiled(*state, on_all(mesh, batch_of(number), "data"))
        scales.append(float(state[1].loss_scale))
        after_each(number, state)
    return scales, np.asarray(state[0]["w"].addressable_data(0)).tobytes().hex()


def first_state(mesh, tx):
    params = {"w": np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)}
    return jax.tree.map(lambda a: on_all(mesh, a), (params, tx.init(params)))


def main(index, port, folder, run_name):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    path = os.path.join(folder, "state")
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    found = {}
    for name, (tx, function) in cases(mesh).items():
        compiled, state = jax.jit(function), first_state(mesh, tx)
        if run_name == "first":

            def save(number, state, name=name):
                if (name, number) == ("jit", SAVED_AFTER - 1):
                    checkpointer.save(path, state)
                    checkpointer.wait_until_finished()

            found[name] = run(mesh, tx, compiled, state, range(STEPS), save)
        elif name == "jit":
            state = checkpointer.restore(path, state)
            found[name] = run(mesh, tx, compiled, state, range(SAVED_AFTER, STEPS))
    print(json.dumps(found), flush=True)
    if run_name == "first":
        # As a machine that is taken away: nothing is closed.
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
