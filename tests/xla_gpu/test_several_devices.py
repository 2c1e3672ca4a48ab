"""A step on two and on four H100s: what the devices exchange."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks import xla_gpu
from benchmarks.gpu_jax import ROWS, counts
from benchmarks.workloads import equal
from lossscale.optax import loss_scaled

ALONE = ROWS[0]
FEW = {
    "large": dataclasses.replace(ALONE, workload=equal(5, 500_000)),
    "small": dataclasses.replace(ALONE, workload=equal(20, 20_000)),
}


EACH = pytest.mark.parametrize(
    ("row", "devices"),
    [(FEW["large"], 2), (FEW["large"], 4), (FEW["small"], 2)],
    ids=["large 2", "large 4", "small 2"],
)


@EACH
@pytest.mark.parametrize("method", ["lossscale", "tracked"])
def test_devices_with_the_same_gradients_exchange_nothing(row, method, devices):
    found, bare = counts(row, method, devices), counts(row, "bare", devices)
    assert bare.collectives == found.collectives == found.waits == 0
    assert found.graphs == 1
    assert found.outside == 0


@EACH
def test_devices_that_divide_the_gradients_exchange_only_the_decision(row, devices):
    found, bare = (counts(row, name, devices, divided=True) for name in ("lossscale", "bare"))
    assert (bare.collectives, found.collectives, found.waits) == (0, 1, 0)
    # Nothing is gathered: each device reads its own part.
    once = 4 * row.workload.parameters // devices
    assert found.bytes <= 1.02 * (bare.bytes + once)


def test_gradients_of_one_shape_that_are_divided_differently_stay_where_they_are():
    tx, mesh = loss_scaled(optax.sgd(0.1)), xla_gpu.mesh(2)
    leaf = jnp.ones((256, 256))
    params = [xla_gpu.placed(leaf, mesh, *axes) for axes in (("d",), (None, "d"), ())]
    state = xla_gpu.placed(jax.eval_shape(tx.init, params), mesh)
    program = xla_gpu.compiled(tx.update, params, state, params)
    assert xla_gpu.counts(program).collectives == 1
