"""Subclasses of ours, and optimizers of one's own inside of it: what they override is called."""

import copy
import itertools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from frameworks.keras.support import (
    INF,
    STEPS,
    loss_scale_warnings,
    small_model,
    status,
    step_by_scale_loss,
    variables,
    wrapped,
)
from lossscale import experimental

SGD = keras.optimizers.SGD


# --- What a subclass overrides --------------------------------------------------------------------


class Noting(lossscale.keras.LossScaleOptimizer):
    """Notes which of its methods are called."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)


def noting(verb):
    def noted(self, *args):
        self.calls.append(verb)
        return getattr(super(Noting, self), verb)(*args)

    return noted


for name in ("get_scaled_loss", "get_unscaled_gradients", "get_gradients", "apply_gradients"):
    setattr(Noting, name, noting(name))


class Own(Noting):
    """Does all by itself: another scale, and an answer of its own."""

    def get_scaled_loss(self, loss):
        self.calls.append("get_scaled_loss")
        return lambda: loss() * 7.0

    def get_unscaled_gradients(self, grads):
        self.calls.append("get_unscaled_gradients")
        return [g / 7.0 for g in grads]

    def apply_gradients(self, grads_and_vars):
        super().apply_gradients([(2.0 * g, v) for g, v in grads_and_vars])
        return "applied"


HALVES = ["get_scaled_loss", "get_unscaled_gradients"]
CALLS = {
    "minimize": [*HALVES, "apply_gradients"],
    "get_gradients": ["get_gradients", *HALVES],
    "get_updates": ["get_gradients", *HALVES, "apply_gradients"],
}


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("cls", [Noting, Own])
@pytest.mark.parametrize("verb", CALLS)
def test_every_verb_calls_what_a_subclass_overrides(verb, cls, stale):
    optimizer, weight = cls(keras.optimizers.SGD(1.0)), keras.Variable([1.0])
    with loss_scale_warnings() as messages:
        if stale:
            optimizer.scale_loss(1.0)
            optimizer.calls.clear()
        returned = getattr(optimizer, verb)(lambda: tf.reduce_sum(weight.value * 0.25), [weight])
    assert optimizer.calls == CALLS[verb]
    factor = 2.0 if cls is Own else 1.0
    if verb == "get_gradients":
        np.testing.assert_allclose(returned[0].numpy(), [0.25])
    else:
        np.testing.assert_allclose(weight.numpy(), [1.0 - 0.25 * factor])
        given = returned if verb == "minimize" else returned[0]
        assert given == "applied" if cls is Own else int(given) == 1
    assert messages == []


class BySeven(lossscale.keras.LossScaleOptimizer):
    def get_scaled_loss(self, loss):
        return loss * 7.0

    def get_unscaled_gradients(self, grads):
        return (gradient / 7.0 for gradient in grads)


class OnlyScales(lossscale.keras.LossScaleOptimizer):
    def get_scaled_loss(self, loss):
        return loss * self.loss_scale


class OnlyUnscales(lossscale.keras.LossScaleOptimizer):
    def get_unscaled_gradients(self, grads):
        return [gradient / self.loss_scale for gradient in grads]


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("cls", [BySeven, OnlyScales, OnlyUnscales])
@pytest.mark.parametrize("scale", ["get_scaled_loss", "scale_loss"])
def test_gradients_of_rewritten_verbs_are_known_to_be_unscaled(scale, cls, mode):
    optimizer, weight = cls(SGD(0.25)), keras.Variable([1.0])

    def step():
        with tf.GradientTape() as tape:
            loss = getattr(optimizer, scale)(tf.reduce_sum(weight.value**2))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight.value]))
        optimizer.apply_gradients(zip(gradients, [weight], strict=True))

    run = step if mode == "eager" else tf.function(step)
    with loss_scale_warnings() as messages:
        run()
        run()
    assert weight.numpy() == 0.25
    assert messages == []


# --- What an optimizer inside overrides -----------------------------------------------------------


class Halving(SGD):
    """Applies half of each gradient."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * g, v) for g, v in grads_and_vars])


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        *itertools.product(["eager", "function"], ["documented", "scale_loss", "minimize"]),
        ("xla", "scale_loss"),
    ],
)
def test_apply_gradients_of_the_inner_optimizer_is_called_on_a_step_that_is_applied(how, mode):
    (weight,) = variables([1.0])
    optimizer = wrapped(Halving(0.5))

    def step(gradient):
        STEPS[how](optimizer, [weight], [gradient])

    run = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    for gradient, expected in ((1.0, 0.75), (INF, 0.75), (1.0, 0.5)):
        run(tf.constant([gradient]))
        assert weight.numpy() == expected
    assert status(optimizer).applied == 2


# --- Attributes of one's own, and files ----------------------------------------------------------


class Counting(lossscale.keras.LossScaleOptimizer):
    """Has attributes of its own, set before and after the constructor it inherits."""

    momentums = None

    def __init__(self, *args, **kwargs):
        self.early, self._hidden = "early", "hidden"
        super().__init__(*args, **kwargs)
        self.calls, self.seen, self.learning_rates = 0, [], []

    def apply_gradients(self, grads_and_vars):
        self.calls += 1
        self.seen.append(self.calls)
        self.learning_rates.append(float(self.learning_rate))
        return super().apply_gradients(grads_and_vars)


class CountingExperimental(experimental.keras.LossScaleOptimizer):
    """The same over the older class."""

    def __init__(self, optimizer):
        super().__init__(optimizer, "dynamic")
        self.calls = 0


def test_a_subclass_has_attributes_of_its_own():
    targets, optimizer = variables([0.0]), Counting(SGD(0.5))
    for gradient in (1.0, INF):
        step_by_scale_loss(optimizer, targets, [np.array([gradient], "f")])
    optimizer.tag = "x"
    copies = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    for each in (optimizer, *copies):
        assert (each.calls, list(each.seen), list(each.learning_rates)) == (2, [1, 2], [0.5, 0.5])
        assert (each.early, each._hidden, each.tag) == ("early", "hidden", "x")
        assert "calls" not in vars(each.inner_optimizer)
    # A name close to a setting's can be had by giving it a default in the class.
    optimizer.momentums = copies[0].calls = 7
    assert optimizer.calls == 2
    assert optimizer.get_config().keys() == wrapped().get_config().keys()


@pytest.mark.parametrize("make", [wrapped, lambda: CountingExperimental(SGD())])
def test_an_instance_has_them_too(make):
    optimizer = make()
    optimizer.tag = "x"
    assert optimizer.tag == "x"
    with pytest.raises(AttributeError, match="SGD, has an attribute 'tags'"):
        _ = optimizer.tags


@pytest.mark.parametrize("name", ["momentun", "learningrate", "clip_norm", "nestrov"])
@pytest.mark.parametrize("make", [wrapped, Counting])
def test_a_misspelt_setting_is_no_attribute_of_ones_own(make, name):
    optimizer = make(SGD(momentum=0.5))
    before = dict(vars(optimizer)), dict(vars(optimizer.inner_optimizer))
    with pytest.raises(AttributeError, match="Did you mean"):
        setattr(optimizer, name, 0.25)
    with pytest.raises(AttributeError, match=f"SGD, has an attribute '{name}'"):
        getattr(optimizer, name)
    assert (vars(optimizer), vars(optimizer.inner_optimizer)) == before


@keras.saving.register_keras_serializable(package="subclasses_test")
class Registered(lossscale.keras.LossScaleOptimizer):
    """A subclass that names no framework."""

    def apply_gradients(self, grads_and_vars, **kwargs):
        self.__dict__.setdefault("calls", []).append(len(grads_and_vars := list(grads_and_vars)))
        return super().apply_gradients(grads_and_vars, **kwargs)


def test_a_subclass_trains_in_fit_and_is_loaded_as_itself(tmp_path):
    model = small_model()
    model.compile(Registered(SGD(0.1), initial_scale=8.0), "mse", jit_compile=False)
    model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.optimizer.calls == [4]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert isinstance(loaded, Registered)
    assert status(loaded) == status(model.optimizer)
