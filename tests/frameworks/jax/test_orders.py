"""Where `loss_scaled` may stand, among wrappers and in libraries, and what other errors say."""

import contextlib
import io
import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optax import contrib

import lossscale
from frameworks.jax import inner_transformations as inner
from lossscale.errors import AlreadyWrappedError, ArgumentError, ArgumentTypeError
from lossscale.optax import (
    loss_scale,
    loss_scaled,
    master_weights,
    scale_loss,
    unless_skipped,
    value_and_grad,
)


def wrapped(rate=0.1):
    return loss_scaled(optax.sgd(rate), initial_scale=8)


def check_refused(opt_state, error, message):
    """That each function that is given a state refuses this one."""
    for helper in (
        lambda: loss_scale(opt_state),
        lambda: scale_loss(opt_state, jnp.float32(1.0)),
        lambda: unless_skipped(opt_state, 1.0, 0.0),
        lambda: value_and_grad(lambda p: p["b"].sum())(opt_state, inner.params()),
    ):
        with pytest.raises(error, match=message):
            helper()


WRONG = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx(0.1), 2),
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx(0.1)),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("scaled", tx(0.1))),
    "inject_hyperparams, a number": lambda tx: optax.inject_hyperparams(tx)(rate=0.1),
    "inject_hyperparams, a schedule": lambda tx: optax.inject_hyperparams(tx)(
        rate=optax.linear_schedule(1.0, 0.0, 4)
    ),
    "Masked": lambda tx: optax.masked(tx(0.1), inner.MASK),
    "Partition": lambda tx: optax.partition(
        {"matrix": tx(0.1), "vector": optax.sgd(0.1)}, inner.LABELS
    ),
    "ApplyIfFinite": lambda tx: optax.apply_if_finite(tx(0.1), 2),
}
"""What stands in the message, up to a comma, and what wraps a transformation of a rate."""

OUTSIDE = r"must be the outermost transformation: .*{}.*Write loss_scaled"


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_order_is_refused(case):
    name = case.partition(",")[0]
    message = OUTSIDE.format(name) + (r"\(optax\." + name if name[0].islower() else "")
    check_refused(WRONG[case](wrapped).init(inner.params()), ArgumentError, message)
    with pytest.raises(ArgumentError, match=r"inside.*Write loss_scaled\(master_weights\("):
        loss_scaled(WRONG[case](lambda rate: master_weights(optax.sgd(rate)))).init(inner.params())


def test_what_is_not_the_state_of_one_optimizer_is_refused():
    params = inner.params()
    synced, model = optax.LookaheadParams.init_synced(params), nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    twice = optax.multi_transform({"matrix": wrapped(), "vector": wrapped()}, inner.LABELS)
    clipped, state = WRONG["chain"](wrapped), wrapped().init(params)
    train_state = TrainState.create(apply_fn=None, params=params, tx=clipped)
    of_nnx = nnx.Optimizer(model, clipped, wrt=nnx.Param).opt_state
    for wrong, message in (
        (optax.lookahead(wrapped(), 2, 0.5).init(synced), OUTSIDE.format("Lookahead ")),
        (train_state, OUTSIDE.format(r"optax\.chain")),
        (of_nnx, OUTSIDE.format(r"optax\.chain")),
        (twice.init(params), "2 loss scales.*wrap once, outermost"),
        ({"generator": state, "critic": state}, "With several optimizers, pass the state of one"),
        ({"generator": state}, OUTSIDE.format("dict")),
    ):
        check_refused(wrong, ArgumentError, message)
    for wrong, message in (
        (optax.sgd(0.1).init(params), r"tx = lossscale\.optax\.loss_scaled\(inner\)"),
        (params, "Received: a dict"),
        (wrapped(), "Received: a GradientTransformationExtraArgs"),
        (None, "Received: a NoneType"),
    ):
        check_refused(wrong, ArgumentTypeError, message)


@pytest.mark.parametrize(
    "around",
    [
        loss_scaled,
        lambda tx: loss_scaled(optax.chain(optax.clip(1.0), tx)),
        lambda tx: loss_scaled(optax.inject_hyperparams(lambda rate: tx)(rate=0.1)),
    ],
)
def test_two_layers_of_loss_scaling_are_a_type_error(around):
    with pytest.raises(AlreadyWrappedError, match="already"):
        around(wrapped()).init(inner.params())
    assert issubclass(AlreadyWrappedError, TypeError)


def test_an_optimizer_of_another_framework_is_sent_to_the_class_and_a_transformation_here():
    with pytest.raises(TypeError, match=r"use lossscale\.LossScaleOptimizer"):
        loss_scaled(types.SimpleNamespace(apply_gradients=print))
    with pytest.raises(TypeError, match=r"lossscale\.optax\.loss_scaled"):
        lossscale.LossScaleOptimizer(optax.adamw(0.1))


def test_code_that_finds_things_by_name_finds_them():
    tx = loss_scaled(
        optax.chain(
            optax.inject_hyperparams(optax.adam)(learning_rate=0.1), contrib.reduce_on_plateau()
        ),
        initial_scale=8,
    )
    state = tx.init(inner.params())
    assert float(optax.tree.get(state, "loss_scale")) == 8.0
    assert int(optax.tree.get(state, "good_steps")) == 0
    assert float(optax.tree.get(state, "scale")) == 1.0
    assert float(optax.tree.get(state, "learning_rate")) == jnp.float32(0.1)
    # One by one: Optax looks no further below a node in which it has set a name.
    state = optax.tree.set(optax.tree.set(state, learning_rate=0.5), loss_scale=4.0)
    loss, gradients = value_and_grad(lambda p: p["b"].sum())(state, inner.params())
    assert gradients["b"].tolist() == [4.0] * 4
    _, after = jax.jit(tx.update)(gradients, state, inner.params(), value=loss)
    assert after.loss_scale.dtype == jnp.float32
    assert float(after.loss_scale) == 4.0
    assert float(optax.tree.get(after, "learning_rate")) == 0.5


EXAMPLES = pathlib.Path(__file__).parents[3] / "examples/jax"
HOSTS = ("equinox_model", "flax_linen", "flax_nnx", "haiku_model", "plain")


@pytest.mark.parametrize("host", HOSTS)
def test_a_program_of_every_host_takes_the_four_steps(host):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{host}.py"))
    assert printed.getvalue().splitlines()[-1] == "8 4 4 8 - steps skipped: 1"
