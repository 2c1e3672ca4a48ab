"""What is saved comes back exactly, in every format (in a new process: backends/test_files.py)."""

import copy
import functools
import gc
import itertools
import pickle

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
        other.optimizer.build(other.trainable_variables)
    else:
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "ckpt")
        restoring = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
        other.optimizer.build(other.trainable_variables)
        restoring.assert_existing_objects_matched()
    return other.optimizer


FILES = ["keras", "weights, built", "weights, unbuilt", "pickle"]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *itertools.product(INNERS, FILES),
        # Keras' MultiOptimizer shows its parts to no checkpoint, with or without loss scaling.
        *itertools.product(
            [name for name in INNERS if name != "several"],
            ["checkpoint, built", "checkpoint, unbuilt"],
        ),
    ],
)
def test_every_form_restores_everything(name, form, tmp_path):
    model = trained_around(name)
    optimizer = restored(model, name, form, tmp_path)
    assert type(optimizer) is type(model.optimizer)
    assert optimizer.rule == RULE
    assert_equal_state(optimizer, model.optimizer)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_what_waits_for_build_is_set_once_though_a_step_builds(in_function):
    optimizer, targets = stepped(STEPS[:3])
    other, start = pickle.loads(pickle.dumps(optimizer)), values(targets)

    def go_on(resumed):
        def step(*gradients):
            step_by_scale_loss(resumed, targets, gradients)

        step = tf.function(step) if in_function else step
        for target, value in zip(targets, start, strict=True):
            target.assign(value)
        for gradients in STEPS[3:]:
            step(*map(tf.constant, gradients))
        return values(targets)

    assert_same(go_on(other), go_on(optimizer))
    assert_equal_state(other, optimizer)


@pytest.mark.parametrize("name", INNERS)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_an_unbuilt_optimizer_is_copied(name, way):
    optimizer = maker(name)()
    optimizer.dynamic_scale.assign(8.0)
    other = way(optimizer)
    assert type(other) is type(optimizer)
    assert other.rule == optimizer.rule
    assert other.name == optimizer.name
    assert other.inner_optimizer is not optimizer.inner_optimizer
    assert_equal_state(other, optimizer)
    other.build(small_model().trainable_variables)
    assert float(other.loss_scale) == 8.0


def stepped(batches):
    """Returns an optimizer that has taken these steps, and its variables."""
    targets = variables([1.0, -1.0])
    optimizer = wrapped(keras.optimizers.Adam(0.1), rule=RULE)
    for gradients in batches:
        step_by_scale_loss(optimizer, targets, gradients)
    return optimizer, targets


STEPS = gradients_for([np.ones(2)], 6)


def test_a_copy_of_a_trained_optimizer_has_its_state_and_a_life_of_its_own():
    optimizer, targets = stepped([*STEPS[:3], spoiled(STEPS[0]), STEPS[3]])
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(optimizer))))
    again.build(targets)
    other = copy.deepcopy(optimizer)
    for each in (again, other):
        assert_equal_state(each, optimizer)
    start, before = values(targets), values(optimizer.variables)
    ends = []
    for each in (other, optimizer):
        assert_same(values(optimizer.variables), before)
        for target, value in zip(targets, start, strict=True):
            target.assign(value)
        step_by_scale_loss(each, targets, STEPS[4])
        ends.append(values(targets))
    assert_same(*ends)
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


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "unbuilt"])
@pytest.mark.parametrize("name", [name for name in INNERS if name != "several"])
def test_a_checkpoint_of_an_optimizer_without_loss_scaling_restores(tmp_path, name, is_built):
    plain = compiled(maker(name)().inner_optimizer)
    plain.fit(*data(24), batch_size=8, verbose=0)
    if name != "schedule":
        plain.optimizer.learning_rate = 0.25
    path = tf.train.Checkpoint(optimizer=plain.optimizer).save(tmp_path / "ckpt")
    other = compiled(maker(name)())
    if is_built:
        # It has skipped and applied steps of its own.
        other.fit(np.full((24, 4), np.inf), np.zeros((24, 1)), batch_size=8, verbose=0)
        other.fit(*data(8), verbose=0)
    tf.train.Checkpoint(optimizer=other.optimizer).restore(path).expect_partial()
    other.optimizer.build(other.trainable_variables)
    inner = other.optimizer.inner_optimizer
    assert len(inner.variables) > 2
    assert_same(values(inner.variables), values(plain.optimizer.variables))
    found = status(other.optimizer)
    assert (found.iterations, found.skipped) == (3, 0)


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "unbuilt"])
@pytest.mark.parametrize(
    "saves", ["wrapped", "plain", "the inner one of a wrapper", "Keras' own class"]
)
@pytest.mark.parametrize("name", ["base", "inner_optimizer", "_optimizer", "dynamic_scale"])
def test_checkpoints_have_the_optimizer_that_an_inner_optimizer_holds(
    tmp_path, name, saves, is_built
):
    first, second = holding(keras, name), holding(keras, name)
    wrap = {"plain": lambda inner: inner, "Keras' own class": keras.optimizers.LossScaleOptimizer}
    saved = wrap.get(saves, wrapped)(first)
    saved.build(variables([1.0, 2.0]))
    held = [*first.variables, *getattr(first, name).variables]
    for number, variable in enumerate(held):
        variable.assign(np.full(variable.shape, number + 2))
    saved = first if saves == "the inner one of a wrapper" else saved
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


def test_export_for_serving_gives_the_predictions_of_the_model(tmp_path):
    model = trained_around("adam")
    x, _ = data(8)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(served.serve(x), model.predict(x, verbose=0), rtol=1e-6)


def test_a_loaded_model_lets_its_optimizer_go():
    model = pickle.loads(pickle.dumps(trained_around("adam")))
    inner = model.optimizer.inner_optimizer
    del model
    gc.collect()
    assert isinstance(wrapped(inner), lossscale.LossScaleOptimizer)
