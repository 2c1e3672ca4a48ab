"""Programs of users: training loops, and what JAX can do with a step."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from frameworks.jax import inner_transformations as inner
from frameworks.jax.support import bits, scaled, signature
from lossscale.optax import loss_scaled, scale_loss, unscale, value_and_grad

BATCH = (jnp.float16([[1.0, 2.0], [3.0, -1.0]]), jnp.float16([1.0, 0.5]))


def loss_fn(params, batch):
    inputs, targets = batch
    outputs = inputs @ params["w"].astype(jnp.float16)
    return jnp.mean((outputs - targets).astype(jnp.float32) ** 2)


def optimizer(inner_optimizer=None):
    wrapped = optax.adam(0.1) if inner_optimizer is None else inner_optimizer
    return loss_scaled(wrapped, initial_scale=8, dynamic_growth_steps=2)


def first_params():
    return {"w": jnp.float32([1.0, -1.0])}


def member(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


@pytest.mark.parametrize("inside", [optax.adam(0.1), optax.MultiSteps(optax.adam(0.1), 2)])
def test_members_of_a_population_have_scales_of_their_own(inside):
    tx = optimizer(inside)
    params = jax.tree.map(lambda p: jnp.stack([p] * 3), first_params())
    state = jax.vmap(tx.init)(params)
    gradients = {"w": jnp.float32([[8.0, 8.0], [jnp.nan, 1.0], [8.0, -8.0]])}
    updates, after = jax.jit(jax.vmap(tx.update))(gradients, state, params)
    assert after.loss_scale.tolist() == [8.0, 4.0, 8.0]
    assert after.steps_skipped.tolist() == [0, 1, 0]
    assert bits(member(after.inner_state, 1)) == bits(member(state.inner_state, 1))
    assert np.signbit(updates["w"][1]).all()
    for index in range(3):
        # In a population both sides of a branch run, and of each member one is chosen.
        alone = jax.jit(tx.update)(*member((gradients, state, params), index))
        for a, b in zip(
            *map(jax.tree.leaves, (alone, member((updates, after), index))), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_loss_is_the_loss_though_the_scaled_one_overflows():
    tx = loss_scaled(optax.sgd(0.1), initial_scale=2.0**120)
    opt_state = tx.init(first_params())
    value, _ = value_and_grad(lambda p: p["w"].sum() + 2.0**20)(opt_state, first_params())
    assert float(value) == 2.0**20
    assert scale_loss(opt_state, jnp.float16(1.0)).dtype == jnp.float32


def test_value_and_grad_takes_what_jax_takes():
    opt_state = optimizer().init(first_params())

    def loss(a, b, *, offset):
        return (a * b).sum() + offset, {"offset": offset}

    a, b = jnp.float32([1.0, 2.0]), jnp.float32([3.0, 4.0])
    differentiated = value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, aux), (by_a, by_b) = jax.jit(differentiated)(opt_state, a, b, offset=1.0)
    assert (float(value), float(aux["offset"])) == (12.0, 1.0)
    assert by_a.tolist() == [24.0, 32.0]
    assert by_b.tolist() == [8.0, 16.0]
    # A list with the loss and what comes with it, too.
    (loss, aux), gradient = value_and_grad(lambda p: [p**2, "aux"], has_aux=True)(opt_state, a[0])
    assert (float(loss), aux, float(gradient)) == (1.0, "aux", 16.0)


def test_nothing_is_compiled_twice_and_nothing_drifts():
    tx = optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)))
    assert signature(jax.jit(tx.init)(inner.params())) == signature(tx.init(inner.params()))
    expected = signature(jax.eval_shape(tx.init, inner.params()))
    assert signature(tx.init(inner.params())) == expected


def test_transfer_guard_leaks_and_no_compiler():
    tx = optimizer(inner.INNER["adamw_clip"]())
    params = inner.params()
    state, gradients = tx.init(params), inner.gradients()
    bad = jax.tree.map(lambda g: g * jnp.nan, gradients)
    bare = optimizer(optax.identity())
    before = bare.init(params)
    with jax.transfer_guard("disallow"):
        # Few of Optax' own eager steps are let pass.
        for given in (gradients, bad):
            bare.update(given, before, params)
    with jax.checking_leaks():
        _, state = jax.jit(tx.update)(bad, state, params)
        _, state = tx.update(gradients, state, params)
    with jax.disable_jit():
        _, state = tx.update(bad, state, params)
        _, state = tx.update(gradients, state, params)
    assert int(state.steps_skipped) == 2


def test_an_eager_step_compiles_nothing_after_the_first_ones():
    # Which is what makes Optax' own wrapper slow there; docs/internals/speed.md has the times.
    tx, params = optimizer(), inner.params()
    state = tx.init(params)
    gradients = inner.gradients()
    bad = jax.tree.map(lambda g: g * jnp.nan, gradients)
    for given in (gradients, bad):
        _, state = tx.update(given, state, params)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    for given in (gradients, bad):
        _, state = tx.update(given, state, params)
    assert compiled == []
    # The listener does see what is compiled.
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(3))
    assert compiled


def test_a_transformation_with_gradients_of_its_own_is_looked_at_too():
    normalized = optax.chain(contrib.normalize(), optax.sgd(0.05))
    tx = optimizer(contrib.sam(optax.adam(0.1), normalized, sync_period=2, opaque_mode=True))
    params = inner.params()
    state = tx.init(params)
    before = bits((params, state.inner_state))

    def overflows(params, number):
        return jax.tree.map(lambda p: p * jnp.inf, params)

    def fine(params, number):
        return params

    for run in (
        tx.update,
        lambda *a, grad_fn: jax.jit(lambda *b: tx.update(*b, grad_fn=grad_fn))(*a),
    ):
        updates, after = run(inner.gradients(), state, params, grad_fn=overflows)
        assert bits((optax.apply_updates(params, updates), after.inner_state)) == before
        assert float(after.loss_scale) == 4.0
        assert int(after.steps_skipped) == 1
        updates, after = run(inner.gradients(), state, params, grad_fn=fine)
        assert not after.last_step_skipped
        assert jnp.abs(updates["w"]).max() > 0


def _searched(tx, differentiate, grad, *, compiled=False, steps=3):
    """What some steps of a line search make of the parameters."""

    def value_fn(params):
        return loss_fn(params, BATCH)

    def update(gradients, state, params, value, grad):
        return tx.update(gradients, state, params, value=value, grad=grad, value_fn=value_fn)

    params = first_params()
    update, state = jax.jit(update) if compiled else update, tx.init(params)
    for _ in range(steps):
        value, gradients = differentiate(value_fn)(state, params)
        updates, state = update(gradients, state, params, value, grad(state, gradients))
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("grad", [lambda state, gradients: gradients, unscale])
def test_a_line_search_gets_unscaled_values(grad, compiled):
    """It is given the scaled gradients, as Optax' pages write it, or unscaled ones."""
    inner_tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9))

    def plain(fun):
        return lambda _, params: jax.value_and_grad(fun)(params)

    expected = _searched(inner_tx, plain, lambda _, gradients: gradients)
    tx = loss_scaled(inner_tx, initial_scale=1024.0)
    found = _searched(tx, value_and_grad, grad, compiled=compiled)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-3)


def test_gradients_among_extra_arguments_are_unscaled_and_nothing_else():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    tx = loss_scaled(optax.GradientTransformationExtraArgs(optax.init_empty_state, update), True, 8)
    grads, other = {"w": jnp.float16([8.0, 16.0]), "i": 3, "b": None}, jnp.float16([8.0, 16.0])
    state = tx.init({"w": jnp.float32([0.0, 0.0]), "i": 3, "b": None})
    tx.update(grads, state, value=other, number=3, many=[grads["w"], other], grads=grads)
    assert seen["value"] is seen["many"][1] is other
    assert (seen["number"], seen["grads"]["i"], seen["grads"]["b"]) == (3, 3, None)
    for leaf in (seen["many"][0], seen["grads"]["w"]):
        assert (leaf.dtype, leaf.tolist()) == (jnp.float32, [1.0, 2.0])
    tx.update(grads, state, grad=None)
    tx.update(grads, state, grad=[jnp.float32([1.0, 2.0])])
    assert seen["grad"][0].tolist() == [1.0, 2.0]


def test_extra_arguments_arrive_also_where_optax_would_drop_them():
    seen = []

    def update(updates, state, params=None, **extra_args):
        seen.append(extra_args)
        return updates, state

    note = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    steps = optax.MultiSteps(note, 2)
    for wrapped in (note, steps, steps.gradient_transformation(), optax.chain(note)):
        tx, seen[:] = optimizer(wrapped), []
        jax.jit(tx.update)(
            inner.gradients(), tx.init(inner.params()), inner.params(), value=jnp.float32(3.0)
        )
        assert seen
        assert all(set(args) == {"value"} for args in seen)


def test_a_step_can_be_differentiated():
    def after(rate, gradients):
        tx = loss_scaled(optax.sgd(rate, momentum=0.9), initial_scale=8)
        params = jnp.ones(3)
        updates, state = tx.update(gradients * 8, tx.init(params), params)
        updates, _ = tx.update(gradients * 8, state, params)
        return updates.sum()

    gradients = jnp.float32([1.0, 2.0, 3.0])
    for run in (jax.grad(after, argnums=(0, 1)), jax.jit(jax.grad(after, argnums=(0, 1)))):
        by_rate, by_gradients = run(0.5, gradients)
        assert float(by_rate) == pytest.approx(-6.0 * 1.9)
        np.testing.assert_allclose(by_gradients, -0.5 * 1.9 * np.ones(3), rtol=1e-6)


def test_nothing_is_kept_of_a_step():
    tx = optimizer()
    gradients = scaled(inner.gradients(), 8)
    _, state = tx.update(gradients, tx.init(inner.params()), inner.params())
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(3):
        _, state = tx.update(gradients, state, inner.params())
    gc.collect()
    assert len(jax.live_arrays()) <= before
