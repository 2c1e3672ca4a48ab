"""Mistakes in loops, each of which is an error."""

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


SEVERAL = jax.vmap(TX.init)({"w": jnp.ones((3, 2))})
MISTAKES = {
    "no_state": (lambda: derived()(PARAMS), ArgumentTypeError, "Received: .*a dict"),
    "loss_last": (
        lambda: value_and_grad(STATE, loss_fn),
        ArgumentTypeError,
        r"a LossScaleState.*value_and_grad\(loss_fn\)\(opt_state, params, \.\.\.\)",
    ),
    "in_turn": (lambda: TX.update(STATE, PARAMS, PARAMS), ArgumentTypeError, "Received: a dict"),
    "no_aux": (
        lambda: of_weights(jnp.sum, has_aux=True),
        ArgumentTypeError,
        r"with has_aux=True, \(loss, aux\)",
    ),
    "integer": (
        lambda: of_weights(lambda w: jnp.sum(w > 0)),
        ArgumentError,
        "floating-point scalar.*int32",
    ),
    "state_of_several": (
        lambda: derived()(SEVERAL, PARAMS),
        ArgumentError,
        r"shape \(3,\).*inside the vmap or p",
    ),
    "state_of_several_scaled_by": (
        lambda: scale_loss(SEVERAL, jnp.float32(1.0)),
        ArgumentError,
        r"scales of shape \(3,\).*inside the vmap or pmap",
    ),
    "tuple": (lambda: of_weights(lambda w: (w.sum(), w)), TypeError, "a tuple, with has_aux=False"),
    "nothing": (lambda: of_weights(lambda w: None), TypeError, "Received: a NoneType"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_mistake_is_silent(mistake):
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        call()


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
