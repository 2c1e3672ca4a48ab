"""What is saved comes back exactly, in every format, in this process and in a new one."""

import copy
import functools
import gc
import pathlib
import pickle
import tempfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from frameworks.keras.support import (
    INF,
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
from fresh import Program
from lossscale import DynamicScale, FixedScale, LossScaleWarning

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


@pytest.fixture(params=INNERS)
def name(request):
    return request.param


def compiled(optimizer):
    """A model that steps eagerly: what is compiled has nothing to do with what is saved."""
    model = small_model()
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def batches_with_overflows(steps):
    """Inputs and targets of `steps` batches of 8; those of steps 3 and 12 are not finite."""
    x, y = data(8 * steps)
    x[24:32] = NAN
    x[96:104] = INF
    return x, y


def trained(optimizer, steps=6):
    model = compiled(optimizer)
    x, y = batches_with_overflows(steps)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert status(optimizer)["skipped"] == 1
    return model


@functools.cache
def trained_around(name):
    """The model of all tests that only save one, with one of the inner optimizers."""
    return trained(maker(name)())


def assert_equal_state(left, right):
    assert status(left) == status(right)
    assert_same(values(left.variables), values(right.variables))


# --- Every format, in this process ----------------------------------------------------------------


def test_keras_file_restores_everything(name, tmp_path):
    model = trained_around(name)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.rule == RULE
    assert_equal_state(loaded.optimizer, model.optimizer)


@pytest.mark.parametrize("when", ["built", "unbuilt"])
def test_weights_file_restores_everything(name, when, tmp_path):
    model = trained_around(name)
    model.save_weights(tmp_path / "model.weights.h5")
    other = compiled(maker(name)())
    if when == "built":
        other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    other.optimizer.build(other.trainable_variables)
    assert_equal_state(other.optimizer, model.optimizer)


@pytest.mark.parametrize("when", ["built", "unbuilt"])
# Keras' MultiOptimizer shows its parts to no checkpoint, with or without loss scaling.
@pytest.mark.parametrize("name", [name for name in INNERS if name != "several"])
def test_checkpoint_restores_everything(name, when, tmp_path):
    model = trained_around(name)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "ckpt")
    other = compiled(maker(name)())
    if when == "built":
        other.optimizer.build(other.trainable_variables)
    restoring = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    other.optimizer.build(other.trainable_variables)
    restoring.assert_existing_objects_matched()
    assert_equal_state(other.optimizer, model.optimizer)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_what_waits_for_build_is_set_once_though_a_step_builds(in_function):
    targets = variables([1.0, -1.0])
    optimizer = wrapped(keras.optimizers.Adam(0.1), rule=RULE)
    steps = gradients_for(targets, 6)
    for gradients in steps[:3]:
        step_by_scale_loss(optimizer, targets, gradients)
    other, start = pickle.loads(pickle.dumps(optimizer)), values(targets)

    def go_on(resumed):
        def step(*gradients):
            step_by_scale_loss(resumed, targets, gradients)

        step = tf.function(step) if in_function else step
        for target, value in zip(targets, start, strict=True):
            target.assign(value)
        for gradients in steps[3:]:
            step(*map(tf.constant, gradients))
        return values(targets)

    assert_same(go_on(other), go_on(optimizer))
    assert_equal_state(other, optimizer)


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


def test_deepcopy_of_a_trained_optimizer_has_its_state_and_a_life_of_its_own():
    targets = variables([1.0, -1.0])
    optimizer = wrapped(keras.optimizers.Adam(0.1), rule=RULE)
    steps = gradients_for(targets, 6)
    for gradients in (*steps[:3], spoiled(steps[0]), steps[3]):
        step_by_scale_loss(optimizer, targets, gradients)
    other = copy.deepcopy(optimizer)
    assert_equal_state(other, optimizer)

    start, before = values(targets), values(optimizer.variables)
    step_by_scale_loss(other, targets, steps[4])
    moved = values(targets)
    assert_same(values(optimizer.variables), before)
    for target, value in zip(targets, start, strict=True):
        target.assign(value)
    step_by_scale_loss(optimizer, targets, steps[4])
    assert_same(values(targets), moved)
    assert_equal_state(other, optimizer)


def test_pickle_of_a_trained_optimizer_has_its_state_once_it_is_built():
    targets = variables([1.0, -1.0])
    optimizer = wrapped(keras.optimizers.Adam(0.1), rule=RULE)
    steps = gradients_for(targets, 5)
    for gradients in (*steps, spoiled(steps[0])):
        step_by_scale_loss(optimizer, targets, gradients)
    other = pickle.loads(pickle.dumps(optimizer))
    assert float(other.loss_scale) == float(optimizer.loss_scale)
    other.build(targets)
    assert_equal_state(other, optimizer)


def test_pickle_of_a_compiled_model_has_the_optimizer_and_its_state(name):
    model = trained_around(name)
    other = pickle.loads(pickle.dumps(model))
    assert_equal_state(other.optimizer, model.optimizer)


def test_copies_of_copies_of_an_unbuilt_loaded_optimizer_keep_what_waits_for_build():
    targets = variables([1.0, -1.0])
    optimizer = wrapped(keras.optimizers.Adam(0.1), rule=RULE)
    for gradients in gradients_for(targets, 3):
        step_by_scale_loss(optimizer, targets, gradients)
    other = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(optimizer))))
    other.build(targets)
    assert_equal_state(other, optimizer)


@pytest.mark.parametrize("name", [None, "mine"])
def test_the_state_of_a_set_of_weights_goes_through_get_and_set(name):
    source = trained(wrapped(keras.optimizers.Adam(0.02), name=name)).optimizer
    target = compiled(wrapped(keras.optimizers.Adam(0.02))).optimizer
    target.build(source._trainable_variables)
    target.set_weights(source.get_weights())
    assert_same(values(target.weights), values(source.weights))
    assert status(target)["applied"] == status(source)["applied"]


# --- A new process goes on where this one stopped -------------------------------------------------


CONTINUE = """
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

from frameworks.keras.support import status, values
from frameworks.keras.test_persistence import batches_with_overflows, compiled, continued

warnings.simplefilter("error", UserWarning)
folder = sys.argv[1]
x, y = batches_with_overflows(20)
for kind in sys.argv[2:]:
    if kind == "keras":
        model = keras.saving.load_model(f"{folder}/model.keras")
    else:
        model = compiled(continued())
        if kind == "weights":
            model.load_weights(f"{folder}/model.weights.h5")
        else:
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            checkpoint.restore(f"{folder}/ckpt-1")
    model.fit(x[80:], y[80:], batch_size=8, shuffle=False, verbose=0)
    numbers = values([*model.trainable_variables, *model.optimizer.variables])
    np.savez(f"{folder}/{kind}.npz", *numbers)
"""
KINDS = ["keras", "weights", "checkpoint"]


def continued():
    return wrapped(keras.optimizers.Adam(0.02), rule=DynamicScale(growth_interval=4))


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half_trained")
    model = compiled(continued())
    x, y = batches_with_overflows(20)
    model.fit(x[:80], y[:80], batch_size=8, shuffle=False, verbose=0)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "ckpt")
    return folder


@pytest.fixture(scope="module")
def continued_in_a_new_process(half_trained):
    done = Program(CONTINUE, half_trained, *KINDS).finished()
    assert done.returncode == 0, done.stderr[-4000:]
    return half_trained


@pytest.fixture(scope="module")
def trained_at_once():
    model = compiled(continued())
    x, y = batches_with_overflows(20)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_and_ten_in_a_new_process_equal_twenty(
    continued_in_a_new_process, trained_at_once, kind
):
    with np.load(continued_in_a_new_process / f"{kind}.npz") as file:
        found = [file[f"arr_{i}"] for i in range(len(file.files))]
    model = trained_at_once
    assert_same(found, values([*model.trainable_variables, *model.optimizer.variables]))
    assert status(model.optimizer) == {
        "scale": 2.0**16,
        "counter": 3,
        "skipped": 2,
        "last": False,
        "iterations": 20,
        "applied": 18,
    }


# --- What a file may not do -----------------------------------------------------------------------


@functools.cache
def _saved():
    """A trained model's weights, as the bytes of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.weights.h5")
        trained_around("adam").save_weights(path)
        return path.read_bytes()


def saved_with_scale(path, scale):
    """Writes the weights of a trained model, with another scale in the file."""
    path.write_bytes(_saved())
    places = []
    with h5py.File(path, "r+") as file:
        file.visit(lambda name: places.append(name) if name.endswith("dynamic_scale") else None)
        (place,) = places
        file[place][()] = scale


@pytest.mark.parametrize(
    ("saved", "expected"),
    [(INF, 2.0**15), (NAN, 2.0**15), (0.0, 2.0**15), (-8.0, 2.0**15), (2.0**127, 2.0**126)],
)
def test_a_saved_scale_that_is_no_scale_is_replaced_with_a_warning(tmp_path, saved, expected):
    path = tmp_path / "model.weights.h5"
    saved_with_scale(path, saved)
    model = compiled(wrapped(keras.optimizers.Adam(0.02)))
    with pytest.warns(LossScaleWarning, match="saved loss scale"):
        model.load_weights(path)
    assert float(model.optimizer.loss_scale) == expected
    model.fit(*data(16), batch_size=8, verbose=0)
    assert all(np.isfinite(w).all() for w in values(model.trainable_variables))


def test_a_saved_scale_outside_the_limits_of_the_code_is_brought_inside_with_a_warning(tmp_path):
    path = tmp_path / "model.weights.h5"
    saved_with_scale(path, 2.0**20)
    model = compiled(wrapped(keras.optimizers.Adam(0.02), rule=DynamicScale(max_scale=2.0**16)))
    with pytest.warns(LossScaleWarning, match="1048576"):
        model.load_weights(path)
    assert float(model.optimizer.loss_scale) == 2.0**16


@pytest.mark.parametrize("rule", [FixedScale(4.0), FixedScale(4.0, skip_nonfinite=True)])
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_a_fixed_scale_in_the_code_wins_over_the_one_in_a_file(tmp_path, kind, rule):
    model = trained_with_fixed_scale(FixedScale(128.0))
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
    targets = variables([1.0])
    fresh = wrapped(rule=rule)
    step_by_documented_calls(fresh, targets, [np.array([0.5], "f")])
    assert targets[0].numpy().tolist() == [0.5]


def trained_with_fixed_scale(rule):
    model = compiled(wrapped(rule=rule))
    model.fit(*data(24), batch_size=8, verbose=0)
    return model


def test_a_shorter_interval_on_resume_takes_effect(tmp_path):
    path = tmp_path / "model.weights.h5"
    trained(wrapped(keras.optimizers.Adam(0.02))).save_weights(path)
    model = compiled(wrapped(keras.optimizers.Adam(0.02), dynamic_growth_steps=1))
    model.load_weights(path)
    assert (status(model.optimizer)["scale"], status(model.optimizer)["counter"]) == (2.0**14, 2)
    model.fit(*data(8), batch_size=8, verbose=0)
    assert (status(model.optimizer)["scale"], status(model.optimizer)["counter"]) == (2.0**15, 0)


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
