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


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def loop(mesh, kind):
    """A transformation and its compiled step: on global arrays, or on those of each process."""
    axis_name = "data" if kind == "axis_name" else None
    tx = loss_scaled(optax.adam(0.1), initial_scale=8, dynamic_growth_steps=2, axis_name=axis_name)

    def step(params, opt_state, batch):
        _, gradients = value_and_grad(loss_fn)(opt_state, params, batch)
        if kind != "jit":
            gradients = jax.lax.pmean(gradients, "data")
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    if kind == "jit":
        return tx, jax.jit(step)
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P())}
    return tx, jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))


def main(index, port, folder, run):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def on_all(array, *axes):
        array, sharding = np.asarray(array), NamedSharding(mesh, P(*axes))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    path = os.path.join(folder, "state")
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    found = {}
    for kind in ("jit", "pmean", "axis_name") if run == "first" else ("jit",):
        tx, step = loop(mesh, kind)
        params = {"w": np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)}
        state, scales = jax.tree.map(on_all, (params, tx.init(params))), []
        if run == "resumed":
            state = checkpointer.restore(path, state)
        for number in range(0 if run == "first" else SAVED_AFTER, STEPS):
            state = step(*state, on_all(batch_of(number), "data"))
            scales.append(float(state[1].loss_scale))
            if (run, kind, number) == ("first", "jit", SAVED_AFTER - 1):
                checkpointer.save(path, state)
                checkpointer.wait_until_finished()
        found[kind] = scales, np.asarray(state[0]["w"].addressable_data(0)).tobytes().hex()
    print(json.dumps(found), flush=True)
    if run == "first":
        # As a machine that is taken away: nothing is closed.
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
