"""Two processes that train together over gloo.

Processes of their own, since those that train together are made known to JAX when it starts.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from forks import Program
from lossscale.optax import loss_scaled, value_and_grad
from two_workers import free_ports


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


def main(index, port):
    """Prints the scales of all steps, and the bytes of the weights, of one of two processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def on_all(array, *axes):
        array, sharding = np.asarray(array), NamedSharding(mesh, P(*axes))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    found = {}
    for kind in ("jit", "pmean", "axis_name"):
        tx, step = loop(mesh, kind)
        params = {"w": np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)}
        state, scales = jax.tree.map(on_all, (params, tx.init(params))), []
        for number in range(4):
            state = step(*state, on_all(batch_of(number), "data"))
            scales.append(float(state[1].loss_scale))
        found[kind] = scales, np.asarray(state[0]["w"].addressable_data(0)).tobytes().hex()
    print(json.dumps(found), flush=True)


PROGRAM = """
import sys
from frameworks.jax.test_processes import main
from compile_options import compiling_quickly

with compiling_quickly():
    main(*sys.argv[1:])
"""


def test_two_processes_agree():
    (port,) = free_ports(1)
    environment = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    module = "lossscale.optax"
    workers = [
        Program(PROGRAM, index, port, environment=environment, module=module) for index in range(2)
    ]
    done = [worker.finished() for worker in workers]
    for each in done:
        assert each.stdout.strip(), each.stderr[-3000:]
    first, other = (json.loads(each.stdout.splitlines()[-1]) for each in done)
    assert first == other
    assert set(first) == {"jit", "pmean", "axis_name"}
    assert all(scales == [8.0, 4.0, 4.0, 8.0] for scales, _ in first.values())
