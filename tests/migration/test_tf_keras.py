"""The same files, restored into ours on tf_keras, around optimizers of both families."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
from lossscale import experimental
from lossscale.migration import restore_checkpoint
from migration import support
from migration.support import ONLY_NEW, OPTIMIZERS, SAVED_SETTINGS
from migration.test_checkpoints import (
    ALL,
    DYNAMIC,
    FIXED,
    path_id,
    trained_model,
    witnessed,
)

FAMILIES = {"legacy": tf_keras.optimizers.legacy, "new": tf_keras.optimizers}


def tf_keras_sgd(family, **arguments):
    inner = FAMILIES[family].SGD(0.5, momentum=0.25)
    return lossscale.LossScaleOptimizer(inner, **arguments)


@pytest.mark.parametrize(
    "optimizers", [tf_keras.optimizers, tf_keras.optimizers.legacy, keras.optimizers]
)
def test_beside_keras_3_each_optimizer_gets_its_own_class(optimizers):
    assert tf.keras.optimizers.SGD is keras.optimizers.SGD
    made = lossscale.LossScaleOptimizer(optimizers.SGD(0.25))
    assert isinstance(made, optimizers.Optimizer)
    assert type(lossscale.LossScaleOptimizer.from_config(made.get_config())) is type(made)
    scale = experimental.DynamicLossScale(8.0)
    assert float(scale()) == 8.0
    variable = tf.Variable(1.0)
    older = experimental.LossScaleOptimizer(optimizers.SGD(0.25), scale)
    older.minimize(lambda: variable**2, [variable])
    assert float(variable) == 0.5


def momentum_of(optimizer, variable):
    return optimizer.get_slot(variable, "momentum").numpy()


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", DYNAMIC, ids=path_id)
def test_a_real_file_restores_everything(path, family, built):
    v = tf.Variable([5.0], name="v")
    optimizer = tf_keras_sgd(family, initial_scale=4.0, dynamic_growth_steps=2)
    if built:
        optimizer.minimize(lambda: v * 0.0, [v])
    restored = restore_checkpoint(path, optimizer=optimizer, v=v)
    assert (restored.variables, restored.slots, restored.left) == (1, 1, ())
    np.testing.assert_allclose(v.numpy(), [0.8])
    np.testing.assert_allclose(momentum_of(optimizer, v), [-0.2])
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == 1
    assert int(optimizer.steps_skipped) == 0
    assert float(optimizer.loss_scale) == 8.0
    assert int(optimizer.dynamic_counter) == 1
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    momentum = 0.25 if "v3" in path.name else 0.9
    assert float(optimizer.inner_optimizer.momentum) == pytest.approx(momentum)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", FIXED, ids=path_id)
def test_a_fixed_scale_stays(path, family):
    v = tf.Variable([5.0], name="v")
    optimizer = tf_keras_sgd(family, dynamic=False, initial_scale=32.0)
    restore_checkpoint(path, optimizer=optimizer, v=v)
    np.testing.assert_allclose(momentum_of(optimizer, v), [-0.2])
    assert float(optimizer.loss_scale) == 32.0


SAME_FAMILY = [(p, "new" if "v3" in p.name else "legacy") for p in DYNAMIC]


@pytest.mark.parametrize(("path", "family"), SAME_FAMILY, ids=lambda p: getattr(p, "name", p))
def test_tensorflow_itself_restores_it_into_ours(path, family):
    v = tf.Variable([5.0], name="v")
    optimizer = tf_keras_sgd(family, initial_scale=4.0)
    status = tf.train.Checkpoint(optimizer=optimizer, v=v).restore(str(path)[: -len(".index")])
    optimizer.minimize(lambda: v * 0.0, [v])
    # The momentum of the file moved the variable once more.
    momentum = 0.25 if family == "new" else 0.9
    np.testing.assert_allclose(v.numpy(), [0.8 - 0.2 * momentum], rtol=1e-6)
    assert int(optimizer.iterations) == 2
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    assert float(optimizer.loss_scale) == 8.0
    assert int(optimizer.dynamic_counter) == 2
    status.assert_existing_objects_matched()


def test_a_slot_is_made_that_the_settings_of_ours_do_not_ask_for():
    v = tf.Variable([5.0], name="v")
    optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.5))
    restore_checkpoint(DYNAMIC[0], optimizer=optimizer, v=v)
    np.testing.assert_allclose(momentum_of(optimizer, v), [-0.2])


@pytest.mark.parametrize(
    ("family", "case", "target"),
    [
        (family, case, target)
        for target in FAMILIES
        for family, case in ALL
        if target == "new" or case not in ONLY_NEW
    ],
)
def test_training_goes_on(family, case, target):
    theirs = witnessed(family, case)
    name, arguments = {**OPTIMIZERS, **ONLY_NEW}[case]
    if family == "legacy":
        arguments = {k: 0.3 if k in SAVED_SETTINGS else v for k, v in arguments.items()}
    inner = getattr(FAMILIES[target], name)(learning_rate=0.9, **arguments)
    optimizer = lossscale.LossScaleOptimizer(inner, initial_scale=2.0, dynamic_growth_steps=3)
    mine = [tf.Variable(tf.zeros((2, 2)), name=name) for name in theirs.names]
    restore_checkpoint(theirs.path, optimizer=optimizer, w=mine[0], u=mine[1])
    support.train(optimizer, mine, 4, start=4)
    np.testing.assert_allclose(support.values(mine), theirs.later, rtol=2e-4, atol=2e-6)
    assert float(optimizer.loss_scale) == theirs.later_scale
    assert int(optimizer.iterations) == 8


def test_a_legacy_nadam_goes_on(tmp_path):
    witness = support.WITNESS(tf_keras.optimizers.legacy.Nadam(0.05))
    theirs = support.tf_variables()
    support.train(witness, theirs, 4)
    path = tf.train.Checkpoint(optimizer=witness, v=theirs).save(str(tmp_path / "ck"))
    optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.Nadam(0.5))
    mine = [tf.Variable(tf.zeros_like(v)) for v in theirs]
    restore_checkpoint(path, optimizer=optimizer, v=mine)
    for each, variables in ((witness, theirs), (optimizer, mine)):
        support.train(each, variables, 4, start=4)
    np.testing.assert_allclose(support.values(mine), support.values(theirs), rtol=1e-5)


def test_a_new_nadam_goes_on_as_a_legacy_one(tmp_path):
    witness = support.WITNESS(tf_keras.optimizers.Nadam(0.05))
    theirs = support.tf_variables()
    support.train(witness, theirs, 4)
    path = tf.train.Checkpoint(optimizer=witness, w=theirs[0], u=theirs[1])
    path = path.save(str(tmp_path / "ck"))
    optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.Nadam(0.5))
    mine = [tf.Variable(tf.zeros_like(v), name=v.name[:-2]) for v in theirs]
    restore_checkpoint(path, optimizer=optimizer, w=mine[0], u=mine[1])
    for each, variables in ((witness, theirs), (optimizer, mine)):
        support.train(each, variables, 4, start=4)
    np.testing.assert_allclose(support.values(mine), support.values(theirs), rtol=1e-5)


@pytest.mark.parametrize("target", FAMILIES)
def test_decay_goes_on(target, tmp_path):
    witness = support.WITNESS(tf_keras.optimizers.legacy.SGD(0.5, momentum=0.5, decay=0.25))
    theirs = support.tf_variables()
    support.train(witness, theirs, 3)
    path = tf.train.Checkpoint(optimizer=witness, v=theirs).save(str(tmp_path / "ck"))
    inner = FAMILIES[target].SGD(0.9, momentum=0.5)
    optimizer, mine = lossscale.LossScaleOptimizer(inner), [tf.Variable(v * 0.0) for v in theirs]
    restore_checkpoint(path, optimizer=optimizer, v=mine)
    for each, variables in ((witness, theirs), (optimizer, mine)):
        support.train(each, variables, 3, start=3)
    np.testing.assert_allclose(support.values(mine), support.values(theirs), rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_ours_keeps_its_skips(family, tmp_path):
    (w, u), saved = support.tf_variables(), tf_keras_sgd(family)
    support.train(saved, [w, u], 2)
    saved.minimize(lambda: tf.reduce_sum(w * u) * np.inf, [w, u])
    path = tf.train.Checkpoint(optimizer=saved, w=w, u=u).save(str(tmp_path / "ck"))
    optimizer = tf_keras_sgd(family)
    restore_checkpoint(path, optimizer=optimizer, w=w, u=u)
    assert int(optimizer.steps_skipped) == 1
    assert int(optimizer.iterations) == 3
    assert int(optimizer.inner_optimizer.iterations) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model(family):
    folder, theirs = trained_model(family)
    mine = support.sequential(tf_keras, seed=2)
    inner = FAMILIES[family].Adam(0.5)
    mine.compile(lossscale.LossScaleOptimizer(inner, dynamic_growth_steps=100), "mse")
    restore_checkpoint(f"{folder.name}/weights", root=mine)
    support.fit(mine, 2)
    for a, b in zip(mine.get_weights(), theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
