"""Mistakes in loops: what JAX and Optax would say nothing of, or would say of something else."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.optax import loss_scaled, scale_loss, value_and_grad

TX = loss_scaled(optax.sgd(0.5), initial_scale=8)
PARAMS = {"w": jnp.ones(2)}
STATE = TX.init(PARAMS)


def loss_fn(params):
    return jnp.sum(params["w"])


def derived(**settings):
    return value_and_grad(loss_fn, **settings)


def of_weights(loss, **settings):
    """The derivative of a loss of the weights."""
    return value_and_grad(lambda params: loss(params["w"]), **settings)(STATE, PARAMS)


PAIR = (jnp.ones(2), jnp.ones(2))
SEVERAL = jax.vmap(TX.init)({"w": jnp.ones((3, 2))})
CALL = r".*value_and_grad\(loss_fn\)\(opt_state, params, \.\.\.\)"
OF_A_TYPE = {
    "no_state": (lambda: derived()(PARAMS), "Received: .*a dict" + CALL),
    "state_last": (lambda: derived()(PARAMS, STATE), "Received: .*a dict" + CALL),
    "optimizer": (lambda: derived()(TX, PARAMS), "the optimizer and not its state" + CALL),
    "array": (lambda: derived()(jnp.ones(3)), r"Received: .*an array of shape \(3,\)" + CALL),
    "none": (lambda: derived()(None), "Received: .*None" + CALL),
    "loss_last": (lambda: value_and_grad(STATE, loss_fn), "a state of loss_scaled" + CALL),
    "at_once": (lambda: value_and_grad(loss_fn, STATE), "a state of loss_scaled" + CALL),
    "in_turn": (lambda: TX.update(STATE, PARAMS, PARAMS), r"tx\.update\(grads, opt_state, params"),
    "with_the_loss": (lambda: TX.update(derived()(STATE, PARAMS), STATE, PARAMS), "loss, grads = "),
    "returns_no_value": (lambda: derived(grad=jax.grad)(STATE, PARAMS), r"jax\.grad does not"),
    "returns_no_value_but_a_pair": (
        lambda: value_and_grad(lambda p: jnp.sum(p[0]), grad=jax.grad)(STATE, PAIR),
        r"jax\.grad does not",
    ),
    "tuple": (lambda: of_weights(lambda w: (w.sum(), w)), "a tuple of 2. .*pass has_aux=True"),
    "dict": (lambda: of_weights(lambda w: {"loss": w.sum()}), "Received: a dict"),
    "nothing": (lambda: of_weights(lambda w: None), "return the loss, a scalar. Received: None"),
    "no_aux": (lambda: of_weights(jnp.sum, has_aux=True), r"must return \(loss, aux\)"),
}
OF_A_VALUE = {
    "array_of_losses": (lambda: of_weights(lambda w: w**2), r"be a scalar.*\(2,\).*Take its mean"),
    "integer": (lambda: of_weights(lambda w: jnp.sum(w > 0)), "floating-point scalar.*int32"),
    "array_and_aux": (lambda: of_weights(lambda w: (w, w), has_aux=True), r"a scalar.*\(2,\)"),
    "state_of_several": (lambda: derived()(SEVERAL, PARAMS), r"shape \(3,\).*inside the vmap or p"),
    "state_of_several_scaled_by": (
        lambda: scale_loss(SEVERAL, jnp.float32(1.0)),
        r"scales of shape \(3,\).*inside the vmap or pmap",
    ),
}


@pytest.mark.parametrize("mistake", OF_A_TYPE | OF_A_VALUE)
def test_a_mistake_is_answered_with_what_to_write(mistake):
    call, message = (OF_A_TYPE | OF_A_VALUE)[mistake]
    error = ArgumentTypeError if mistake in OF_A_TYPE else ArgumentError
    with pytest.raises(error, match=message):
        call()


def test_a_pair_of_parameters_is_no_mistake():
    TX.update(PAIR, TX.init(PAIR), PAIR)


def test_what_says_by_what_to_derive_need_not_be_a_number():
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    by_kernel = nnx.DiffState(0, nnx.PathContains("kernel"))
    differentiate = value_and_grad(
        lambda m: jnp.sum(m(jnp.ones(2))), by_kernel, grad=nnx.value_and_grad
    )
    _, gradients = differentiate(STATE, model)
    assert jax.tree.leaves(gradients)[0].tolist() == [[8.0], [8.0]]


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
