"""Model files loaded into tf_keras: those of this library, and what `load_model` takes and refuses.

Those of real releases are in test_zoo.py.
"""

import sys

import keras
import numpy as np
import pytest
import tf_keras

import lossscale
from lossscale.errors import ArgumentError, MissingPackageError, OldFileError
from lossscale.migration import load_model
from migration import support
from migration.support import FAMILIES, FIXTURES, WITNESS

pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")


# --- Files of this library on tf_keras ------------------------------------------------------------


def small(inner, wrap=lossscale.LossScaleOptimizer, **arguments):
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(2, input_shape=(2,)), tf_keras.layers.Dense(1)]
    )
    optimizer = wrap(inner, **(arguments or {"initial_scale": 8, "dynamic_growth_steps": 2}))
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"], run_eagerly=True)
    for factor in (1.0, 1.0, np.inf, 1.0):
        model.train_on_batch(np.ones((2, 2)) * factor, np.ones((2, 1)))
    return model


# What tf_keras writes of a legacy optimizer: to HDF5 no loss scale, to `.keras` no state at all.
HELD = {
    ("new", ".keras"): (4, 8.0, 1),
    ("new", ".h5"): (4, 8.0, 1),
    ("legacy", ".h5"): (3, 8.0, 0),
    ("legacy", ".keras"): (0, 8.0, 0),
}


@pytest.mark.parametrize(("family", "suffix"), HELD)
def test_a_file_of_ours_keeps_what_is_in_it(family, suffix, tmp_path):
    theirs = small(FAMILIES[family].Adam(0.1))
    theirs.save(tmp_path / f"model{suffix}")
    mine = load_model(tmp_path / f"model{suffix}", framework="tf_keras")
    steps, scale, counter = HELD[family, suffix]
    assert type(mine.optimizer) is type(theirs.optimizer)
    assert int(mine.optimizer.iterations) == steps
    assert float(mine.optimizer.loss_scale) == scale
    assert int(mine.optimizer.dynamic_counter) == counter
    if steps:
        mine.run_eagerly = True
        for model in (theirs, mine):
            model.train_on_batch(np.ones((2, 2)), np.zeros((2, 1)))
    support.assert_close(mine.get_weights(), theirs.get_weights(), rtol=1e-5, atol=0)


def test_the_older_optimizer_stays_one(tmp_path):
    older = lossscale.experimental.LossScaleOptimizer
    theirs = small(FAMILIES["legacy"].SGD(0.1, momentum=0.9), older, loss_scale="dynamic")
    theirs.save(tmp_path / "model.h5")
    mine = load_model(tmp_path / "model.h5", framework="tf_keras")
    assert isinstance(mine.optimizer, older)
    assert float(mine.optimizer.loss_scale()) == 2.0**15


# --- Arguments ------------------------------------------------------------------------------------

DENSE = FIXTURES / "zoo" / "2.3.4" / "s_dense_def.h5"


@pytest.mark.parametrize("framework", ["keras", "tf_keras"])
def test_a_file_of_any_name_stays_as_it_is(framework, tmp_path):
    for path in (DENSE, FIXTURES / "zoo" / "2.15.1" / "s_dense_new.keras"):
        content = path.read_bytes()
        for name in ("model", "model.bin"):
            copied = tmp_path / name
            copied.write_bytes(content)
            optimizer = load_model(copied, framework=framework).optimizer
            assert support.number(optimizer.iterations) == 3
            assert copied.read_bytes() == content


def own_loss(true, found):
    return found - true


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize("kind", ["function", "class"])
def test_a_loss_and_a_class_of_ones_own(kind, suffix, tmp_path):
    class Own(tf_keras.layers.Dense):
        pass

    class OwnLoss(tf_keras.losses.Loss):
        call = staticmethod(own_loss)

    path = tmp_path / f"model{suffix}"
    model = tf_keras.Sequential([Own(1, input_shape=(2,))])
    wrapped = WITNESS(tf_keras.optimizers.SGD())
    loss = own_loss if kind == "function" else OwnLoss()
    metrics = [own_loss, "mae"]
    model.compile(wrapped, loss, metrics=metrics, loss_weights=[2.0], run_eagerly=True)
    model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    model.save(path)
    with pytest.raises(OldFileError, match=r"tf_keras cannot make its model: .*Own"):
        load_model(path, framework="tf_keras")
    with pytest.raises(OldFileError, match=r"cannot make its loss.*Pass loss=\.\.\. in its place"):
        load_model(path, {"Own": Own}, framework="tf_keras")
    everything = {"Own": Own, "own_loss": own_loss, "OwnLoss": OwnLoss}
    mine = load_model(path, everything, framework="tf_keras")
    assert type(mine.layers[0]) is Own
    assert mine.loss is own_loss or isinstance(mine.loss, OwnLoss)
    mine.run_eagerly = True
    mine.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    assert mine.metrics_names == ["loss", "own_loss", "mae"]
    mine = load_model(path, {"Own": Own}, loss="mae", metrics=[], framework="tf_keras")
    assert mine.loss == "mae"


def test_a_file_of_keras_3_is_for_keras_3(tmp_path):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    for wrap in (keras.optimizers.LossScaleOptimizer, lossscale.LossScaleOptimizer):
        model.compile(wrap(keras.optimizers.SGD()), "mse")
        model.save(tmp_path / "model.keras")
        with pytest.raises(OldFileError, match="Keras 3 wrote this file"):
            load_model(tmp_path / "model.keras", framework="tf_keras")


def test_a_framework_that_there_is_not():
    with pytest.raises(ArgumentError, match=r"'keras' or 'tf_keras'\. Received: framework='torch'"):
        load_model(DENSE, framework="torch")


def test_without_tf_keras_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    with pytest.raises(MissingPackageError, match=r'pip install "lossscale\[tf_keras\]"'):
        load_model(DENSE, framework="tf_keras")
