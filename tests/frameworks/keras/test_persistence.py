"""Checkpoints and pickled models of Keras 3 on TensorFlow.

Each form of file with each optimizer: conformance/test_every_optimizer.py; in a new process:
backends/test_files.py.
"""

import gc
import pickle
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from frameworks.keras.support import (
    NAN,
    assert_same,
    data,
    gradients_for,
    loss_scale_warnings,
    small_model,
    spoiled,
    status,
    step_by_documented_calls,
    step_by_scale_loss,
    taken,
    values,
    variables,
    wrapped,
)
from lossscale import DynamicScale, FixedScale

RULE = DynamicScale(initial_scale=2.0**10, growth_interval=4)


def compiled(optimizer):
    """A model that steps eagerly: what is compiled has nothing to do with what is saved."""
    model = small_model()
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def assert_equal_state(left, right):
    assert status(left) == status(right)
    assert_same(values(left.variables), values(right.variables))


def test_a_pickled_model_has_everything_and_lets_its_optimizer_go():
    model = compiled(wrapped(keras.optimizers.Adam(0.02), rule=RULE))
    x, y = data(24)
    x[:8] = NAN
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert status(model.optimizer).skipped == 1
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.rule == RULE
    assert_equal_state(loaded.optimizer, model.optimizer)
    inner = loaded.optimizer.inner_optimizer
    del loaded
    gc.collect()
    assert isinstance(wrapped(inner), lossscale.LossScaleOptimizer)


STEPS = gradients_for([np.ones(2)], 6)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_a_checkpoint_that_waits_for_build_is_restored_once_though_a_step_builds(
    in_function, tmp_path
):
    def made():
        return wrapped(keras.optimizers.Adam(0.1), rule=RULE), variables([1.0, -1.0])

    optimizer, targets = made()
    for gradients in STEPS[:3]:
        step_by_scale_loss(optimizer, targets, gradients)
    path = tf.train.Checkpoint(optimizer=optimizer, targets=targets).save(tmp_path / "ckpt")
    other, copies = made()
    tf.train.Checkpoint(optimizer=other, targets=copies).restore(path)

    def go_on(resumed, trained):
        def step(*gradients):
            step_by_scale_loss(resumed, trained, gradients)

        step = tf.function(step) if in_function else step
        for gradients in STEPS[3:]:
            step(*map(tf.constant, gradients))
        return values(trained)

    assert_same(go_on(other, copies), go_on(optimizer, targets))
    assert_equal_state(other, optimizer)


@pytest.mark.parametrize("rule", [FixedScale(4.0), FixedScale(4.0, skip_nonfinite=True)])
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_a_fixed_scale_in_the_code_wins_over_the_one_in_a_file(tmp_path, kind, rule):
    model = compiled(wrapped(rule=FixedScale(128.0)))
    model.fit(*data(24), batch_size=8, verbose=0)
    other = compiled(wrapped(rule=rule))
    if kind == "weights":
        model.save_weights(tmp_path / "model.weights.h5")
        with loss_scale_warnings() as messages:
            other.load_weights(tmp_path / "model.weights.h5")
        assert messages == []
    else:
        path = tf.train.Checkpoint(optimizer=model.optimizer).save(tmp_path / "ckpt")
        tf.train.Checkpoint(optimizer=other.optimizer).restore(path)
    other.optimizer.build(other.trainable_variables)
    assert float(other.optimizer.loss_scale) == 4.0
    assert int(other.optimizer.iterations) == 3


BUILT = pytest.mark.parametrize("is_built", [True, False], ids=["built", "unbuilt"])


@BUILT
def test_a_checkpoint_of_an_optimizer_without_loss_scaling_is_an_error(tmp_path, is_built):
    plain = compiled(keras.optimizers.Adam(0.02))
    plain.fit(*data(24), batch_size=8, verbose=0)
    path = tf.train.Checkpoint(optimizer=plain.optimizer).save(tmp_path / "ckpt")
    other = compiled(wrapped(keras.optimizers.Adam(0.02)))
    if is_built:
        other.optimizer.build(other.trainable_variables)
    before = status(other.optimizer), values(other.optimizer.variables)
    line = "tf.train.Checkpoint(optimizer=optimizer.inner_optimizer)"
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        tf.train.Checkpoint(optimizer=other.optimizer).restore(path).expect_partial()
    assert isinstance(error.value, lossscale.LossScaleError)
    assert_same(values(other.optimizer.variables), before[1])
    assert status(other.optimizer) == before[0]
    # What the error says works.
    eval(line, {"tf": tf, "optimizer": other.optimizer}).restore(path).expect_partial()
    other.optimizer.build(other.trainable_variables)
    inner = other.optimizer.inner_optimizer
    assert_same(values(inner.variables), values(plain.optimizer.variables))
    assert (status(other.optimizer).iterations, status(other.optimizer).skipped) == (3, 0)


@BUILT
@pytest.mark.parametrize("made", [keras.optimizers.Adam, keras.optimizers.Nadam])
def test_a_checkpoint_of_keras_own_class_is_restored(tmp_path, made, is_built):
    own = keras.optimizers.LossScaleOptimizer(made(0.1), 2.0**6, 2)
    targets = variables([1.0, -1.0])
    for gradients in STEPS[:3]:
        own.apply(taken(targets, gradients, own.scale_loss), targets)
    path = tf.train.Checkpoint(optimizer=own).save(tmp_path / "ckpt")
    other = wrapped(made(0.1))
    if is_built:
        other.build(targets)
    tf.train.Checkpoint(optimizer=other).restore(path).expect_partial()
    other.build(targets)
    inner, theirs = other.inner_optimizer, own.inner_optimizer
    # Keras' own class does not list Nadam's product, and its model files lack it.
    product = getattr(inner, "_u_product", None)
    listed = [variable for variable in inner.variables if variable is not product]
    assert_same(values(listed), values(theirs.variables))
    if product is not None:
        assert_same(values([product]), values([theirs._u_product]))
    found = status(other)
    assert (found.scale, found.counter, found.skipped, found.iterations) == (2.0**7, 1, 0, 3)


PLACES_OF_A_COUNTER = {
    "alone": lambda optimizer: {"step": optimizer.iterations},
    "before": lambda optimizer: {"a": optimizer.iterations, "optimizer": optimizer},
    "after": lambda optimizer: {"optimizer": optimizer, "step": optimizer.iterations},
    "below": lambda optimizer: {"optimizer": optimizer, "steps": [[[optimizer.iterations]]]},
}


@BUILT
@pytest.mark.parametrize("place", PLACES_OF_A_COUNTER)
def test_a_checkpoint_has_the_step_counter_by_itself(tmp_path, is_built, place):
    optimizer, other = wrapped(keras.optimizers.Adam(0.1)), wrapped(keras.optimizers.Adam(0.1))
    targets = variables([1.0, -1.0])
    for gradients in (*STEPS[:3], spoiled(STEPS[0])):
        step_by_scale_loss(optimizer, targets, gradients)
    children = PLACES_OF_A_COUNTER[place]
    path = tf.train.Checkpoint(**children(optimizer)).save(tmp_path / "ckpt")
    if is_built:
        step_by_scale_loss(other, targets, spoiled(STEPS[0]))
        step_by_scale_loss(other, targets, spoiled(STEPS[0]))
    tf.train.Checkpoint(**children(other)).restore(path)
    other.build(targets)
    assert int(other.iterations) == 4
    assert repr(other.iterations) == repr(optimizer.iterations)
    if place != "alone":
        assert_equal_state(other, optimizer)


def test_a_checkpoint_has_every_field_of_a_rule(tmp_path):
    rule = DynamicScale(8.0, overflows_before_backoff=3)
    targets = variables([1.0])
    optimizer, other = wrapped(rule=rule), wrapped(rule=rule)
    for _ in range(2):
        step_by_documented_calls(optimizer, targets, [np.array([np.inf], "f")])
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "ckpt")
    tf.train.Checkpoint(optimizer=other).restore(path)
    step_by_documented_calls(other, targets, [np.array([np.inf], "f")])
    assert float(other.loss_scale) == 4.0
