"""What the counts of a compiled program notice: faults that are put into one, known numbers."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from benchmarks import xla_gpu

SHAPE, BYTES = (1024, 1024), 4 * 2**20


def counts(function, *axes, devices=1, donate=()):
    given = xla_gpu.placed(jnp.ones(SHAPE), xla_gpu.mesh(devices), *axes)
    return xla_gpu.counts(xla_gpu.compiled(function, given, donate=donate))


def plain(x):
    return x * 2 + 1


def test_a_plain_function_is_one_kernel_that_reads_and_writes_once():
    found = counts(plain)
    assert found == xla_gpu.Counts(1, 1, 0, 1, 0, 0, 2 * BYTES, 0)


HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
WAITS = {
    "branching": lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: plain(x)),
    "looping": lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: plain(x) - 5, x),
    "to_the_host": lambda x: jax.device_put(plain(x), HOST),
    "to_the_host_and_back": lambda x: plain(jax.device_put(jax.device_put(plain(x), HOST), DEVICE)),
}


@pytest.mark.parametrize("injected", WAITS.values(), ids=WAITS)
def test_a_wait_for_the_host_is_noticed(injected):
    assert counts(injected).waits >= 1


CALLS = {
    "printing": lambda x: jax.debug.print("{}", x.sum()) or plain(x),
    "calling_back": lambda x: plain(
        jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    ),
    "calling_for_its_effect": lambda x: io_callback(lambda _: None, None, x) or plain(x),
}


@pytest.mark.parametrize("injected", CALLS.values(), ids=CALLS)
def test_a_call_of_the_host_is_noticed(injected):
    with pytest.raises(ValueError, match="calls the host"):
        counts(injected)


def test_an_exchange_between_devices_is_noticed():
    assert counts(plain, "d", devices=2).collectives == 0
    assert counts(jnp.sum, "d", devices=2).collectives == 1
    assert counts(lambda x: jnp.sum(x) + jnp.sum(x[::-1] * x), "d", devices=2).collectives >= 2


def test_kernels_their_chain_and_what_they_read_are_counted():
    # Sums of whole arrays: two kernels each, of which the second waits for the first.
    found = counts(lambda x: [jnp.sum(x * factor) for factor in (1, 2)])
    once = counts(jnp.sum)
    assert (once.kernels, once.chain) == (2, 2)
    assert BYTES <= once.bytes <= found.bytes <= 1.01 * 2 * BYTES
    # A sort is not fused: each one reads and writes.
    sorted_twice = counts(lambda x: jnp.sort(jnp.sort(x, axis=0), axis=1))
    assert sorted_twice.chain >= 2
    assert sorted_twice.bytes >= 4 * BYTES
    assert sorted_twice.temporary >= BYTES


def test_what_a_cuda_graph_holds_and_what_is_outside_of_it_are_told_apart():
    def many(x):
        return [jnp.sum(x * factor, axis=0) @ x for factor in range(1, 9)]

    one = counts(many)
    assert (one.graphs, one.outside) == (1, 0)
    assert one.kernels >= 8

    def split(x):
        finite = many(x)[0].sum() > 0
        return many(jax.lax.cond(finite, lambda: x @ x, lambda: plain(x)))

    assert counts(split).outside >= 1
