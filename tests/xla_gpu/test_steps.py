"""A training step on an H100, as XLA's compiler makes it.

Beside it are the step without loss scaling and the peer that launches the fewest kernels;
benchmarks/gpu_counts.json has all peers.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import lossscale.optax
from benchmarks import pages, xla_gpu
from benchmarks.frameworks.optax import mlp
from benchmarks.gpu_jax import ROWS, counts, rows
from benchmarks.workloads import equal

LARGE, SMALL, WHOLE, *OF_KERAS = ROWS
PLAIN, MONITORED = ("lossscale", "ours_dynamic"), ("tracked", "ours_monitored")
MASTERS = ("masters",)
PEERS = ("apply_if_finite", "peer_dynamic")


def with_fewer(row):
    """The row with fewer variables, since to compile takes longer than all else here."""
    size = row.workload.shapes[0][0]
    number = 20 if size > 10_000 else 25
    return dataclasses.replace(row, workload=equal(number, number * size))


ROWS_OF = {
    PLAIN: (LARGE, SMALL, WHOLE, *map(with_fewer, OF_KERAS)),
    MONITORED: (*map(with_fewer, (LARGE, SMALL)), WHOLE, *map(with_fewer, OF_KERAS)),
    MASTERS: (WHOLE,),
}
EACH = pytest.mark.parametrize(
    ("row", "names"),
    [
        pytest.param(row, names, id=f"{row.wrapper} {row.point} {names[0]}")
        for names, rows in ROWS_OF.items()
        for row in rows
    ],
)


def of(row, names):
    [name] = set(names) & set(row.methods)
    return counts(row, name)


def bytes_of_gradients(row):
    if row.workload:
        return 4 * row.workload.parameters
    return 4 * sum(math.prod(shape) for shape in mlp(small=False)[0].values())


@EACH
def test_a_step_waits_for_nothing_and_is_one_cuda_graph(row, names):
    found, bare = of(row, names), counts(row, "bare")
    assert (found.waits, found.collectives) == (0, 0)
    assert (found.graphs, found.outside) == (bare.graphs, bare.outside) == (1, 0)


@EACH
def test_a_step_reads_each_gradient_once_more(row, names):
    found, bare, peer = of(row, names), counts(row, "bare"), of(row, PEERS)
    once = bytes_of_gradients(row)
    is_large = row.workload and row.workload.shapes[0][0] > 10_000
    # A monitor reads no gradient once more; it keeps two counts of each.
    most = 1.01 if names == MONITORED else 1.005
    assert found.bytes <= most * (bare.bytes + once if is_large else peer.bytes)
    assert found.temporary <= max(1.005 * peer.temporary, 100_000)


@EACH
def test_a_step_launches_no_more_kernels_than_the_peers(row, names):
    assert of(row, names).kernels <= of(row, PEERS).kernels


def test_a_step_costs_what_its_row_says():
    """If a step costs more, that is a fault; if less, `benchmarks.gpu_counts` writes it."""
    known = pages.read(pages.COUNTS)["jax"]
    methods = ("bare", "lossscale", "apply_if_finite")
    for row in (*rows((LARGE, SMALL, WHOLE), methods), *rows((WHOLE,), MASTERS)):
        assert row in known


def test_float16_parameters_without_casts_cost_a_whole_step_less():
    masters, casts = (counts(WHOLE, name) for name in ("masters", "lossscale"))
    assert all(ours <= theirs for ours, theirs in zip(masters, casts, strict=True))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_xla_does_not_leave_out_the_rounding_of_a_copy(dtype):
    tx = lossscale.optax.master_weights(optax.sgd(0.1))
    params = jax.ShapeDtypeStruct((8,), dtype)
    state = jax.eval_shape(tx.init, params)
    params, state = xla_gpu.placed((params, state), xla_gpu.mesh())
    hlo = xla_gpu.compiled(tx.update, params, state, params).hlo
    [subtracted] = re.findall(r" subtract\((%[\w.\-]+),", hlo)
    [narrow] = re.findall(rf"{subtracted} = f32\S+ convert\((%[\w.\-]+)\)", hlo)
    assert f"{narrow} = {'b' * (dtype == jnp.bfloat16)}f16[" in hlo


def test_a_check_that_reads_each_gradient_by_itself_would_be_noticed(monkeypatch):
    from lossscale.jax import gradients

    few = dataclasses.replace(LARGE, workload=equal(10, 1_000_000))
    joined = counts(few, "lossscale")
    counts.cache_clear()
    # What was traced has the constant in it.
    jax.clear_caches()
    monkeypatch.setattr(gradients, "JOINED", 0)
    assert counts(few, "lossscale").kernels >= joined.kernels + 9
    counts.cache_clear()
    jax.clear_caches()
