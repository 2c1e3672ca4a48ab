"""Mistakes in loops: what JAX and Optax would say nothing of, or would say of something else."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from lossscale.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.optax import Monitor, loss_scaled, scale_loss, value_and_grad

TX = loss_scaled(optax.sgd(0.5), initial_scale=8)
PARAMS = {"w": jnp.ones(2)}
STATE = TX.init(PARAMS)


def loss_fn(params):
    return jnp.sum(params["w"])


@pytest.mark.parametrize(
    ("call", "received"),
    [
        (lambda: value_and_grad(loss_fn)(PARAMS), "a dict"),
        (lambda: value_and_grad(loss_fn)(PARAMS, STATE), "a dict"),
        (lambda: value_and_grad(loss_fn)(TX, PARAMS), "the optimizer and not its state"),
        (lambda: value_and_grad(loss_fn)(jnp.ones(3)), r"an array of shape \(3,\)"),
        (lambda: value_and_grad(loss_fn)(None), "None"),
        (lambda: value_and_grad(STATE, loss_fn), "a state of loss_scaled"),
        (lambda: value_and_grad(loss_fn, STATE), "a state of loss_scaled"),
    ],
)
def test_how_value_and_grad_is_called_is_said(call, received):
    expected = rf"Received: .*{received}.*value_and_grad\(loss_fn\)\(opt_state, params, \.\.\.\)"
    with pytest.raises(ArgumentTypeError, match=expected):
        call()


def test_what_is_not_the_gradients_is_not_taken_for_them():
    with pytest.raises(ArgumentTypeError, match=r"tx\.update\(grads, opt_state, params\)"):
        TX.update(STATE, PARAMS, PARAMS)
    with pytest.raises(ArgumentTypeError, match=r"loss, grads = \.\.\."):
        TX.update(value_and_grad(loss_fn)(STATE, PARAMS), STATE, PARAMS)
    # A pair of parameters is none of these.
    pair = (jnp.ones(2), jnp.ones(2))
    TX.update(pair, TX.init(pair), pair)


def test_what_returns_no_value_is_not_taken_for_what_does():
    for params in (PARAMS, (jnp.ones(2), jnp.ones(2))):
        with pytest.raises(ArgumentTypeError, match=r"jax\.grad does not"):
            value_and_grad(lambda p: jnp.sum(jax.tree.leaves(p)[0]), grad=jax.grad)(STATE, params)


def test_what_says_by_what_to_derive_need_not_be_a_number():
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    by_kernel = nnx.DiffState(0, nnx.PathContains("kernel"))
    differentiate = value_and_grad(
        lambda m: jnp.sum(m(jnp.ones(2))), by_kernel, grad=nnx.value_and_grad
    )
    _, gradients = differentiate(STATE, model)
    assert jax.tree.leaves(gradients)[0].tolist() == [[8.0], [8.0]]


@pytest.mark.parametrize(
    ("loss_fn", "has_aux", "message"),
    [
        (lambda w: (w.sum(), w), False, "a tuple of 2. If it returns more.*pass has_aux=True"),
        (lambda w: {"loss": w.sum()}, False, "Received: a dict"),
        (lambda w: None, False, "must return the loss, a scalar. Received: None"),
        (lambda w: w**2, False, r"must be a scalar.*\(2,\).*Take its mean"),
        (lambda w: jnp.sum(w > 0), False, r"floating-point scalar.*int32"),
        (lambda w: w.sum(), True, r"must return \(loss, aux\)"),
        (lambda w: (w, w), True, r"must be a scalar.*\(2,\)"),
    ],
)
def test_a_function_that_returns_no_loss_is_named(loss_fn, has_aux, message):
    step = value_and_grad(lambda params: loss_fn(params["w"]), has_aux=has_aux)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        step(STATE, PARAMS)


def test_the_state_of_several_belongs_into_a_vmap():
    several = jax.vmap(TX.init)({"w": jnp.ones((3, 2))})
    for call in (
        lambda: value_and_grad(loss_fn)(several, PARAMS),
        lambda: scale_loss(several, jnp.float32(1.0)),
    ):
        with pytest.raises(ArgumentError, match=r"scales of shape \(3,\).*inside the vmap or pmap"):
            call()


def test_a_monitor_does_not_belong_into_a_compiled_function():
    monitor = Monitor(TX, PARAMS, STATE)
    with pytest.raises(UnsupportedError, match="outside of compiled functions"):
        jax.jit(monitor.step)(STATE)
    monitor.step(TX.update(PARAMS, STATE)[1])
    assert monitor.last_record.step == 1


def test_a_monitor_is_given_what_the_step_returned():
    opt_state = jax.tree.map(jnp.copy, STATE)
    monitor = Monitor(TX, PARAMS, opt_state)
    after = jax.jit(lambda s: TX.update(PARAMS, s)[1], donate_argnums=0)(opt_state)
    with pytest.raises(
        ArgumentError, match=r"were deleted by a step .*\. Pass the state that the step returned"
    ):
        monitor.step(opt_state)
    monitor.step(after)
    assert monitor.last_record.step == 1


def test_a_model_with_functions_in_it_may_be_the_parameters():
    # As many programs with Equinox have it, and as transformations take it that read no parameters.
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model, opt_state):
        differentiate = value_and_grad(
            lambda m: jnp.sum(m(jnp.ones(2))), grad=eqx.filter_value_and_grad
        )
        _, gradients = differentiate(opt_state, model)
        updates, opt_state = TX.update(gradients, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state

    for run in (step, eqx.filter_jit(step)):
        trained, after = run(model, opt_state)
        assert trained.activation is model.activation
        assert trained.layers[-1].bias[0] == model.layers[-1].bias[0] - 0.5
        assert int(after.rule_state["good_steps"]) == 1
