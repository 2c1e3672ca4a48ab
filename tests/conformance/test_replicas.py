"""Replicas of a tf.distribute strategy: one decision, one scale, the same weights everywhere."""

import importlib

import numpy as np
import pytest

from conformance.wrappers import BACKEND, KERAS

if BACKEND != "tensorflow":
    pytest.skip("strategies of TensorFlow", allow_module_level=True)

import tensorflow as tf

from conformance.every_optimizer import state_of
from conformance.harness import native
from conformance.test_subclasses import knowing_few_arguments
from kerases import INF, NAN, Status, assert_same, loss_scale_warnings, number, status
from lossscale import experimental
from tensorflow_steps import (
    plain_step,
    step_by_documented_calls,
    step_by_minimize,
    step_by_scale_loss,
    taken,
    variables,
    wrapped,
)

keras = importlib.import_module(KERAS)
IS_KERAS_3 = KERAS == "keras"
START = np.array([1.0, -2.0], "float32")


def averaging(optimizers):
    return optimizers.SGD(0.25, momentum=0.5, clipvalue=0.5, use_ema=True, ema_momentum=0.5)


INNERS = {
    "adam": lambda optimizers: optimizers.Adam(0.125),
    "clipnorm": lambda optimizers: optimizers.AdamW(0.125, weight_decay=0.25, clipnorm=0.5),
    "clipvalue_ema": averaging,
}


def same_on_both(tracked, strategy):
    """Asserts that variables are the same on all replicas; returns their values on the first."""
    firsts = []
    for variable in tracked:
        first, *others = map(np.array, strategy.experimental_local_results(native(variable)))
        for part in others:
            np.testing.assert_array_equal(part, first)
        firsts.append(first)
    return firsts


class Loop:
    """A training loop of two replicas on one weight, whose gradients are given for each."""

    def __init__(self, strategy, make, how, in_function, *third, **named):
        self.strategy, self.how, self.third, self.named = strategy, how, third, named
        with strategy.scope():
            [self.weight], self.optimizer = variables(START), make()
            # What the legacy optimizers of tf_keras call it.
            build = getattr(self.optimizer, "build", None) or self.optimizer._create_all_weights
            build([self.weight])
        self.call = lambda gradient: strategy.run(self.replica_step, args=(gradient,))
        if in_function:
            self.call = tf.function(self.call)

    def replica_step(self, gradient):
        self.how(self.optimizer, [self.weight], [gradient], *self.third, **self.named)

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

    def state(self):
        """The weight, and all that the inner optimizer keeps."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        return same_on_both([self.weight, *state_of(inner).values()], self.strategy)


@pytest.fixture(params=[False, True], ids=["eager", "function"])
def in_function(request):
    return request.param


@pytest.fixture(
    params=[
        *([step_by_scale_loss] if IS_KERAS_3 else []),
        step_by_documented_calls,
        step_by_minimize,
    ],
    ids=lambda step: step.__name__,
)
def how(request):
    return request.param


# One of tf_keras that does not take the argument sums gradients itself.
@pytest.mark.parametrize("of", [None, *([] if IS_KERAS_3 else [knowing_few_arguments])])
def test_overflow_on_one_replica_is_skipped_on_both(two_replicas, optimizers, how, in_function, of):
    def make():
        cls = optimizers.SGD if of is None else of(optimizers.SGD)
        return wrapped(cls(0.5, momentum=0.5), dynamic_growth_steps=2)

    with loss_scale_warnings() as messages:
        loop = Loop(two_replicas, make, how, in_function)
        loop.step(0.5, 0.25)
    before = loop.state()
    # What is of opposite sign must not add up to something else.
    for skipped, gradients in enumerate([(-INF, 0.25), (0.25, NAN), (INF, -INF)], start=1):
        loop.step(*gradients)
        assert_same(loop.state(), before)
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
def test_weights_equal_those_of_the_plain_optimizer(two_replicas, optimizers, in_function, name):
    if name != "adam" and optimizers is not keras.optimizers:
        pytest.skip("legacy optimizers have no such settings")

    def make_inner():
        return INNERS[name](optimizers)

    plain = Loop(two_replicas, make_inner, plain_step, in_function)
    for gradients in GRADIENTS:
        plain.step(*gradients)
    # What is inside sees nothing of how its gradients were unscaled.
    how = step_by_scale_loss if IS_KERAS_3 and name != "adam" else step_by_documented_calls
    ours = Loop(
        two_replicas, lambda: wrapped(make_inner(), dynamic_growth_steps=2), how, in_function
    )
    ours.step(INF, 0.5)
    for gradients in GRADIENTS:
        ours.step(*gradients)
        ours.step(0.5, NAN)
    assert_same(ours.state(), plain.state())


def older(inner):
    return experimental.LossScaleOptimizer(inner, "dynamic")


ARE_SUMMED = [
    (wrapped, step_by_documented_calls, (), {"skip_gradients_aggregation": True}),
    (older, step_by_documented_calls, (), {"experimental_aggregate_gradients": False}),
    (older, step_by_documented_calls, (None, False), {}),
    (wrapped, step_by_scale_loss, (), {"experimental_aggregate_gradients": False})
    if IS_KERAS_3
    else (wrapped, step_by_documented_calls, (None, False), {}),
]


@pytest.mark.parametrize(("make", "how", "third", "named"), ARE_SUMMED)
def test_gradients_that_were_summed_before_are_not_summed_again(
    two_replicas, optimizers, in_function, make, how, third, named
):
    if third and make is wrapped and optimizers is keras.optimizers:
        pytest.skip("those of legacy optimizers alone take a third argument")

    def made():
        return make(optimizers.SGD(0.5))

    loop = Loop(two_replicas, made, how, in_function, *third, **named)
    for gradients in ((0.75, 0.75), (INF, 0.75), (0.75, NAN)):
        loop.step(*gradients)
        np.testing.assert_array_equal(loop.weights(), START - 0.5 * 0.75)
    assert number(loop.optimizer.steps_skipped) == 2
    # The next step of the same optimizer sums again if it is asked to.
    loop.third, loop.named = (), {}
    if in_function:
        loop.call = tf.function(loop.call.python_function)
    loop.step(0.5, 0.25)
    np.testing.assert_array_equal(loop.weights(), START - 0.5 * 0.75 - 0.5 * 0.75)


# On one replica each place stands with each way of stepping.
@pytest.mark.parametrize(
    ("verbs", "traced"),
    [
        *(("documented", traced) for traced in ("first", "both")),
        *(
            ("scale_loss", traced)
            for traced in ("neither", "first", "second", "one_function")
            if IS_KERAS_3
        ),
    ],
)
def test_gradients_of_one_run_can_be_applied_in_another(two_replicas, optimizers, verbs, traced):
    with two_replicas.scope():
        [weight], optimizer = variables(START), wrapped(optimizers.SGD(0.5))
        optimizer.build([weight])
    scale, unscale = optimizer.get_scaled_loss, optimizer.get_unscaled_gradients
    if verbs == "scale_loss":
        scale, unscale = optimizer.scale_loss, list

    def differentiate(gradient):
        return unscale(taken([weight], [gradient], scale))

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
    assert status(optimizer).scale == 2.0**14
    assert messages == []


def test_one_device_trains_and_central_storage_is_refused(optimizers, in_function):
    one_device = tf.distribute.OneDeviceStrategy("/cpu:0")
    loop = Loop(one_device, lambda: wrapped(optimizers.SGD(1.0)), step_by_minimize, in_function)
    for gradient in (0.5, INF, 0.25):
        loop.step(gradient)
    np.testing.assert_array_equal(loop.weights(), START - 0.75)
    assert status(loop.optimizer).skipped == 1
    central = tf.distribute.experimental.CentralStorageStrategy()
    with central.scope(), pytest.raises(ValueError, match=r"CentralStorageStrategy.*Supported"):
        wrapped(optimizers.SGD(1.0))


@pytest.mark.parametrize("call", ["apply_gradients", *(["apply"] if IS_KERAS_3 else [])])
def test_applying_outside_the_replicas_is_an_error_that_says_where_to_apply(
    two_replicas, optimizers, call
):
    with two_replicas.scope():
        [weight], optimizer = variables(START), wrapped(optimizers.SGD(1.0))
        optimizer.build([weight])
        gradient = optimizer.get_scaled_loss(tf.ones(2))
        arguments = ([gradient], [weight]) if call == "apply" else ([(gradient, weight)],)
        with pytest.raises(ValueError, match=r"strategy\.run"):
            getattr(optimizer, call)(*arguments)
    assert number(optimizer.iterations) == 0
    (found,) = same_on_both([weight], two_replicas)
    np.testing.assert_array_equal(found, START)
