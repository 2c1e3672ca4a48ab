"""Where `loss_scaled` may stand among other wrappers, and what the error says where it may not."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import lossscale
from frameworks.jax import inner_transformations as inner
from lossscale.errors import AlreadyWrappedError, ArgumentError, ArgumentTypeError
from lossscale.optax import loss_scale, loss_scaled, scale_loss, unscale, value_and_grad

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def wrapped():
    return loss_scaled(optax.sgd(0.1), initial_scale=8)


WRONG = {
    "MultiSteps": lambda: optax.MultiSteps(wrapped(), 2),
    "MultiSteps, skipping": lambda: optax.MultiSteps(
        wrapped(), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "ApplyIfFinite": lambda: optax.apply_if_finite(wrapped(), 2),
    "chain has it in place 1": lambda: optax.chain(optax.clip_by_global_norm(1.0), wrapped()),
    "chain has it in place 0": lambda: optax.chain(wrapped(), optax.ema(0.9)),
    "chain has it in place 0 of 2": lambda: optax.chain(wrapped(), optax.add_decayed_weights(0.1)),
    "Masked": lambda: optax.masked(wrapped(), inner.MASK),
    "Partition": lambda: optax.partition(
        {"matrix": wrapped(), "vector": optax.sgd(0.1)}, inner.LABELS
    ),
    "ScheduleFree": lambda: contrib.schedule_free(wrapped(), 0.1),
    "SAM": lambda: contrib.sam(wrapped(), optax.sgd(0.1)),
    "ConditionallyMask": lambda: optax.conditionally_mask(wrapped(), lambda step: step > 0),
    "ConditionallyTransform": lambda: optax.conditionally_transform(
        wrapped(), lambda step: step > 0
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda rate: optax.chain(optax.scale(rate), wrapped())
    )(rate=0.1),
}
"""What stands in the message, up to a comma, and an optimizer in a wrong order."""


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_order_is_refused_by_the_helpers(case):
    tx = WRONG[case]()
    opt_state = tx.init(inner.params())
    culprit = "chain" if case == "inject_hyperparams" else case.partition(",")[0]
    for helper in (
        lambda: loss_scale(opt_state),
        lambda: scale_loss(opt_state, jnp.float32(1.0)),
        lambda: unscale(opt_state, inner.gradients()),
        lambda: value_and_grad(lambda p: p["b"].sum())(opt_state, inner.params()),
    ):
        with pytest.raises(ArgumentError, match=culprit) as caught:
            helper()
        assert "Put loss_scaled outside" in str(caught.value)


def test_lookahead_around_it_is_refused():
    tx = optax.lookahead(wrapped(), 2, 0.5)
    params = optax.LookaheadParams.init_synced(inner.params())
    with pytest.raises(ArgumentError, match=r"Lookahead .*Put loss_scaled outside"):
        loss_scale(tx.init(params))


def test_several_scales_are_refused():
    tx = optax.multi_transform({"matrix": wrapped(), "vector": wrapped()}, inner.LABELS)
    with pytest.raises(ArgumentError, match=r"2 loss scales.*put loss_scaled outside"):
        loss_scale(tx.init(inner.params()))


RIGHT = {
    "itself": wrapped,
    "chain of one": lambda: optax.chain(wrapped()),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda rate: loss_scaled(optax.sgd(rate), initial_scale=8)
    )(rate=0.1),
    "with extra args": lambda: optax.with_extra_args_support(wrapped()),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_changes_nothing_may_be_around_it(case):
    assert float(loss_scale(RIGHT[case]().init(inner.params()))) == 8.0


def test_the_state_of_something_else_is_refused():
    params = inner.params()
    for wrong, message in (
        (optax.sgd(0.1).init(params), r"tx = lossscale\.optax\.loss_scaled\(inner\)"),
        (params, "Received: a dict"),
        (wrapped(), "the optimizer and not its state"),
        (None, "Received: None"),
    ):
        with pytest.raises(ArgumentTypeError, match=message):
            scale_loss(wrong, jnp.float32(1.0))
    with pytest.raises(ArgumentError, match="Pass that one"):
        loss_scale({"generator": wrapped().init(params)})


@pytest.mark.parametrize(
    "around",
    [
        loss_scaled,
        lambda tx: loss_scaled(optax.chain(tx)),
        lambda tx: loss_scaled(optax.chain(optax.clip(1.0), tx)),
        lambda tx: loss_scaled(optax.MultiSteps(tx, 2)),
        lambda tx: loss_scaled(optax.masked(tx, inner.MASK)),
        lambda tx: loss_scaled(optax.inject_hyperparams(lambda rate: tx)(rate=0.1)),
    ],
)
def test_two_layers_of_loss_scaling_are_a_type_error(around):
    with pytest.raises(AlreadyWrappedError, match="already"):
        around(wrapped()).init(inner.params())
    assert issubclass(AlreadyWrappedError, TypeError)


class SGD:
    def apply_gradients(self, pairs):
        pass


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lossscale.DynamicScale(), "must be an Optax transformation"),
        (optax.GradientTransformation, "must be an Optax transformation"),
        (optax.adamw, r"has to be called: adamw\(\.\.\.\)"),
        (SGD(), r"use lossscale\.LossScaleOptimizer"),
    ],
)
def test_what_is_no_transformation_is_named(wrong, message):
    with pytest.raises(TypeError, match=message):
        loss_scaled(wrong)


def test_the_optimizer_class_points_here():
    with pytest.raises(TypeError, match=r"lossscale\.optax\.loss_scaled"):
        lossscale.LossScaleOptimizer(optax.adamw(0.1))
    with pytest.raises(TypeError, match="already has loss scaling"):
        lossscale.LossScaleOptimizer(wrapped())


def test_the_arguments_are_those_of_every_shell():
    for arguments, message in (
        ({"dynamic": "dynamic"}, "must be True or False"),
        ({"dynamic": False}, "initial_scale"),
        ({"initial_scale": 0}, "positive number"),
        ({"rule": 8}, "must be a scaling rule"),
        ({"rule": lossscale.DynamicScale}, "must be a scaling rule"),
        ({"rule": lossscale.FixedScale(8), "initial_scale": 4}, "already says"),
        ({"axis_name": 3}, "must be the name of an axis"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            loss_scaled(optax.sgd(0.1), **arguments)


def test_code_that_finds_things_by_name_finds_them():
    tx = loss_scaled(
        optax.chain(
            optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
            contrib.reduce_on_plateau(),
        ),
        initial_scale=8,
    )
    state = tx.init(inner.params())
    assert float(optax.tree.get(state, "loss_scale")) == 8.0
    assert int(optax.tree.get(state, "good_steps")) == 0
    assert float(optax.tree.get(state, "scale")) == 1.0
    assert float(optax.tree.get(state, "learning_rate")) == jnp.float32(0.1)
    for field in ("skipped_steps", "consecutive_skips", "last_step_finite", "rule_state"):
        optax.tree.get(state, field)
    # One by one: Optax looks no further below a node in which it has set a name.
    state = optax.tree.set(optax.tree.set(state, learning_rate=0.5), loss_scale=4.0)
    loss, gradients = value_and_grad(lambda p: p["b"].sum())(state, inner.params())
    assert gradients["b"].tolist() == [4.0] * 4
    _, after = jax.jit(tx.update)(gradients, state, inner.params(), value=loss)
    assert after.loss_scale.dtype == jnp.float32
    assert float(after.loss_scale) == 4.0
    assert float(optax.tree.get(after, "learning_rate")) == 0.5
