"""What gradients may be made of, and what a state keeps through every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lossscale
from frameworks.jax.support import bits, signature
from lossscale import DynamicScale, FixedScale
from lossscale.optax import loss_scaled

ROUNDED = pytest.mark.filterwarnings("ignore:float16 parameters are rounded")


def small(tx=None, **settings):
    return loss_scaled(optax.sgd(0.5) if tx is None else tx, **{"initial_scale": 8, **settings})


def both_ways(tx):
    """The update as it is, and compiled."""
    return tx.update, jax.jit(tx.update)


@pytest.mark.parametrize("empty", [{}, None, (), {"a": None}, {"a": np.zeros((0, 3), np.float32)}])
def test_a_step_without_a_gradient_never_grows_the_scale(empty):
    tx = small(dynamic_growth_steps=1)
    for update in both_ways(tx):
        before = tx.init(empty)
        _, after = update(empty, before, empty)
        assert bits(after) == bits(before)


@pytest.mark.parametrize("compiles", [False, True])
def test_integers_and_what_is_masked_are_left_alone(compiles):
    """Also by a transformation that compiles its update itself."""
    params = {"w": jnp.ones(3), "steps": jnp.int32(7)}
    inner = optax.masked(optax.sgd(0.5), {"w": True, "steps": False})
    update = jax.jit(inner.update) if compiles else inner.update
    tx = small(optax.GradientTransformation(inner.init, update))

    def loss(params):
        return params["w"].sum() * params["steps"]

    state = tx.init(params)
    _, gradients = lossscale.optax.value_and_grad(loss, allow_int=True)(state, params)
    assert gradients["steps"].dtype == jax.dtypes.float0
    assert gradients["w"].tolist() == [56.0] * 3
    updates, state = tx.update(gradients, state, params)
    assert updates["w"].tolist() == [-3.5] * 3
    assert updates["steps"].dtype == jax.dtypes.float0
    assert compiles or updates["steps"] is gradients["steps"]
    # Inside a compiled function the gradients are made there.
    updates = jax.jit(
        lambda state, params: tx.update(
            lossscale.optax.value_and_grad(loss, allow_int=True)(state, params)[1], state, params
        )[0]
    )(state, params)
    assert updates["w"].tolist() == [-3.5] * 3
    assert updates["steps"].dtype == jax.dtypes.float0
    bad = {**gradients, "w": jnp.full(3, jnp.nan)}
    updates, state = tx.update(bad, state, params)
    assert np.signbit(updates["w"]).all()
    assert updates["steps"].dtype == jax.dtypes.float0


@pytest.mark.parametrize("bad", [np.nan, 1j * np.inf, complex(0, np.nan), -np.inf])
def test_both_parts_of_complex_gradients_are_looked_at(bad):
    params = jnp.array([1 + 2j, complex(-0.0, -0.0)], jnp.complex64)
    tx = small(optax.adam(0.1))
    for update in both_ways(tx):
        state = tx.init(params)
        updates, after = update(jnp.array([1, bad], jnp.complex64), state, params)
        assert bits(optax.apply_updates(params, updates)) == bits(params)
        assert bits(after.inner_state) == bits(state.inner_state)
        assert float(after.loss_scale) == 4.0
        updates, after = update(params * 4, after, params)
        assert not after.last_step_skipped
        assert jnp.isfinite(updates).all()


def test_with_64_bits_the_state_stays_and_gradients_are_divided_in_64():
    with jax.enable_x64(True):
        params = {"w": jnp.ones(3, jnp.float64), "v": jnp.ones(2, jnp.float32)}
        tx = small(optax.adam(0.1))
        state = tx.init(params)
        first = signature(state)
        scalars = [leaf.dtype.name for leaf in jax.tree.leaves(state._replace(inner_state=()))]
        assert scalars == ["float32", "int32", "int32", "int32"]
        tiny = {"w": jnp.full(3, 8 * 1e-200, jnp.float64), "v": jnp.ones(2, jnp.float32)}
        identity = small(optax.identity())
        assert identity.update(tiny, identity.init(params))[0]["w"].tolist() == [1e-200] * 3
        for update in both_ways(tx):
            updates, after = update(tiny, state, params)
            assert updates["w"].dtype == jnp.float64
            assert signature(after) == first
            # Infinite in float32, and in range here.
            huge = {"w": jnp.full(3, 1e200), "v": jnp.ones(2, jnp.float32)}
            assert not update(huge, state, params)[1].last_step_skipped
            _, after = update({**huge, "w": huge["w"] * jnp.inf}, state, params)
            assert signature(after) == first
            assert after.last_step_skipped


@ROUNDED
def test_strict_promotion_is_kept():
    tx = small(optax.sgd(0.1, momentum=0.9))
    rule = DynamicScale(8.0, growth_interval=2, growth_factor=3.0, min_scale=0.5)
    other = loss_scaled(optax.sgd(0.1), rule=rule)
    params = {"w": jnp.ones(3), "h": jnp.ones(2, jnp.float16)}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for wrapped in (tx, other):
            for update in both_ways(wrapped):
                state = wrapped.init(params)
                _, state = update(params, state, params)
                _, state = update(jax.tree.map(lambda p: p * np.inf, params), state, params)
                assert int(state.steps_skipped) == 1
        scaled = lossscale.optax.scale_loss(state, jnp.float16(1.0))
        assert scaled.dtype == jnp.float32


def test_a_scale_that_no_rule_gave_is_mended_before_anything_is_applied():
    tx = loss_scaled(optax.sgd(0.5), rule=DynamicScale(8.0, min_scale=2.0))
    params = jnp.ones(2)
    for bad in (0.0, np.inf, np.nan, -8.0, 1.0):
        for update in both_ways(tx):
            state = optax.tree.set(tx.init(params), loss_scale=bad)
            updates, state = update(jnp.ones(2), state, params)
            assert bits(optax.apply_updates(params, updates)) == bits(params)
            assert 2.0 <= float(state.loss_scale) <= 2.0**126


def test_a_fixed_scale_comes_from_the_code():
    old = loss_scaled(optax.sgd(0.5), rule=FixedScale(8.0)).init(jnp.ones(2))
    new = loss_scaled(optax.sgd(0.5), rule=FixedScale(16.0))
    # Divided by the number that multiplied this loss, the next one has that of the code.
    updates, state = new.update(jnp.full(2, 8.0), old)
    assert updates.tolist() == [-0.5, -0.5]
    assert float(state.loss_scale) == 16.0


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("gradient", [16.0, float("inf"), float("nan")])
def test_a_gradient_that_is_a_python_float_is_divided_and_checked(gradient, tracked):
    tx = loss_scaled(optax.sgd(0.5), initial_scale=8.0, track_overflows=tracked)
    params, finite = {"w": jnp.float32(1)}, gradient == 16.0
    for update in (tx.update, jax.jit(tx.update)):
        state = tx.init(params)
        updates, after = update({"w": gradient}, state, params)
        assert float(updates["w"]) == (-1.0 if finite else 0.0)
        assert int(lossscale.optax.loss_scale(after)) == (8 if finite else 4)


# The dtypes of gradients, parameters (None where `update` is not given them) and updates. Without
# parameters, those of float32 may be behind the gradients, and float16 has no number for 2**-26.
DTYPES = [
    *((dtype, dtype, dtype) for dtype in ("float16", "bfloat16", "float32")),
    ("float16", "float32", "float32"),
    ("bfloat16", "float32", "float32"),
    ("float16", "bfloat16", "float32"),
    ("float32", "float16", "float32"),
    ("float32", "bfloat16", "float32"),
    ("float16", None, "float32"),
    ("bfloat16", None, "float32"),
]


@ROUNDED
@pytest.mark.parametrize(("of_gradients", "of_params", "of_updates"), DTYPES)
@pytest.mark.parametrize("inner", [optax.sgd(0.5), optax.adam(0.5)], ids=["sgd", "adam"])
@pytest.mark.parametrize("finite", [True, False])
def test_updates_are_rounded_last_and_have_the_dtypes_of_optax(
    inner, finite, of_gradients, of_params, of_updates
):
    tx = small(inner)
    params = {"w": jnp.ones(3, of_params or "float32")}
    given = None if of_params is None else params
    gradients = {"w": jnp.array([8.0, 3.0, 2.0**-14 if finite else jnp.inf], of_gradients)}
    wide = {"w": gradients["w"].astype("float32") / 8}
    exact, _ = inner.update(wide, inner.init({"w": jnp.ones(3)}))
    wanted = exact["w"].astype(of_updates) if finite else jnp.full(3, -0.0, of_updates)
    for update in both_ways(tx):
        updates, state = update(gradients, tx.init(params), given)
        assert updates["w"].dtype == wanted.dtype
        np.testing.assert_allclose(
            np.float32(updates["w"]),
            np.float32(wanted),
            rtol=1e-6 if of_updates == "float32" else 0,
        )
        assert np.signbit(np.float32(updates["w"])).all()
        # A second step finds the state as the first one did.
        assert signature(state) == signature(update(gradients, state, given)[1])
