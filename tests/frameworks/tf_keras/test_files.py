"""Checkpoints and model files, ours and those of tf_keras and older releases."""

import copy
import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
from frameworks.tf_keras.support import assert_same, data, small_model, status, values, wrapped

FIXTURES = pathlib.Path(__file__).parents[3] / "lossscale-migration" / "tests" / "fixtures"


def theirs(inner, **arguments):
    """tf_keras' own class."""
    return tf_keras.mixed_precision.LossScaleOptimizer(
        inner, **(arguments or {"initial_scale": 8, "dynamic_growth_steps": 2})
    )


def plain(inner):
    return inner


def names(path):
    return {name for name, _ in tf.train.list_variables(str(path))}


def momentum(optimizers):
    return optimizers.SGD(0.1, momentum=0.9)


KINDS = ["ours", "theirs", "plain"]


@pytest.mark.parametrize("built", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("reader", [wrapped, theirs, plain], ids=KINDS)
@pytest.mark.parametrize("writer", [wrapped, theirs, plain], ids=KINDS)
def test_checkpoints_go_both_ways(optimizers, tmp_path, writer, reader, built):
    variable, other = tf.Variable([1.0]), tf.Variable([5.0])
    written, read = writer(momentum(optimizers)), reader(momentum(optimizers))
    for _ in range(3):
        written.minimize(lambda: variable**2, [variable])
    path = tf.train.Checkpoint(optimizer=written, v=variable).save(tmp_path / "a")
    if built:
        read.minimize(lambda: other**2, [other])
    status = tf.train.Checkpoint(optimizer=read, v=other).restore(path)
    if not built:
        # Where the state is waiting for the first step.
        read.minimize(lambda: other**2, [other])
        written.minimize(lambda: variable**2, [variable])
    if hasattr(written, "loss_scale") or not hasattr(read, "loss_scale"):
        status.assert_existing_objects_matched()
    else:
        status.expect_partial()
    inner = getattr(read, "inner_optimizer", read)
    expected = getattr(written, "inner_optimizer", written)
    assert int(inner.iterations) == int(expected.iterations)
    assert_same(values([other]), values([variable]))
    if hasattr(read, "loss_scale") and hasattr(written, "loss_scale"):
        assert float(read.loss_scale) == float(written.loss_scale)
        assert int(read.dynamic_counter) == int(written.dynamic_counter)


def test_an_optimizer_that_was_saved_before_it_was_wrapped_saves_its_scale(tmp_path):
    inner, variable = tf_keras.optimizers.SGD(0.1), tf.Variable([1.0])
    inner.minimize(lambda: variable**2, [variable])
    tf.train.Checkpoint(optimizer=inner).save(tmp_path / "plain")
    path = tf.train.Checkpoint(optimizer=wrapped(inner)).save(tmp_path / "wrapped")
    assert any("current_loss_scale" in name for name in names(path))


RELEASES = {
    "legacy": ("2.4.4_new", "2.15.1_legacy", "2.21.0_legacy"),
    "new": ("2.15.1_v3", "2.21.0_v3"),
}


@pytest.mark.parametrize("built", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("family", "release"), [(family, each) for family in RELEASES for each in RELEASES[family]]
)
def test_checkpoints_since_2_4_restore(release, family, built):
    optimizers = tf_keras.optimizers if family == "new" else tf_keras.optimizers.legacy
    variable = tf.Variable([0.0])
    optimizer = wrapped(optimizers.SGD(0.7, momentum=0.9))
    if built:
        optimizer.build([variable])
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, v=variable)
    restored = checkpoint.restore(str(FIXTURES / "ck" / f"{release}-1"))
    if not built:
        optimizer.build([variable])
    restored.assert_existing_objects_matched()
    assert status(optimizer)[:2] == (8.0, 1)
    assert status(optimizer).iterations == status(optimizer).applied == 1
    np.testing.assert_allclose(float(optimizer.learning_rate), 0.1)
    np.testing.assert_allclose(optimizer.get_slot(variable, "momentum").numpy(), [-0.2])


@pytest.mark.parametrize("release", ["2.0.4_exp", "2.2.3_exp"])
def test_a_checkpoint_of_2_0_to_2_2_is_refused_with_what_restores_it(optimizers, release):
    optimizer = wrapped(optimizers.SGD(0.7, momentum=0.9))
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, v=tf.Variable([0.0]))
    with pytest.raises(
        lossscale.errors.UnsupportedError, match=r"lossscale_migration\.restore_checkpoint"
    ):
        checkpoint.restore(str(FIXTURES / "ck" / f"{release}-1"))


def compiled(optimizer):
    """A model that steps eagerly: what is compiled has nothing to do with what is saved."""
    model = small_model()
    model.compile(optimizer, loss="mse", run_eagerly=True)
    return model


@functools.cache
def fitted(optimizers):
    """A fitted model, which one test after the other reads."""
    model = compiled(wrapped(optimizers.Adam(0.01)))
    x, y = data(24)
    x[8:16] = np.inf
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


def restored(model, form, optimizers, path):
    """Returns an optimizer with the state of one that was saved in a form of TensorFlow."""
    if form == "saved model":
        model.save(path, save_format="tf")
        loaded = tf_keras.models.load_model(path)
        loaded.optimizer.build(loaded.trainable_variables)
        variables = tf.train.Checkpoint(optimizer=loaded.optimizer)
        variables.restore(str(path / "variables" / "variables")).expect_partial()
        return loaded.optimizer
    other = compiled(wrapped(optimizers.Adam(0.01)))
    model.save_weights(path, save_format="tf")
    other.load_weights(path).expect_partial()
    return other.optimizer


# Checkpoints: conformance/test_every_optimizer.py.
@pytest.mark.parametrize("form", ["saved model", "weights"])
def test_every_form_of_tensorflow_has_the_scale_and_the_counters(optimizers, tmp_path, form):
    model = fitted(optimizers)
    assert int(model.optimizer.steps_skipped) == 1
    optimizer = restored(model, form, optimizers, tmp_path / "a")
    assert type(optimizer) is type(model.optimizer)
    assert status(optimizer) == status(model.optimizer)


SGD = {"class_name": "SGD", "config": {"name": "SGD", "decay": 0.0}}
DYNAMIC = {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 4.0}
FIXED = {"dynamic": False, "initial_scale": 4.0, "dynamic_growth_steps": None}


LOSS_SCALE = {"class_name": "DynamicLossScale", "config": DYNAMIC}


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (
            {"optimizer": SGD, "loss_scale": LOSS_SCALE},
            lossscale.DynamicScale(8.0, 3, growth_factor=4.0, backoff_factor=0.25, min_scale=1.0),
        ),
        ({"inner_optimizer": SGD, **FIXED}, lossscale.FixedScale(4.0)),
    ],
    ids=["2.0", "2.4"],
)
def test_configurations_of_older_releases_are_read(config, rule):
    before = copy.deepcopy(config)
    optimizer = lossscale.LossScaleOptimizer.from_config(config)
    assert isinstance(optimizer.inner_optimizer, tf_keras.optimizers.legacy.SGD)
    assert optimizer.rule == rule
    assert config == before


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("form", ["late.h5", "saved_model", "late.keras"])
def test_a_class_that_is_registered_after_its_first_object_is_found(optimizers, tmp_path, form):
    class Late(lossscale.tf_keras.LossScaleOptimizer):
        pass

    model = small_model()
    model.compile(Late(momentum(optimizers), initial_scale=8), "mse")
    # Under another name in each case, so that none finds the class of another.
    tf_keras.saving.register_keras_serializable(form, optimizers.__name__)(Late)
    model.fit(*data(), verbose=0)
    model.save(tmp_path / form)
    loaded = tf_keras.models.load_model(tmp_path / form).optimizer
    assert loaded.__class__ is Late
    assert isinstance(loaded, optimizers.Optimizer)
    assert float(loaded.loss_scale) == float(model.optimizer.loss_scale)


def test_the_learning_rate_of_old_programs_is_that_of_the_schedule():
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(schedule))
    assert float(optimizer._decayed_lr(tf.float32)) == 0.5
    assert optimizer._get_hyper("learning_rate") is schedule
