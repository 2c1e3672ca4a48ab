"""What is traced is evaluated as it was written, and chosen outputs are chosen where they are."""

import jax
import jax.numpy as jnp
import pytest

from frameworks.jax.support import bits
from lossscale.jax import jaxprs


@jax.jit
def halved(x):
    return x * 0.5


@jax.jit
def passed_on(x, y):
    return x, y + x


def shared(x, y):
    both = x + y
    return both, both, both * 2.0


def nested(x, y):
    z = jax.jit(lambda a: halved(a) + y)(x)
    return z, z * 3.0


def with_a_literal(x, y):
    return 1.0, x, jnp.sin(y)


def with_keys(x, y):
    key, other = jax.random.split(jax.random.key(3))
    return x + jax.random.normal(key, x.shape), jax.random.normal(other, y.shape)


def with_loops(x, y):
    z = jax.lax.cond(x.sum() > 0, lambda: x, lambda: y)
    return z, jax.lax.fori_loop(0, 3, lambda _, a: a * 2.0, y), jax.nn.relu(z)


FUNCTIONS = (shared, nested, with_a_literal, passed_on, with_keys, with_loops)
X, Y = jnp.float32([1.0, -2.0]), jnp.float32([0.5, 4.0])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_output_is_as_written_and_may_be_kept_old_or_go_on(function):
    closed = jax.make_jaxpr(function)(X, Y)
    plain = jaxprs.evaluate(closed, [X, Y])
    with jax.disable_jit():
        expected = jax.tree.leaves(function(X, Y))
    assert bits(plain) == bits([jnp.asarray(x) for x in expected])
    gates = {number: jnp.full_like(value, 7.0 + number) for number, value in enumerate(plain)}
    for finite in (True, False):
        found = jaxprs.evaluate(
            closed,
            [X, Y],
            gates=gates,
            choose=lambda new, old: jnp.where(finite, new, old),  # noqa: B023
        )
        expected = plain if finite else list(gates.values())
        assert bits(found) == bits([jnp.asarray(value) for value in expected])


def test_what_is_made_of_a_chosen_output_is_made_of_what_was_chosen():
    closed = jax.make_jaxpr(nested)(X, Y)
    first, second = jaxprs.evaluate(
        closed, [X, Y], gates={0: jnp.zeros(2)}, choose=lambda new, old: old
    )
    assert (first.tolist(), second.tolist()) == ([0.0, 0.0], [0.0, 0.0])


def test_control_flow_is_found_also_below_a_call():
    large = jnp.ones(2**13)

    def below(x):
        return jax.jit(lambda a: jax.lax.cond(a.sum() > 0, lambda: a, lambda: -a))(x)

    assert jaxprs.made_by_control_flow(jax.make_jaxpr(below)(large), 0)
    assert not jaxprs.made_by_control_flow(jax.make_jaxpr(below)(X), 0)
    assert not jaxprs.made_by_control_flow(jax.make_jaxpr(lambda x: x * 2.0)(large), 0)
