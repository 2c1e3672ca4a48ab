"""Replicas of a tf.distribute strategy: one verdict, one scale, the same weights everywhere."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from backends.programs import Run, made
from frameworks.keras.support import STEPS, plain_step, wrapped
from kerases import INF, NAN, Status, assert_same, loss_scale_warnings, number, status
from lossscale import experimental
from lossscale.errors import UnsupportedError

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
START = np.array([1.0, -2.0], "float32")

INNERS = {
    "adam": lambda: Adam(0.125),
    "clipnorm": lambda: keras.optimizers.AdamW(0.125, weight_decay=0.25, clipnorm=0.5),
    "clipvalue_ema": lambda: SGD(0.25, momentum=0.5, clipvalue=0.5, use_ema=True, ema_momentum=0.5),
}


def same_on_both(tracked, strategy):
    """Asserts that variables are the same on all replicas; returns their values on the first."""
    firsts = []
    for variable in tracked:
        native = variable.value if isinstance(variable, keras.Variable) else variable
        first, *others = map(np.array, strategy.experimental_local_results(native))
        for part in others:
            np.testing.assert_array_equal(part, first)
        firsts.append(first)
    return firsts


def on(strategy, make=wrapped):
    """A weight and an optimizer of a strategy."""
    with strategy.scope():
        weight, optimizer = keras.Variable(START), make()
        optimizer.build([weight])
    return weight, optimizer


class Loop:
    """A training loop of two replicas on one weight, whose gradients are given for each."""

    def __init__(self, strategy, make, how, in_function, **kwargs):
        self.strategy, self.how, self.kwargs = strategy, how, kwargs
        self.weight, self.optimizer = on(strategy, make)
        self.call = lambda gradient: strategy.run(self.replica_step, args=(gradient,))
        if in_function:
            self.call = tf.function(self.call)

    def replica_step(self, gradient):
        step = plain_step if self.how == "plain" else STEPS[self.how]
        step(self.optimizer, [self.weight], [gradient], **self.kwargs)

    def step(self, *per_replica):
        given = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                np.broadcast_to(per_replica[context.replica_id_in_sync_group], START.shape),
                tf.float32,
            )
        )
        self.call(given)

    def weights(self):
        return same_on_both([self.weight], self.strategy)[0]


@pytest.fixture(params=[False, True], ids=["eager", "function"])
def in_function(request):
    return request.param


@pytest.fixture(params=["scale_loss", "documented", "minimize"])
def how(request):
    return request.param


def test_overflow_on_one_replica_is_skipped_on_both(two_replicas, how, in_function):
    def make():
        return wrapped(SGD(0.5, momentum=0.5), dynamic_growth_steps=2)

    with loss_scale_warnings() as messages:
        loop = Loop(two_replicas, make, how, in_function)
        loop.step(0.5, 0.25)
    inner = loop.optimizer.inner_optimizer
    before = [loop.weights(), *same_on_both(inner.variables, two_replicas)]
    # What is of opposite sign must not add up to something else.
    for skipped, gradients in enumerate([(-INF, 0.25), (0.25, NAN), (INF, -INF)], start=1):
        loop.step(*gradients)
        assert_same([loop.weights(), *same_on_both(inner.variables, two_replicas)], before)
        same_on_both(loop.optimizer.variables, two_replicas)
        assert status(loop.optimizer) == Status(
            scale=2.0 ** (15 - skipped),
            counter=0,
            skipped=skipped,
            last=True,
            iterations=1 + skipped,
            applied=1,
        )
    loop.step(0.5, 0.25)
    loop.step(0.5, 0.25)
    # The gradients of both are summed; the momentum of three steps is 1, 1.5 and 1.75 of them.
    np.testing.assert_array_equal(loop.weights(), START - 0.5 * (0.5 + 0.25) * (1 + 1.5 + 1.75))
    assert messages == []
    assert not in_function or loop.call.experimental_get_tracing_count() == 1
    same_on_both(loop.optimizer.variables, two_replicas)
    assert status(loop.optimizer) == Status(
        scale=2.0**13, counter=0, skipped=3, last=False, iterations=6, applied=3
    )


GRADIENTS = [(0.5, 0.25), (-1.0, 0.125), (2.0, 2.0), (0.0, -0.5)]


@pytest.mark.parametrize(
    ("name", "in_function"), [*((name, True) for name in INNERS), ("adam", False)]
)
def test_weights_equal_those_of_the_plain_optimizer(two_replicas, in_function, name):
    make_inner = INNERS[name]
    plain = Loop(two_replicas, make_inner, "plain", in_function)
    for gradients in GRADIENTS:
        plain.step(*gradients)
    # What is inside sees nothing of how its gradients were unscaled.
    how = "documented" if name == "adam" else "scale_loss"
    ours = Loop(
        two_replicas, lambda: wrapped(make_inner(), dynamic_growth_steps=2), how, in_function
    )
    ours.step(INF, 0.5)
    for gradients in GRADIENTS:
        ours.step(*gradients)
        ours.step(0.5, NAN)
    assert_same([ours.weights()], [plain.weights()])
    assert_same(
        same_on_both(ours.optimizer.inner_optimizer.variables, two_replicas),
        same_on_both(plain.optimizer.variables, two_replicas),
    )


def older(inner):
    return experimental.LossScaleOptimizer(inner, "dynamic")


@pytest.mark.parametrize(
    ("make", "way_of_stepping", "argument"),
    [
        (wrapped, "scale_loss", {"experimental_aggregate_gradients": False}),
        (wrapped, "documented", {"skip_gradients_aggregation": True}),
        (older, "documented", {"experimental_aggregate_gradients": False}),
    ],
)
def test_gradients_that_were_summed_before_are_not_summed_again(
    two_replicas, in_function, make, way_of_stepping, argument
):
    loop = Loop(two_replicas, lambda: make(SGD(0.5)), way_of_stepping, in_function, **argument)
    loop.step(0.75, 0.75)
    np.testing.assert_array_equal(loop.weights(), START - 0.5 * 0.75)
    loop.step(INF, 0.75)
    np.testing.assert_array_equal(loop.weights(), START - 0.5 * 0.75)
    # The next step of the same optimizer sums again if it is asked to.
    loop.kwargs = {}
    if in_function:
        loop.call = tf.function(loop.call.python_function)
    loop.step(0.5, 0.25)
    np.testing.assert_array_equal(loop.weights(), START - 0.5 * 0.75 - 0.5 * 0.75)


# On one replica each place stands with each way of stepping.
@pytest.mark.parametrize(
    ("way_of_stepping", "traced"),
    [
        *(("scale_loss", traced) for traced in ("neither", "first", "second", "one_function")),
        *(("documented", traced) for traced in ("first", "both")),
    ],
)
def test_gradients_of_one_run_can_be_applied_in_another(two_replicas, way_of_stepping, traced):
    weight, optimizer = on(two_replicas, lambda: wrapped(SGD(0.5), dynamic_growth_steps=2))
    scale, unscale = {
        "scale_loss": (optimizer.scale_loss, list),
        "documented": (optimizer.get_scaled_loss, optimizer.get_unscaled_gradients),
    }[way_of_stepping]

    def differentiate(gradient):
        with tf.GradientTape() as tape:
            loss = scale(tf.reduce_sum(weight.value * gradient))
        return unscale([tape.gradient(loss, weight.value)])

    def apply(found):
        optimizer.apply_gradients([(found[0], weight)])

    def first(gradient):
        return two_replicas.run(differentiate, args=(gradient,))

    def second(found):
        two_replicas.run(apply, args=(found,))

    first = tf.function(first) if traced in ("first", "both") else first
    second = tf.function(second) if traced in ("second", "both") else second

    def step(gradient):
        second(first(gradient))

    step = tf.function(step) if traced == "one_function" else step
    with loss_scale_warnings() as messages:
        for gradient in (0.5, INF, 0.25, 1.0):
            step(tf.constant(gradient))
    (found,) = same_on_both([weight], two_replicas)
    np.testing.assert_array_equal(found, START - 0.5 * 2 * (0.5 + 0.25 + 1.0))
    assert status(optimizer).scale == 2.0**15
    assert messages == []


def test_one_device_strategy_trains_and_skips(in_function):
    one_device = tf.distribute.OneDeviceStrategy("/cpu:0")
    loop = Loop(one_device, wrapped, "scale_loss", in_function)
    for gradient in (0.5, INF, 0.25):
        loop.step(gradient)
    np.testing.assert_array_equal(loop.weights(), START - 0.75)
    assert status(loop.optimizer).skipped == 1


@pytest.mark.parametrize("call", ["apply_gradients", "apply"])
def test_applying_outside_the_replicas_is_an_error_that_says_where_to_apply(two_replicas, call):
    weight, optimizer = on(two_replicas)
    with two_replicas.scope():
        gradient = optimizer.scale_loss(tf.ones(2))
        arguments = ([gradient], [weight]) if call == "apply" else ([(gradient, weight)],)
        with pytest.raises(ValueError, match=r"strategy\.run"):
            getattr(optimizer, call)(*arguments)
    assert number(optimizer.iterations) == 0
    (found,) = same_on_both([weight], two_replicas)
    np.testing.assert_array_equal(found, START)


def test_a_strategy_that_does_not_work_is_refused_at_once():
    strategy = tf.distribute.experimental.CentralStorageStrategy()
    with strategy.scope(), pytest.raises(ValueError, match=r"CentralStorageStrategy.*Supported"):
        wrapped()


@pytest.mark.filterwarnings("ignore::lossscale.LossScaleWarning")
def test_a_keras_whose_sum_over_replicas_is_elsewhere_does_not_sum_twice_in_silence(monkeypatch):
    weight, optimizer = keras.Variable(START), wrapped()
    base = next(c for c in SGD.__mro__ if "_all_reduce_sum_gradients" in vars(c))
    monkeypatch.delattr(base, "_all_reduce_sum_gradients")
    with pytest.raises(
        UnsupportedError, match=r"SGD\._all_reduce_sum_gradients.* to apply gradien"
    ):
        optimizer.apply_gradients([(tf.ones(2), weight)], skip_gradients_aggregation=True)
    np.testing.assert_array_equal(weight.numpy(), START)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_each_replica_has_marks_of_its_own_on_scaled_gradients(two_replicas, in_function):
    with two_replicas.scope():
        run = made(rule=lossscale.FixedScale(2.0**15))

    def replica_step():
        # What one replica holds is no tensor of the other.
        own = Run(run.optimizer, run.variables)
        own.calls("scale apply:a apply:b hand unscale:ab unscaled:a unscaled:b minimize:a")
        own.calls("scale hand unscale:a unscaled:a unscale:b unscaled:b scale unscale:a unscaled:a")
        own.calls("apply:b")

    step = lambda: two_replicas.run(replica_step)  # noqa: E731
    step = tf.function(step) if in_function else step
    with loss_scale_warnings() as messages:
        step()
        step()
    # The gradients of both replicas are summed: five of `a`, four of `b`, two steps.
    assert run.gone() == {"a": -2 * 2 * 5.0, "b": 2 * 2 * 4 * 0.25}
    assert messages == []
