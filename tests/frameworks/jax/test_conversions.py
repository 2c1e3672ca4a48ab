"""Loss scales of jmp and Flax go over: the scales that follow are the same."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale as FlaxScale
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworks.jax.support import signature
from lossscale import DynamicScale, FixedScale
from lossscale.errors import AlreadyWrappedError, ArgumentError, ArgumentTypeError, LossScaleWarning
from lossscale.optax import from_flax, from_jmp, loss_scaled

INNER = optax.sgd(0.5)
PARAMS = jnp.ones(2)
STATE = INNER.init(PARAMS)

powers = st.builds(lambda exponent: 2.0**exponent, st.integers(-8, 24))
steps = st.lists(st.booleans(), min_size=8, max_size=16)


def ours(rule, opt_state, verdicts):
    """The scales and counters that our optimizer goes through."""
    tx, found = loss_scaled(INNER, rule=rule), []
    with jax.disable_jit():
        for finite in verdicts:
            _, opt_state = tx.update(jnp.float32(1.0 if finite else np.inf), opt_state, PARAMS)
            found.append((float(opt_state.loss_scale), int(opt_state.rule_state["good_steps"])))
    return found


def theirs_jmp(scale, verdicts):
    found = []
    for finite in verdicts:
        scale = scale.adjust(jnp.asarray(finite))
        found.append((float(scale.loss_scale), int(scale.counter)))
    return found


def theirs_flax(scale, verdicts):
    found = []
    with jax.disable_jit():
        for finite in verdicts:
            factor = jnp.float32(1.0 if finite else np.inf)
            grad = scale.value_and_grad(lambda weight, factor=factor: weight * factor)
            scale = grad(jnp.float32(1.0)).dynamic_scale
            found.append((float(scale.scale), int(scale.fin_steps)))
    return found


@st.composite
def jmp_scales(draw, factors=(2, 4, 2.0)):
    period = draw(st.integers(1, 4))
    lowest, first = sorted(draw(st.tuples(powers, powers)))
    return jmp.DynamicLossScale(
        jnp.float32(first),
        jnp.int32(draw(st.integers(0, period - 1))),
        period,
        draw(st.sampled_from(factors)),
        jnp.float32(lowest),
    )


@st.composite
def flax_scales(draw):
    interval = draw(st.integers(0, 3))
    return FlaxScale(
        growth_factor=draw(st.sampled_from([2.0, 4.0, 1.5])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.8])),
        growth_interval=interval,
        fin_steps=draw(st.integers(0, interval)),
        scale=draw(powers),
        minimum_scale=draw(st.sampled_from([None, 2.0**-8, float(np.finfo(np.float32).tiny)])),
    )


@settings(max_examples=12)
@given(jmp_scales(), steps)
def test_a_run_of_jmp_goes_on_with_the_same_scales(scale, verdicts):
    rule, opt_state = from_jmp(scale, STATE)
    assert ours(rule, opt_state, verdicts) == theirs_jmp(scale, verdicts)


@settings(max_examples=6)
@given(jmp_scales(factors=(3, 10, 1.5)), steps)
def test_other_factors_of_jmp_differ_by_the_rounding_of_a_division(scale, verdicts):
    rule, opt_state = from_jmp(scale, STATE)
    found, expected = ours(rule, opt_state, verdicts), theirs_jmp(scale, verdicts)
    assert [count for _, count in found] == [count for _, count in expected]
    np.testing.assert_allclose([s for s, _ in found], [s for s, _ in expected], rtol=2.0**-19)


@settings(max_examples=6)
@given(flax_scales(), steps)
def test_a_run_of_flax_goes_on_with_the_same_scales(scale, verdicts):
    rule, opt_state = from_flax(scale, STATE)
    assert ours(rule, opt_state, verdicts) == theirs_flax(scale, verdicts)


def test_every_setting_goes_over():
    of_jmp = jmp.DynamicLossScale(jnp.float32(64), jnp.int32(3), 7, 4, jnp.float32(0.5))
    of_flax = FlaxScale(4.0, 0.25, 6, 3, 64.0, 0.5)
    for rule, opt_state in (from_jmp(of_jmp, STATE), from_flax(of_flax, STATE)):
        assert rule == DynamicScale(64, 7, 4, 0.25, min_scale=0.5)
        assert (float(opt_state.loss_scale), int(opt_state.rule_state["good_steps"])) == (64, 3)


@pytest.mark.parametrize("scale", [jmp.StaticLossScale(128), jmp.NoOpLossScale()])
def test_fixed_scales_of_jmp(scale):
    rule, opt_state = from_jmp(scale, STATE)
    assert rule == FixedScale(scale.loss_scale)
    assert float(opt_state.loss_scale) == scale.loss_scale


def test_the_lowest_scale_can_be_given_since_jmp_loses_it():
    scale = jmp.DynamicLossScale(jnp.float32(64), min_loss_scale=jnp.float32(2.0**-6))
    through_a_tree = jax.tree.map(jnp.asarray, scale)
    assert from_jmp(scale, STATE)[0].min_scale == 2.0**-6
    assert from_jmp(through_a_tree, STATE)[0].min_scale == 1
    rule, _ = from_jmp(through_a_tree, STATE, min_scale=2.0**-6)
    assert rule.min_scale == 2.0**-6
    none = jmp.DynamicLossScale(jnp.float32(64), min_loss_scale=jnp.float32(0))
    assert from_jmp(none, STATE)[0].min_scale == 2.0**-126


def test_a_float16_scale_of_jmp_stays_below_its_largest_number():
    # Each of the two in float16: jmp cannot choose between two dtypes.
    scale = jmp.DynamicLossScale(
        jnp.float16(2**14), jnp.int32(0), 1, 2, min_loss_scale=jnp.float16(1)
    )
    rule, opt_state = from_jmp(scale, STATE)
    verdicts = [True, True, False, True]
    assert ours(rule, opt_state, verdicts) == theirs_jmp(scale, verdicts)


def test_the_state_inside_goes_on():
    inner = optax.adam(0.1)
    _, moments = inner.update(PARAMS, inner.init(PARAMS), PARAMS)
    for scale, convert in (
        (jmp.DynamicLossScale(jnp.float32(64)), from_jmp),
        (FlaxScale(), from_flax),
    ):
        rule, opt_state = convert(scale, moments)
        tx = loss_scaled(inner, rule=rule)
        assert opt_state.inner_state is moments
        assert signature(opt_state) == signature(tx.init(PARAMS))
        # Each a buffer of its own, which a step may take.
        jax.jit(tx.update, donate_argnums=1)(PARAMS, jax.tree.map(jnp.copy, opt_state), PARAMS)


def test_what_is_no_scale_of_theirs_is_refused():
    replicated = jmp.DynamicLossScale(jnp.float32([64, 64]), jnp.int32([0, 0]))
    with pytest.raises(ArgumentError, match=r"`loss_scale`.*shape \(2,\).*pass one replica"):
        from_jmp(replicated, STATE)
    with pytest.raises(ArgumentError, match=r"`scale`.*pass one replica"):
        from_flax(FlaxScale(scale=jnp.float32([64, 64])), STATE)
    with pytest.raises(ArgumentTypeError, match=r"jmp\.DynamicLossScale.*Received: a float"):
        from_jmp(64.0, STATE)
    with pytest.raises(ArgumentTypeError, match=r"Received: a DynamicLossScale"):
        from_flax(jmp.DynamicLossScale(jnp.float32(64)), STATE)
    with pytest.raises(ArgumentTypeError, match=r"jmp\.DynamicLossScale.*a DynamicScale"):
        from_jmp(FlaxScale(), STATE)
    with pytest.raises(AlreadyWrappedError, match="Pass its `inner_state`"):
        from_flax(FlaxScale(), loss_scaled(INNER).init(PARAMS))


@pytest.mark.parametrize("number", [0.0, np.inf, np.nan, 2.0**127])
def test_a_scale_that_no_rule_can_have_is_brought_back_with_a_warning(number):
    scale = jmp.DynamicLossScale(jnp.float32(number))
    with pytest.warns(LossScaleWarning, match="Training continues with"):
        rule, opt_state = from_jmp(scale, STATE)
    expected = 2.0**126 if number == 2.0**127 else 2.0**15
    assert (rule.initial_scale, float(opt_state.loss_scale)) == (expected, expected)
