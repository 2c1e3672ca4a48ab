"""A skipped step leaves parameters and inner state as they are, whatever is inside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lossscale.optax
from frameworks.jax import inner_transformations as inner
from frameworks.jax.inner_transformations import INNER
from frameworks.jax.support import bits, scaled, signature, spoiled

SCALE = 2.0**15
# With sums and products of matrices; tests/conformance has ten more that are optimized.
OPTIMIZED = ("adafactor", "muon")


def step_of(tx, name, compiled):
    """A step that donates its arguments if it is compiled, and the list that each trace adds to."""
    traces = []

    def step(params, opt_state, gradients, loss):
        traces.append(name)
        updates, opt_state = tx.update(gradients, opt_state, params, **inner.extra_args(name, loss))
        return optax.apply_updates(params, updates), opt_state, updates

    return jax.jit(step, donate_argnums=(0, 1)) if compiled else step, traces


def check_every_step(name, compiled=True):
    tx = lossscale.optax.loss_scaled(INNER[name](), initial_scale=SCALE)
    step, traces = step_of(tx, name, compiled)
    # With a scale of 1 nothing is scaled; the same step, so that XLA rounds it in the same way.
    params, opt_state = inner.params(), tx.init(inner.params())
    # A key that was given is in both states, and would be donated twice.
    plain, plain_state = inner.params(), jax.tree.map(jnp.copy, opt_state)
    plain_state = plain_state._replace(loss_scale=jnp.float32(1.0))
    kind, skips = signature(opt_state), 0
    # Signs that change, and enough steps for what happens at every second one.
    for number, factor in enumerate((1.0, np.nan, -0.5, np.inf, 0.25, -np.inf, 2.0, -1.0)):
        gradients, loss = inner.gradients(), np.float32(1.0 + number)
        if np.isfinite(factor):
            plain, plain_state, _ = step(plain, plain_state, scaled(gradients, factor), loss)
            gradients = scaled(gradients, factor * float(opt_state.loss_scale))
            params, opt_state, _ = step(params, opt_state, gradients, loss)
            assert bits(params) == bits(plain)
            assert bits(opt_state.inner_state) == bits(plain_state.inner_state)
            assert not opt_state.last_step_skipped
            assert int(opt_state.consecutive_skips) == 0
        else:
            before, skips = (bits(params), bits(opt_state.inner_state)), skips + 1
            bad = spoiled(gradients, factor, leaf=number % 2)
            params, opt_state, updates = step(params, opt_state, bad, loss)
            assert (bits(params), bits(opt_state.inner_state)) == before
            assert all(np.signbit(leaf).all() for leaf in jax.tree.leaves(updates))
            assert opt_state.last_step_skipped
            assert int(opt_state.steps_skipped) == skips
            assert float(opt_state.loss_scale) == SCALE / 2**skips
        assert signature(opt_state) == kind
    assert len(traces) == 1 or not compiled


@pytest.mark.parametrize("name", [each for each in INNER if each not in OPTIMIZED])
def test_a_skipped_step_changes_no_bit_and_the_others_are_those_of_the_bare_optimizer(name):
    check_every_step(name)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", OPTIMIZED)
def test_what_xla_optimizes_most_keeps_every_bit_too(name):
    check_every_step(name)


def test_nothing_inside_sees_a_number_that_is_not_finite():
    seen = []

    def update(updates, state, params=None):
        def look(given):
            seen.append(bool(np.isfinite(given).all()))
            return given

        # One that has no effect but its result, and so runs on skipped steps too.
        given = updates["w"]
        given = jax.pure_callback(look, jax.ShapeDtypeStruct(given.shape, given.dtype), given)
        return {**updates, "w": given}, state

    tx = lossscale.optax.loss_scaled(optax.GradientTransformation(lambda params: (), update))
    bad = spoiled(inner.gradients(), np.nan, leaf=1)
    _, opt_state = jax.jit(tx.update)(bad, tx.init(inner.params()))
    jax.effects_barrier()
    assert int(opt_state.steps_skipped) == 1
    assert seen == [True]
