"""What is saved comes back exactly, in every format (in a new process: backends/test_files.py)."""

import functools
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
from held_optimizers import holding
from lossscale import DynamicScale, FixedScale

RULE = DynamicScale(initial_scale=2.0**10, growth_interval=4)

INNERS = {
    "adam": lambda: keras.optimizers.Adam(0.02),
    "sgd_ema_accumulation": lambda: keras.optimizers.SGD(
        0.05, momentum=0.9, use_ema=True, gradient_accumulation_steps=2
    ),
    "schedule": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5), clipnorm=0.5
    ),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1), {".*hidden/.*": keras.optimizers.Adam(0.2)}
        )
    ),
}


def maker(name):
    return lambda: wrapped(INNERS[name](), rule=RULE)


def compiled(optimizer):
    """A model that steps eagerly: what is compiled has nothing to do with what is saved."""
    model = small_model()
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def trained(optimizer):
    """Six steps, of which one is skipped."""
    model = compiled(optimizer)
    x, y = data(48)
    x[24:32] = NAN
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert status(optimizer).skipped == 1
    return model


@functools.cache
def trained_around(name):
    """The model of all tests that only save one, with one of the inner optimizers."""
    return trained(maker(name)())


def assert_equal_state(left, right):
    assert status(left) == status(right)
    assert_same(values(left.variables), values(right.variables))


def restored(model, name, form, folder):
    """Returns the optimizer of a model that was saved in a form and loaded."""
    if form == "pickle":
        return pickle.loads(pickle.dumps(model)).optimizer
    if form == "keras":
        model.save(folder / "model.keras")
        return keras.saving.load_model(folder / "model.keras").optimizer
    kind, _, when = form.partition(", ")
    other = compiled(maker(name)())
    if when == "built":
        other.optimizer.build(other.trainable_variables)
    if kind == "weights":
        model.save_weights(folder / "model.weights.h5")
        other.load_weights(folder / "model.weights.h5")
    else:
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "ckpt")
        restoring = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
        other.optimizer.build(other.trainable_variables)
        restoring.assert_existing_objects_matched()
    return other.optimizer


FILES = ["keras", "weights, built", "pickle"]


@pytest.mark.parametrize("form", [*FILES, "checkpoint, built", "checkpoint, unbuilt"])
@pytest.mark.parametrize("name", INNERS)
def test_every_form_restores_everything(name, form, tmp_path):
    model = trained_around(name)
    optimizer = restored(model, name, form, tmp_path)
    assert type(optimizer) is type(model.optimizer)
    assert optimizer.rule == RULE
    assert_equal_state(optimizer, model.optimizer)


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
@pytest.mark.parametrize("name", [name for name in INNERS if name != "several"])
def test_a_checkpoint_of_an_optimizer_without_loss_scaling_is_an_error(tmp_path, name, is_built):
    plain = compiled(maker(name)().inner_optimizer)
    plain.fit(*data(24), batch_size=8, verbose=0)
    path = tf.train.Checkpoint(optimizer=plain.optimizer).save(tmp_path / "ckpt")
    other = compiled(maker(name)())
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


def test_the_counter_of_an_optimizer_without_loss_scaling_is_restored(tmp_path):
    plain, optimizer = keras.optimizers.SGD(), wrapped()
    plain.iterations.assign(3)
    path = tf.train.Checkpoint(step=plain.iterations).save(tmp_path / "ckpt")
    tf.train.Checkpoint(step=optimizer.iterations).restore(path)
    assert status(optimizer).iterations == status(optimizer).applied == 3


@BUILT
@pytest.mark.parametrize("saves", ["wrapped", "Keras' own class"])
@pytest.mark.parametrize("name", ["base", "inner_optimizer", "_optimizer", "dynamic_scale"])
def test_checkpoints_have_the_optimizer_that_an_inner_optimizer_holds(
    tmp_path, name, saves, is_built
):
    first, second = holding(keras, name), holding(keras, name)
    saved = wrapped(first) if saves == "wrapped" else keras.optimizers.LossScaleOptimizer(first)
    saved.build(variables([1.0, 2.0]))
    held = [*first.variables, *getattr(first, name).variables]
    for number, variable in enumerate(held):
        variable.assign(np.full(variable.shape, number + 2))
    path = tf.train.Checkpoint(optimizer=saved).save(tmp_path / "ckpt")
    other = wrapped(second)
    if is_built:
        other.build(variables([0.0, 0.0]))
    tf.train.Checkpoint(optimizer=other).restore(path).expect_partial()
    other.build(variables([0.0, 0.0]))
    restored = [*second.variables, *getattr(second, name).variables]
    assert_same(values(restored), values(held))


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


def test_a_loaded_model_lets_its_optimizer_go():
    model = pickle.loads(pickle.dumps(trained_around("adam")))
    inner = model.optimizer.inner_optimizer
    del model
    gc.collect()
    assert isinstance(wrapped(inner), lossscale.LossScaleOptimizer)
