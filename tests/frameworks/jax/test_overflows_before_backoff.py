"""A rule that waits for several overflows in a row, and its count in Optax states."""

import jax
import jax.numpy as jnp
import optax
import pytest

import lossscale.optax


def transformation(waits):
    rule = lossscale.DynamicScale(initial_scale=8.0, overflows_before_backoff=waits)
    return lossscale.optax.loss_scaled(optax.sgd(0.1), rule=rule)


@pytest.mark.parametrize(
    ("saves", "loads", "scales", "count"),
    [(1, 2, (4.0, 4.0), 1), (2, 1, (8.0, 4.0), None), (2, 2, (8.0, 4.0), 2)],
)
def test_the_scale_falls_at_the_second_overflow_and_states_go_both_ways(
    saves, loads, scales, count
):
    params, bad = {"a": jnp.ones(2)}, {"a": jnp.full(2, jnp.inf)}
    state = transformation(saves).init(params)
    _, state = jax.jit(transformation(saves).update)(bad, state, params)
    assert float(state.loss_scale) == scales[0]
    _, state = transformation(loads).update(bad, state, params)
    assert float(state.loss_scale) == scales[1]
    assert state.rule_state.get("overflows") == count
    assert int(state.steps_skipped) == 2
