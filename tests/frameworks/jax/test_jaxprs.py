"""What is traced is evaluated as it was written, and chosen outputs are chosen where they are."""

import jax
import jax.numpy as jnp
import pytest

from frameworks.jax.support import bits
from lossscale.jax.apply_or_skip import gated


@jax.jit
def halved(x):
    return x * 0.5


def nested(x, y):
    z = jax.jit(lambda a: halved(a) + y)(x)
    return z, z * 3.0


def with_keys(x, y):
    key, other = jax.random.split(jax.random.key(3))
    return x + jax.random.normal(key, x.shape), jax.random.normal(other, y.shape)


def with_branches(x, y):
    def flipped(x, y):
        z = -x
        return z, x, z, jax.lax.cond(y.sum() > 9.0, lambda: z, lambda: y)

    return jax.lax.switch(jnp.int32(x.sum() < 0), [lambda x, y: (x, x, y, y), flipped], x, y)


def with_loops(x, y):
    z = jax.lax.cond(x.sum() > 0, lambda: x, lambda: y)
    return z, jax.lax.fori_loop(0, 3, lambda _, a: a * 2.0, y), jax.nn.relu(z)


FUNCTIONS = {
    "shared": lambda x, y: (both := x + y, both, both * 2.0),
    "nested": nested,
    "with_a_literal": lambda x, y: (1.0, x, jnp.sin(y)),
    "passed_on": jax.jit(lambda x, y: (x, y + x)),
    "with_keys": with_keys,
    "with_branches": with_branches,
    "with_loops": with_loops,
}
X, Y = jnp.float32([1.0, -2.0]), jnp.float32([0.5, 4.0])


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_output_is_as_written_and_may_be_kept_old_or_go_on(function):
    closed = jax.make_jaxpr(function)(X, Y)
    plain = gated(closed, [X, Y], {}, jnp.asarray(True))
    with jax.disable_jit():
        written = jax.tree.leaves(function(X, Y))
    assert bits(plain) == bits([jnp.asarray(x) for x in written])
    old_values = {number: jnp.full_like(value, 7.0 + number) for number, value in enumerate(plain)}
    for finite in (True, False):
        found = gated(closed, [X, Y], old_values, jnp.asarray(finite))
        expected = plain if finite else list(old_values.values())
        assert bits(found) == bits([jnp.asarray(value) for value in expected])


def test_a_branch_for_another_platform_is_never_compiled():
    def refused(x):
        half = x.astype(jnp.float16)
        return x + jax.lax.dot(half, half, precision="F16_F16_F32").astype(x.dtype)

    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=r"not supported|Unsupported"
    ):
        jax.jit(refused)(X)

    def by_platform(x, y):
        return (jax.lax.platform_dependent(x, default=lambda x: x + 1.0, tpu=refused),)

    closed = jax.make_jaxpr(by_platform)(X, Y)
    step = jax.jit(lambda x, finite: gated(closed, [x, Y], {0: x}, finite))
    assert step(X, True)[0].tolist() == [2.0, -1.0]
    assert step(X, False)[0].tolist() == X.tolist()
