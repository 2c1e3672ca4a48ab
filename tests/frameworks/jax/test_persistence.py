"""What is saved of a run comes back byte for byte, and the run goes on as if nothing had been.

Through a pickle it does so in the conformance suite, through Orbax in test_devices.py and
test_master_weights.py.
"""

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest

import lossscale
import lossscale.optax
from frameworks.jax.support import bits
from lossscale.errors import ArgumentError, ArgumentTypeError

# All steps of a run in one way.
pytestmark = pytest.mark.usefixtures("optimized")

RULE = lossscale.DynamicScale(initial_scale=8, growth_interval=2)
INNER = optax.adamw(optax.linear_schedule(0.1, 0.0, 10))
TX = lossscale.optax.loss_scaled(INNER, rule=RULE, track_overflows=True)


def loss_fn(params, x):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    return jnp.mean((x.astype(jnp.float16) @ half["w"] + half["b"]).astype(jnp.float32) ** 2)


@jax.jit
def step(params, opt_state, x):
    _, grads = lossscale.optax.value_and_grad(loss_fn)(opt_state, params, x)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def batches(first, last):
    """One in three of them overflows."""
    for number in range(first, last):
        x = jax.random.normal(jax.random.key(number), (2, 4))
        yield x * 2.0**13 if number % 3 == 1 else x


def trained(params, opt_state, first, last):
    for x in batches(first, last):
        params, opt_state = step(params, opt_state, x)
    return params, opt_state


@pytest.fixture(scope="module")
def start():
    params = {"w": jnp.full((4, 2), 0.5), "b": jnp.zeros(2)}
    return params, TX.init(params)


def test_a_run_goes_on_byte_for_byte(start):
    midway = trained(*start, 0, 4)
    assert int(midway[1].steps_skipped) == 1
    restored = flax.serialization.from_bytes(start, flax.serialization.to_bytes(midway))
    assert isinstance(restored[1], lossscale.optax.LossScaleState)
    assert bits(restored) == bits(midway)
    assert bits(trained(*restored, 4, 9)) == bits(trained(*midway, 4, 9))


def test_the_state_of_the_optimizer_alone_goes_in_and_comes_out(start):
    params, _ = start
    _, bare_state = INNER.update(params, INNER.init(params), params)
    opt_state = TX.init(params)._replace(inner_state=bare_state)
    params, opt_state = trained(params, opt_state, 0, 2)
    assert int(optax.tree.get(opt_state.inner_state[0], "count")) == 2
    assert int(opt_state.steps_skipped) == 1
    # And out again.
    _, after = INNER.update(params, opt_state.inner_state, params)
    assert jax.tree.structure(after) == jax.tree.structure(bare_state)


def test_what_is_no_state_of_the_optimizer_is_refused(start):
    params, opt_state = start
    for wrong, error, message in (
        # A checkpoint of the optimizer alone, and one to which no target has given a class.
        (opt_state.inner_state, ArgumentTypeError, r"_replace\(inner_state=.*\)"),
        (opt_state._asdict(), ArgumentTypeError, "Received: a dict"),
        (opt_state._replace(rule_state={}), ArgumentError, r"to another rule.*no 'good_steps'"),
    ):
        with pytest.raises(error, match=message):
            TX.update(params, wrong, params)
