"""Subclasses of ours, and optimizers of one's own inside (see conformance/test_subclasses.py)."""

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
    small_model,
    status,
    step_by_scale_loss,
    variables,
    wrapped,
)
from lossscale import experimental

SGD = keras.optimizers.SGD


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


@pytest.mark.parametrize("name", ["momentun", "learningrate", "clip_norm", "nestrov"])
@pytest.mark.parametrize("make", [wrapped, Counting, CountingExperimental])
def test_a_misspelt_setting_is_no_attribute_of_ones_own(make, name):
    optimizer = make(SGD(momentum=0.5))
    optimizer.tag = "x"
    assert optimizer.tag == "x"
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


def keywords_only(base):
    """A subclass whose constructor takes keywords only, as Horovod makes of any optimizer."""

    class KeywordsOnly(base):
        def __init__(self, **kwargs):
            super(self.__class__, self).__init__(**kwargs)

    return KeywordsOnly


def another_name(base):
    """A subclass that has its own name for the inner optimizer."""

    class AnotherName(base):
        def __init__(self, opt, **kwargs):
            super().__init__(opt, **kwargs)

    return AnotherName


@pytest.mark.parametrize("form", [keywords_only, another_name])
@pytest.mark.parametrize("made", [wrapped, lambda: experimental.LossScaleOptimizer(SGD(1.0), 8.0)])
def test_a_subclass_is_made_by_keywords_if_it_takes_them(form, made):
    optimizer = made()
    cls = form(type(optimizer))
    other = cls.from_config(optimizer.get_config())
    for copied in (other, copy.deepcopy(other)):
        assert type(copied) is cls
        assert copied.initial_scale == optimizer.initial_scale
