"""The programs of examples/jax, one for each host library, and the states that hosts hold."""

import contextlib
import io
import pathlib
import runpy

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
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    assert float(loss_scale(nnx.Optimizer(model, wrapped(), wrt=nnx.Param))) == 8
