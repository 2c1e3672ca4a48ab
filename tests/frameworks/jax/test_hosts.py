"""The programs of examples/jax, one for each host library, and the mistakes that hosts invite."""

import contextlib
import io
import pathlib
import runpy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from lossscale.optax import loss_scale, loss_scaled, value_and_grad

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples/jax"
HOSTS = ("equinox_model", "flax_linen", "flax_nnx", "haiku_model", "plain")


@pytest.mark.parametrize("host", HOSTS)
def test_a_program_of_every_host_takes_the_four_steps(host):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{host}.py"))
    assert printed.getvalue().splitlines()[-1] == "8 4 4 8 - steps skipped: 1"


def wrapped():
    return loss_scaled(optax.adam(0.1), initial_scale=8)


class Normalized(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.dense(x))


def test_what_a_host_keeps_can_be_given_in_the_place_of_its_opt_state():
    net, x = nn.Dense(1), jnp.ones((2, 4))
    params = net.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=wrapped())
    step = value_and_grad(lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2))
    loss, grads = step(state, state.params)
    same_loss, same = step(state.opt_state, state.params)
    assert float(loss) == float(same_loss)
    jax.tree.map(np.testing.assert_array_equal, grads, same)
    assert float(loss_scale(state)) == 8
    assert float(loss_scale(nnx.Optimizer(Normalized(), wrapped(), wrt=nnx.Param))) == 8


@pytest.mark.parametrize(
    ("grad", "moved"), [(jax.value_and_grad, False), (nnx.value_and_grad, True)]
)
def test_only_the_derivative_of_nnx_keeps_what_a_module_changes_in_itself(grad, moved):
    model = Normalized()
    optimizer = nnx.Optimizer(model, wrapped(), wrt=nnx.Param)
    before = np.array(model.norm.mean.get_value())
    step = value_and_grad(lambda m: jnp.sum(m(jnp.ones((2, 4)))), grad=grad)
    step(optimizer, model)
    assert np.any(model.norm.mean.get_value() != before) == moved


def test_jax_itself_says_that_an_equinox_model_needs_another_derivative():
    model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
    opt_state = wrapped().init(eqx.filter(model, eqx.is_inexact_array))
    step = value_and_grad(lambda m: jnp.sum(m(jnp.ones(4))))
    with pytest.raises(TypeError, match="not a valid JAX type"):
        step(opt_state, model)
