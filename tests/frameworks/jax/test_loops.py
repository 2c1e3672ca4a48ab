"""Programs of users: training loops, and what JAX can do with a step."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from frameworks.jax import inner_transformations as inner
from frameworks.jax.support import bits, scaled
from lossscale.errors import UnsupportedError
from lossscale.optax import loss_scaled, master_weights, scale_loss, value_and_grad

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


def test_an_eager_step_compiles_nothing_after_the_first_ones():
    # Which is what makes Optax' own wrapper slow there; docs/internals/results.md has the times.
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


SEARCHES = {
    "lbfgs": lambda: optax.lbfgs(0.1),
    "lbfgs alone": lambda: optax.lbfgs(0.1, linesearch=None),
    "backtracking": lambda: optax.scale_by_backtracking_linesearch(9),
    "zoom": lambda: optax.scale_by_zoom_linesearch(9),
}


@pytest.mark.parametrize("search", SEARCHES)
def test_line_searches_are_refused(search):
    alone = SEARCHES[search]()
    for found in (alone, optax.MultiSteps(optax.chain(optax.sgd(1.0), alone), 2)):
        for wrap in (loss_scaled, master_weights, lambda tx: loss_scaled(master_weights(tx))):
            with pytest.raises(UnsupportedError, match=r"Line searches.*without loss_scaled.*Stat"):
                wrap(found).init(inner.params())


def test_functions_and_scaled_gradients_are_refused_as_extra_arguments():
    def update(updates, state, params=None, **extra_args):
        return updates, state

    tx = loss_scaled(optax.GradientTransformationExtraArgs(optax.init_empty_state, update), True, 8)
    grads, other = {"w": jnp.float16([8.0, 16.0]), "i": 3, "f": 2.0}, jnp.float16([8.0, 16.0])
    state = tx.init({"w": jnp.float32([0.0, 0.0]), "i": 3, "f": 2.0})
    for passed in (
        {"value_fn": jnp.sum},
        {"obj_fn": lambda params: 0.0},
        {"grad": other},
        {"grads": grads},
        {"many": [other, {"g": grads["w"]}]},
    ):
        [name] = passed
        message = f"`{name}` must be neither a function nor the scaled gradients.*leave out"
        with pytest.raises(UnsupportedError, match=message):
            tx.update(grads, state, **passed)
    with pytest.raises(UnsupportedError, match="`grads` must be neither"):
        jax.jit(lambda grads: tx.update(grads, state, grads=grads))(grads)
    # What is equal and not the same, and a number that is one object in both places.
    tx.update(grads, state, value=2.0, number=3, loss=other, grad=None, many=[other, other])


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
