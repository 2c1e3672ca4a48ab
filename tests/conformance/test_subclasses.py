"""Verbs that a subclass has written are called by the others, on Keras 3 and on both tf_keras.

What `fit` calls is in tests/backends/test_fit.py, on each backend.
"""

import abc
import functools
import importlib
from typing import Generic, TypeVar

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


@pytest.mark.skipif(KERAS != "keras", reason="scale_loss is of Keras 3")
def test_gradients_that_an_overridden_verb_unscales_are_counted_once(optimizers):
    class Passing(CURRENT):
        def get_unscaled_gradients(self, grads):
            return super().get_unscaled_gradients(grads)

    optimizer = Passing(optimizers.SGD(1.0))
    weights = tf.Variable(1.0), tf.Variable(1.0)
    optimizer.build(weights)
    scaled = optimizer.scale_loss(tf.constant(0.25))
    for weight, given in zip(
        weights, (*optimizer.get_unscaled_gradients([scaled]), scaled), strict=True
    ):
        optimizer.apply_gradients([(given, weight)])
        assert float(weight) == 0.75


NAMES_OF_A_USER = ("early", "_early", "late", "_late", "count", "_rate", "_only_later")


@pytest.mark.parametrize("base", [CURRENT, OLDER])
def test_a_subclass_sets_attributes_of_its_own_before_and_after_the_constructor(optimizers, base):
    class Demanding(base):
        """Takes an argument that no other wrapper has."""

        count, _rate, momentums = 0, 0.0, None

        def __init__(self, inner, *arguments, demanded):
            self.early = self._early = "first"
            super().__init__(inner, *arguments)
            self.demanded, self.late, self._late = [demanded], "first", "first"

        def apply_gradients(self, grads_and_vars):
            self.rate = float(self.learning_rate)
            return super().apply_gradients(grads_and_vars)

    arguments = [True, 8.0] if base is CURRENT else [experimental.DynamicLossScale(8)]
    optimizer = Demanding(optimizers.SGD(0.5, momentum=0.5), *arguments, demanded=1)
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


# --- Forms of constructors and bases -------------------------------------------------------------


def forms(base, optimizers, hooks):
    """What makes an object, in each of the forms of a subclass that programs write."""
    more = ["dynamic"] if base is OLDER else []

    class Registry(abc.ABC):  # noqa: B024 - with a metaclass
        def __init_subclass__(cls, *, tag="none", **kwargs):
            super().__init_subclass__(**kwargs)
            hooks.append((cls.__name__, tag))

    class MakesInner(base):
        def __init__(self, rate=0.5):
            super().__init__(optimizers.SGD(rate), *more)

    class FromConfig(base):
        def __init__(self, settings):
            self.early = settings
            super().__init__(optimizers.SGD.from_config(settings), *more)

    class Second(base):
        def __init__(self, teacher, inner):
            super().__init__(inner, *more)
            self.teacher = teacher

    class Mixed(Registry, base, tag="first"):
        __slots__ = ("slot",)

        def __init__(self, inner):
            self.slot = "set"
            super().__init__(inner, *more)

    class Grandchild(Mixed, tag="second"):
        pass

    class Typed(base, Generic[TypeVar("T")]):
        pass

    class OldSuper(base):
        def __init__(self, inner):
            super(self.__class__, self).__init__(inner, *more)

    teacher, sgd = FAMILIES[[*FAMILIES][-1]].SGD(0.25), functools.partial(optimizers.SGD, 0.5)
    return {
        "makes inner": MakesInner,
        "makes inner with a number": lambda: MakesInner(0.5),
        "configuration": lambda: FromConfig({"learning_rate": 0.5}),
        "second argument": lambda: Second(teacher, sgd()),
        "by keyword": lambda: Second(inner=sgd(), teacher=teacher),
        "ABC, hook, slots": lambda: Mixed(sgd()),
        "grandchild": lambda: Grandchild(sgd()),
        "generic": lambda: Typed[int](sgd(), *more),
        "super of self.__class__": lambda: OldSuper(sgd()),
        "type of an object": lambda: type(Mixed(sgd()))(sgd()),
        "subclass of that": lambda: type("X", (type(Mixed(sgd())),), {})(sgd()),
    }


@pytest.mark.parametrize("base", [CURRENT, OLDER])
def test_a_subclass_in_every_form_belongs_to_the_family_of_its_inner_optimizer(optimizers, base):
    hooks = []
    for form, make in forms(base, optimizers, hooks).items():
        optimizer, weight = make(), tf.Variable(1.0)
        is_of = [isinstance(optimizer, family.Optimizer) for family in FAMILIES.values()]
        assert is_of == [family is optimizers for family in FAMILIES.values()], form
        assert isinstance(optimizer, base), form
        optimizer.minimize(lambda weight=weight: weight * 1.0, [weight])
        assert float(weight) == 0.5, form
        assert optimizer.__class__.__name__ in repr(optimizer), form
    # A hook of the user's sees the classes that are written, once.
    assert hooks == [("Mixed", "first"), ("Grandchild", "second"), ("X", "none")]


@pytest.mark.parametrize("base", [CURRENT, OLDER])
def test_a_subclass_that_never_calls_the_constructor_says_so(base):
    class Empty(base):
        def __init__(self):
            pass

    for use in (repr, lambda it: it.learning_rate, lambda it: it.minimize(lambda: 1.0, [])):
        with pytest.raises(AttributeError, match=r"before super\(\)\.__init__\(optimizer\) is"):
            use(Empty())


@pytest.mark.skipif(KERAS == "keras", reason="which has one family")
@pytest.mark.parametrize("base", [CURRENT, OLDER])
def test_an_object_keeps_its_family(optimizers, base):
    more = ["dynamic"] if base is OLDER else []
    [other] = [family for family in FAMILIES.values() if family is not optimizers]
    optimizer, weight = base(optimizers.SGD(0.5), *more), tf.Variable(1.0)
    before = dict(vars(optimizer))
    with pytest.raises(TypeError, match=r"one family only: .* for another object"):
        optimizer.__init__(other.Adam(), *more)
    with pytest.raises(TypeError, match="must be an optimizer to wrap"):
        optimizer.__init__("adam", *more)
    assert {name: vars(optimizer)[name] for name in before} == before
    optimizer.minimize(lambda: weight * 1.0, [weight])
    assert float(weight) == 0.5


# --- Subclasses of what is wrapped ---------------------------------------------------------------


def knowing_few_arguments(base):
    """A subclass as averaging optimizers were written, whose verbs know few arguments."""

    class KnowingFewArguments(base):
        def apply_gradients(self, grads_and_vars, name=None):
            return super().apply_gradients(grads_and_vars, name)

        def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
            return super()._compute_gradients(loss, var_list, grad_loss, tape)

    return KnowingFewArguments


@pytest.mark.skipif(KERAS == "keras", reason="whose optimizers are called otherwise")
def test_an_inner_optimizer_need_not_know_arguments_that_nobody_gives(optimizers):
    inner, weight = knowing_few_arguments(optimizers.SGD), tf.Variable(1.0)
    optimizer = CURRENT(inner(0.5))
    optimizer.minimize(lambda: weight * 1.0, [weight])
    tf.function(lambda: optimizer.minimize(lambda: weight * 1.0, [weight]))()
    assert float(weight) == 0.0
    model = KERAS_MODULE.Sequential([KERAS_MODULE.Input((1,)), KERAS_MODULE.layers.Dense(1)])
    model.compile(CURRENT(inner(0.5)), "mse", run_eagerly=True)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    assert int(model.optimizer.inner_optimizer.iterations) == 1
    unsummed = {"experimental_aggregate_gradients": False}
    with pytest.raises(ValueError, match=r"apply_gradients\(\) does not take `"):
        optimizer.apply_gradients([(tf.constant(1.0), weight)], **unsummed)
    assert float(weight) == 0.0
