"""Model files of every release loaded into tf_keras: they go on exactly as they did then."""

import sys

import keras
import numpy as np
import pytest
import tf_keras

import lossscale
from lossscale.errors import ArgumentError, MissingPackageError, OldFileError
from lossscale.migration import load_model
from migration.support import FIXTURES

ZOO = FIXTURES / "zoo"
HDF5 = sorted(ZOO.glob("2.*/*.h5"))
ZIPPED = sorted(ZOO.glob("2.15.1/*.keras"))
OF_2_12 = sorted(ZOO.glob("2.12.1/*.keras"))
assert (len(HDF5), len(ZIPPED), len(OF_2_12)) == (54, 28, 7)


@pytest.fixture(scope="module")
def data():
    """Inputs by the shape of one example, and what the outputs were trained towards."""
    random = np.random.RandomState(3)
    x, image, sequence = (
        random.randn(6, *shape).astype("float32") for shape in ((5,), (8, 8, 3), (7, 4))
    )
    numbers = random.randint(0, 9, (6, 7)).astype("int32")
    target = random.randn(6, 1).astype("float32")
    labels = random.randint(0, 3, (6,))
    inputs = {array.shape[1:]: array for array in (x, image, sequence, numbers)}
    return inputs, target, labels


@pytest.fixture(scope="module")
def recorded():
    return {
        release: dict(np.load(path))
        for path in ZOO.glob("2.*/rec.npz")
        for release in [path.parent.name]
    }


def file_id(path):
    return f"{path.parent.name}-{path.stem.rpartition('_')[0]}{path.suffix}"


def prepared(model, path, data):
    """What the model was fed with then: inputs and targets."""
    name = path.stem
    # Compiling takes most of the time, and each model is used once.
    model.run_eagerly = True
    by_shape, target, labels = data
    inputs = [by_shape[tuple(tensor.shape[1:])] for tensor in model.inputs]
    # The second input was twice the first, or with 2.12.1 the first backwards; the second target
    # twice the first.
    backwards = path.parent.name == "2.12.1"
    second = inputs[0][::-1] if backwards else 2 * inputs[0]
    inputs = [inputs[0], second] if len(inputs) > 1 else inputs[0]
    targets = {"s_scce": labels, "s_bce_": (target > 0).astype("float32")}.get(name[:6], target)
    return inputs, [targets, 2 * targets] if len(model.outputs) > 1 else targets


def assert_outputs(model, inputs, expected, name, tolerance):
    outputs = model.predict_on_batch(inputs)
    for turn, found in enumerate(outputs if isinstance(outputs, list) else [outputs]):
        np.testing.assert_allclose(
            found, expected[f"{name}/{turn}"], rtol=tolerance, atol=tolerance
        )


def assert_the_same(model, same):
    for one, other in ((model, same), (model.optimizer, same.optimizer)):
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    assert model.get_config() == same.get_config()
    assert model.optimizer.get_config() == same.optimizer.get_config()
    assert model.get_compile_config()["loss"] == same.get_compile_config()["loss"]


@pytest.mark.parametrize("path", [*HDF5, *OF_2_12], ids=file_id)
def test_it_goes_on_as_then(path, data, recorded):
    model = load_model(path, framework="tf_keras")
    assert isinstance(model, tf_keras.Model)
    assert isinstance(model.optimizer, lossscale.LossScaleOptimizer)
    assert int(model.optimizer.iterations) == 3
    beside = path.with_suffix(".keras")
    if path in HDF5 and beside in ZIPPED:
        assert_the_same(load_model(beside, framework="tf_keras"), model)
    inputs, targets = prepared(model, path, data)
    expected = recorded[path.parent.name]
    assert_outputs(model, inputs, expected, f"{path.stem}/p0", 1e-5)
    for _ in range(2):
        model.train_on_batch(inputs, targets)
    # The bias of the convolution has no gradient but rounding errors (1e-8), of which Adam makes
    # whole steps; they differ from machine to machine, and with oneDNN.
    rounding = path.stem.startswith("f_conv_bn")
    assert_outputs(model, inputs, expected, f"{path.stem}/p2", 2e-3 if rounding else 1e-4)
    assert int(model.optimizer.iterations) == 5


def test_it_goes_on_as_tf_keras_own_loader_does():
    path = ZOO / "2.15.1" / "f_conv_bn_new"
    theirs = tf_keras.models.load_model(path.with_suffix(".keras"))
    mine = load_model(path.with_suffix(".h5"), framework="tf_keras")
    random = np.random.default_rng(1)
    x, y = random.normal(size=(6, 8, 8, 3)), random.normal(size=(6, 1))
    for model in (theirs, mine):
        model.run_eagerly = True
        model.train_on_batch(x, y)
    for a, b in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# --- Files of this library on tf_keras ------------------------------------------------------------

FAMILIES = {"new": tf_keras.optimizers, "legacy": tf_keras.optimizers.legacy}


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


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
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
    for a, b in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_the_older_optimizer_stays_one(tmp_path):
    older = lossscale.experimental.LossScaleOptimizer
    theirs = small(FAMILIES["legacy"].SGD(0.1, momentum=0.9), older, loss_scale="dynamic")
    theirs.save(tmp_path / "model.h5")
    mine = load_model(tmp_path / "model.h5", framework="tf_keras")
    assert isinstance(mine.optimizer, older)
    assert float(mine.optimizer.loss_scale()) == 2.0**15


# --- Arguments ------------------------------------------------------------------------------------

DENSE = ZOO / "2.3.4" / "s_dense_def.h5"


def test_a_file_of_any_name(tmp_path):
    for path in (DENSE, ZOO / "2.15.1" / "s_dense_new.keras"):
        copied = tmp_path / path.stem
        copied.write_bytes(path.read_bytes())
        assert int(load_model(copied, framework="tf_keras").optimizer.iterations) == 3


def own_loss(true, found):
    return found - true


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize("kind", ["function", "class"])
def test_a_loss_and_a_class_of_ones_own(kind, suffix, tmp_path):
    class Own(tf_keras.layers.Dense):
        pass

    class OwnLoss(tf_keras.losses.Loss):
        call = staticmethod(own_loss)

    path = tmp_path / f"model{suffix}"
    model = tf_keras.Sequential([Own(1, input_shape=(2,))])
    wrapped = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD())
    model.compile(
        wrapped,
        own_loss if kind == "function" else OwnLoss(),
        metrics=[own_loss, "mae"],
        loss_weights=[2.0],
        run_eagerly=True,
    )
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
