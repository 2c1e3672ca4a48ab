"""Files of older releases and of late classes; all others: conformance/test_keras_files.py."""

import copy
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
from kerases import data, status
from tensorflow_steps import wrapped

FIXTURES = pathlib.Path(__file__).parents[3] / "lossscale-migration" / "tests" / "fixtures"


def test_an_optimizer_that_was_saved_before_it_was_wrapped_saves_its_scale(tmp_path):
    inner, variable = tf_keras.optimizers.SGD(0.1), tf.Variable([1.0])
    inner.minimize(lambda: variable**2, [variable])
    tf.train.Checkpoint(optimizer=inner).save(tmp_path / "plain")
    path = tf.train.Checkpoint(optimizer=wrapped(inner)).save(tmp_path / "wrapped")
    assert any("current_loss_scale" in name for name, _ in tf.train.list_variables(path))


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

    model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(1)])
    model.compile(Late(optimizers.SGD(0.1, momentum=0.9), initial_scale=8), "mse")
    # Under another name in each case, so that none finds the class of another.
    tf_keras.saving.register_keras_serializable(form, optimizers.__name__)(Late)
    model.fit(*data(), verbose=0)
    model.save(tmp_path / form)
    loaded = tf_keras.models.load_model(tmp_path / form).optimizer
    assert loaded.__class__ is Late
    assert isinstance(loaded, optimizers.Optimizer)
    assert float(loaded.loss_scale) == float(model.optimizer.loss_scale)
