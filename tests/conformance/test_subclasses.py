"""Verbs that a subclass has written are called by the others, on Keras 3 and on both tf_keras.

What `fit` calls is in tests/backends/test_fit.py, on each backend.
"""

import importlib

import numpy as np
import pytest

from conformance.wrappers import BACKEND, KERAS
from lossscale import experimental

if BACKEND != "tensorflow":
    pytest.skip("the verbs of TensorFlow's loops", allow_module_level=True)

import tensorflow as tf

KERAS_MODULE = importlib.import_module(KERAS)
CURRENT = importlib.import_module(f"lossscale.{KERAS}").LossScaleOptimizer
OLDER = getattr(experimental, KERAS).LossScaleOptimizer
FAMILIES = {"new": KERAS_MODULE.optimizers}
if KERAS == "tf_keras":
    FAMILIES["legacy"] = KERAS_MODULE.optimizers.legacy
VERBS = ("get_scaled_loss", "get_unscaled_gradients", "get_gradients", "apply_gradients")
HALVES = [*VERBS[:2]]
SCALES = ["get_scaled_loss", *(["scale_loss"] if KERAS == "keras" else [])]
CALLS = {
    "minimize": [*HALVES, "apply_gradients"],
    "get_gradients": ["get_gradients", *HALVES],
    "get_updates": ["get_gradients", *HALVES, "apply_gradients"],
}
if KERAS == "tf_keras":
    CALLS["compute_gradients"] = HALVES


@pytest.fixture(params=FAMILIES)
def optimizers(request):
    return FAMILIES[request.param]


def recording_calls(base):
    """A subclass that records which of its methods are called."""

    class RecordingCalls(base):
        def __init__(self, *args, **kwargs):
            self.calls = []
            super().__init__(*args, **kwargs)

    def recorded(verb):
        def call(self, *args):
            self.calls.append(verb)
            return getattr(super(RecordingCalls, self), verb)(*args)

        return call

    for verb in VERBS:
        setattr(RecordingCalls, verb, recorded(verb))
    return RecordingCalls


class Own(recording_calls(CURRENT)):
    """Does all by itself: another scale, twice the gradients, and an answer of its own."""

    def get_scaled_loss(self, loss):
        self.calls.append("get_scaled_loss")
        return lambda: loss() * 7.0

    def get_unscaled_gradients(self, grads):
        self.calls.append("get_unscaled_gradients")
        return [g / 7.0 for g in grads]

    def apply_gradients(self, grads_and_vars):
        super().apply_gradients([(2.0 * g, v) for g, v in grads_and_vars])
        return "applied"


MAKERS = {
    "noting": recording_calls(CURRENT),
    "own": Own,
    "older": lambda inner: recording_calls(OLDER)(inner, "dynamic"),
}


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize(
    ("make", "way"),
    # In a graph an answer that is no tensor cannot be returned.
    [
        *((make, "eager") for make in MAKERS),
        ("noting", "graph"),
        *([("own", "stale")] if KERAS == "keras" else []),
    ],
)
def test_every_verb_calls_what_a_subclass_overrides(optimizers, verb, make, way):
    optimizer, variable = MAKERS[make](optimizers.SGD(1.0)), tf.Variable(1.0)
    optimizer.build([variable])

    def run():
        return getattr(optimizer, verb)(lambda: variable * 0.25, [variable])

    if way == "stale":
        # A loss that was scaled and never applied. Warnings are errors.
        optimizer.scale_loss(1.0)
        optimizer.calls.clear()
    returned = (tf.function(run, autograph=False) if way == "graph" else run)()
    assert optimizer.calls == CALLS[verb]
    if "apply_gradients" not in CALLS[verb]:
        np.testing.assert_allclose(tf.nest.flatten(returned)[0], 0.25)
        assert float(variable) == 1.0
        return
    given = returned if verb == "minimize" else returned[0]
    assert given == "applied" if make == "own" else int(given) == 1
    np.testing.assert_allclose(variable.numpy(), 0.5 if make == "own" else 0.75)


class BySeven(CURRENT):
    def get_scaled_loss(self, loss):
        return loss * 7.0

    def get_unscaled_gradients(self, grads):
        return (gradient / 7.0 for gradient in grads)


class OnlyScales(CURRENT):
    def get_scaled_loss(self, loss):
        return loss * self.loss_scale


class OnlyUnscales(CURRENT):
    def get_unscaled_gradients(self, grads):
        return [gradient / self.loss_scale for gradient in grads]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("cls", [BySeven, OnlyScales, OnlyUnscales])
@pytest.mark.parametrize("scale", SCALES)
def test_gradients_of_rewritten_verbs_are_known_to_be_unscaled(optimizers, scale, cls, graph):
    optimizer, variable = cls(optimizers.SGD(0.25)), tf.Variable(1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = getattr(optimizer, scale)(variable**2)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable]))
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))

    # Warnings are errors: it says nothing of a loss that was never scaled.
    run = tf.function(step) if graph else step
    run()
    run()
    assert float(variable) == 0.25


def demanding(base, name):
    """Sets attributes in every order, and takes an argument that no other wrapper has."""

    class Demanding(base):
        count, _rate, momentums = 0, 0.0, None

        def __init__(self, inner, *arguments, demanded):
            self.early = self._early = "first"
            super().__init__(inner, *arguments)
            self.demanded, self.late, self._late = [demanded], "first", "first"

        def apply_gradients(self, grads_and_vars):
            self.rate = float(self.learning_rate)
            return super().apply_gradients(grads_and_vars)

    Demanding.__name__ = Demanding.__qualname__ = name
    return Demanding


Demanding, DemandingOlder = demanding(CURRENT, "Demanding"), demanding(OLDER, "DemandingOlder")


NAMES_OF_A_USER = ("early", "_early", "late", "_late", "count", "_rate", "_only_later")


@pytest.mark.parametrize("cls", [Demanding, DemandingOlder])
def test_a_subclass_sets_attributes_of_its_own_before_and_after_the_constructor(optimizers, cls):
    arguments = [True, 8.0] if cls is Demanding else [experimental.DynamicLossScale(8)]
    optimizer = cls(optimizers.SGD(0.5, momentum=0.5), *arguments, demanded=1)
    weight = tf.Variable(1.0)
    for factor in (1.0, np.inf):
        optimizer.minimize(lambda factor=factor: weight * factor, [weight])
    for name in NAMES_OF_A_USER:
        setattr(optimizer, name, f"{name} now")
    assert optimizer.rate == 0.5
    assert not {"rate", "early"} & {*vars(optimizer.inner_optimizer), *optimizer.get_config()}
    assert [getattr(optimizer, name) for name in NAMES_OF_A_USER] == [
        f"{name} now" for name in NAMES_OF_A_USER
    ]
    assert (optimizer.demanded, float(optimizer._current_scale())) == ([1], 4.0)
