"""Model files and checkpoints of real releases load, and train on as they did there.

A folder for each release holds `<model>_<kind>.h5`, `.keras` and `_ck.*`, written after three steps
of Adam(0.05) in the release's own loss scale optimizer. `rec.npz` has what the model gave then
(`p0`), and after two more steps on the same data (`p2`). In tf_keras they go on exactly as then.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras.src.utils import naming

import lossscale
import support
from lossscale_migration import load_model, restore_checkpoint
from support import FIXTURES

ZOO = FIXTURES / "zoo"
RELEASES = {"2.3.4": (26, 0), "2.12.1": (0, 7), "2.15.1": (28, 28)}
HDF5 = sorted(ZOO.glob("*/*.h5"))
ZIPPED = sorted(ZOO.glob("*/*.keras"))
# Each stands beside an HDF5 file of the same model.
OF_2_15 = [path for path in ZIPPED if path.parent.name == "2.15.1"]
# Of these the forms are not worded alike, though they mean the same losses and metrics.
OTHER_WORDS = {"s_huber_new", "s_scce_acc_new"}
ALIKE = [path for path in OF_2_15 if path.stem not in OTHER_WORDS]

# A bias before BatchNormalization has no gradient but its rounding (1e-8), which Adam scales up to
# whole steps. Each build of TensorFlow and each CPU rounds in its own way: the largest difference
# seen in tf_keras is 4.4e-3 (AVX2) and below 2e-3 (AVX-512). One step moves a weight by 0.05.
WITHIN_CONV_BN = 1e-2


@functools.cache
def records(release):
    return np.load(ZOO / release / "rec.npz")


@functools.cache
def data():
    random = np.random.RandomState(3)
    drawn = [random.randn(*shape) for shape in ((6, 5), (6, 8, 8, 3), (6, 7, 4))]
    flat, image, sequence = (array.astype("float32") for array in drawn)
    ids = random.randint(0, 9, (6, 7)).astype("int32")
    wanted = random.randn(6, 1).astype("float32")
    labels = random.randint(0, 3, (6,))
    inputs = {array.shape[1:]: array for array in (flat, image, sequence, ids)}
    return inputs, wanted, labels


def batch(path, model):
    inputs, wanted, labels = data()
    x = inputs[tuple(model.inputs[0].shape[1:])]
    if len(model.inputs) == 2:
        # Ours were written with another second input than the others.
        x = [x, x[::-1] if "2.12.1" in str(path) else 2 * x]
    if len(model.outputs) == 2:
        return x, [wanted, 2 * wanted]
    if "scce" in path.name:
        return x, labels
    return x, (wanted > 0).astype("float32") if "bce" in path.name else wanted


def file_id(path):
    return f"{path.parent.name}-{path.stem}"


def loaded(path, framework="keras"):
    model = load_model(path, framework=framework)
    # Compiling takes most of the time, and each model is used once.
    model.run_eagerly = True
    return model


def assert_as_recorded(path, model, which, within):
    outputs = model.predict_on_batch(batch(path, model)[0])
    for turn, found in enumerate(outputs if isinstance(outputs, list) else [outputs]):
        expected = records(path.parent.name)[f"{path.stem}/{which}/{turn}"]
        np.testing.assert_allclose(found, expected, rtol=0, atol=within)


def merged_step(model, x, wanted):
    """One step in which the gradients of an embedding's equal rows are added first."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - wanted) ** 2)
        scaled = model.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_variables)
    gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def assert_goes_on(path, model, framework="keras"):
    assert_as_recorded(path, model, "p0", 1e-5)
    x, wanted = batch(path, model)
    for _ in range(2):
        if "emb" in path.name and framework == "keras":
            merged_step(model, x, wanted)
        else:
            model.train_on_batch(x, wanted)
    within = WITHIN_CONV_BN if "conv_bn" in path.name else 1e-4
    assert_as_recorded(path, model, "p2", within)
    assert support.number(model.optimizer.iterations) == 5


def test_every_file_is_here():
    for release, counts in RELEASES.items():
        files = [[path for path in kind if path.parent.name == release] for kind in (HDF5, ZIPPED)]
        assert tuple(map(len, files)) == counts
    assert len(sorted(ZOO.glob("*/*_ck.index"))) == len(HDF5)


@pytest.mark.parametrize("path", HDF5, ids=file_id)
def test_an_hdf5_file_goes_on_and_its_checkpoint_holds_the_same(path):
    model = loaded(path)
    expected = support.held(model)
    assert_goes_on(path, model)
    # All of it is something else by now.
    model.optimizer.learning_rate = 0.5
    optimizer = model.optimizer
    checkpoint = path.with_name(f"{path.stem}_ck")
    restored = restore_checkpoint(checkpoint, model=model, optimizer=optimizer)
    assert restored.variables == len(model.weights)
    assert restored.slots == 2 * len(model.trainable_variables)
    support.assert_held(model, expected)


@pytest.mark.parametrize("path", ALIKE, ids=file_id)
def test_a_keras_file_holds_what_the_hdf5_file_holds(path):
    naming.reset_uids()
    model = load_model(path)
    naming.reset_uids()
    same = load_model(path.with_suffix(".h5"))
    assert model.to_json() == same.to_json()
    support.assert_held(model, support.held(same))


@pytest.mark.parametrize("path", [p for p in ZIPPED if p not in ALIKE], ids=file_id)
def test_a_keras_file_goes_on(path):
    assert_goes_on(path, loaded(path))


@pytest.mark.parametrize("release", ["2.3.4", "2.15.1"])
def test_equal_rows_of_an_embedding_are_squared_one_by_one_in_keras_3(release):
    # As the documentation says; without loss scaling as well.
    (path,) = ZOO.glob(f"{release}/f_emb_*.h5")
    model = load_model(path)
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    inner = keras.optimizers.Adam(0.05)
    inner.build(plain.trainable_variables)
    for mine, held in zip(inner.variables, model.optimizer.inner_optimizer.variables, strict=True):
        mine.assign(held)
    plain.compile(inner, "mse")
    x, wanted = batch(path, model)
    for each in (model, plain):
        each.run_eagerly = True
        for _ in range(2):
            each.train_on_batch(x, wanted)
    found = model.predict_on_batch(x)
    np.testing.assert_allclose(found, plain.predict_on_batch(x), atol=1e-6)
    assert_as_recorded(path, model, "p2", 4e-2)
    with pytest.raises(AssertionError):
        assert_as_recorded(path, model, "p2", 1e-3)


def assert_the_same(model, same):
    for one, other in ((model, same), (model.optimizer, same.optimizer)):
        support.assert_equal(one.get_weights(), other.get_weights())
    assert model.get_config() == same.get_config()
    assert model.optimizer.get_config() == same.optimizer.get_config()
    assert model.get_compile_config()["loss"] == same.get_compile_config()["loss"]


@pytest.mark.parametrize("path", [p for p in (*HDF5, *ZIPPED) if p not in OF_2_15], ids=file_id)
def test_in_tf_keras_it_goes_on_as_then(path):
    model = loaded(path, "tf_keras")
    assert isinstance(model, tf_keras.Model)
    assert isinstance(model.optimizer, lossscale.LossScaleOptimizer)
    assert int(model.optimizer.iterations) == 3
    if path.with_suffix(".keras") in OF_2_15:
        assert_the_same(load_model(path.with_suffix(".keras"), framework="tf_keras"), model)
    assert_goes_on(path, model, "tf_keras")


def test_it_goes_on_as_tf_keras_own_loader_does():
    path = ZOO / "2.15.1" / "f_conv_bn_new"
    theirs = tf_keras.models.load_model(path.with_suffix(".keras"))
    mine = load_model(path.with_suffix(".h5"), framework="tf_keras")
    random = np.random.default_rng(1)
    x, y = random.normal(size=(6, 8, 8, 3)), random.normal(size=(6, 1))
    for model in (theirs, mine):
        model.run_eagerly = True
        model.train_on_batch(x, y)
    support.assert_close(mine.get_weights(), theirs.get_weights(), rtol=1e-5, atol=1e-6)
