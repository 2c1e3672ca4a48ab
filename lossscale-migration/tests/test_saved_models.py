"""A SavedModel of Keras 2 restored into a model: every weight in its own layer, or an error."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
import support
from lossscale.errors import OldFileError
from lossscale_migration import migrate_file, restore_checkpoint
from support import FAMILIES, FIXTURES, WITNESS

ZOO = FIXTURES / "zoo" / "savedmodel" / "2.15.1"


def stack(module, *layers):
    """A model of layers in a row, after five numbers."""
    return module.Sequential([module.layers.Input((5,)), *layers])


def equal_layers(module):
    return stack(module, *(module.layers.Dense(5, name=n) for n in ("a", "b", "c", "out")))


def with_dropout(module):
    layers = module.layers
    first, dropout = layers.Dense(5, name="a"), layers.Dropout(0.1, name="dr")
    return stack(module, first, dropout, layers.Dense(5, name="b"), layers.Dense(1, name="out"))


def with_lstm(module):
    layers = module.layers
    lstm = layers.LSTM(3, name="b")
    return stack(module, layers.Reshape((5, 1)), lstm, layers.Dense(1, name="out"))


def with_recurrent(module):
    """Every recurrent layer, the wrappers, and what draws random numbers."""
    layers = module.layers
    return module.Sequential(
        [
            layers.Input((3, 2)),
            layers.GaussianNoise(0.1),
            layers.TimeDistributed(layers.Dense(2, name="inside"), name="each"),
            layers.Bidirectional(layers.LSTM(2, return_sequences=True), name="both"),
            layers.GRU(4, return_sequences=True, name="gru", dropout=0.1),
            layers.SpatialDropout1D(0.1),
            layers.LSTM(4, return_sequences=True, name="lstm", recurrent_dropout=0.1),
            layers.SimpleRNN(4, return_sequences=True, name="simple"),
            layers.RNN([layers.GRUCell(4), layers.LSTMCell(4)], name="cells"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(4, name="out"),
        ]
    )


def with_convolutions(module):
    layers = module.layers
    return module.Sequential(
        [
            layers.Input((6, 6, 2)),
            layers.Normalization(name="statistics"),
            layers.Conv2D(2, 2, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.SeparableConv2D(2, 2, name="separable"),
            layers.BatchNormalization(name="frozen_norm"),
            layers.DepthwiseConv2D(2, name="depthwise"),
            layers.Conv2DTranspose(2, 2, name="transpose"),
            layers.PReLU(name="slope"),
            layers.LayerNormalization(name="layer_norm"),
            layers.Dropout(0.1),
            layers.Flatten(),
            layers.Dense(2, name="out"),
        ]
    )


def with_sharing(module):
    """Two inputs, a shared layer, a model inside a model inside a model, and attention."""
    layers = module.layers
    deepest = module.Sequential(
        [layers.Input((4,)), layers.Dense(4, name="na"), layers.Dense(4, name="nb")], name="deepest"
    )
    entry = layers.Input((4,))
    hidden = layers.BatchNormalization(name="nc")(layers.Dense(4, name="nd")(entry))
    nested = module.Model(entry, deepest(hidden), name="nested")
    first, second = layers.Input((4,), name="first"), layers.Input((4,), name="second")
    shared = layers.Dense(4, name="shared")
    one, two = nested(shared(first)), layers.Dense(4, name="beside")(nested(shared(second)))
    pair = layers.Reshape((2, 4))(layers.Concatenate()([one, two]))
    attended = layers.MultiHeadAttention(2, 3, name="attention")(pair, pair)
    embedded = layers.Embedding(3, 4, name="table")(layers.Lambda(lambda x: x[:, :2] > 0)(second))
    flat = layers.Flatten()(layers.Add()([attended, embedded]))
    return module.Model([first, second], layers.Dense(4, name="out")(flat))


MODELS = {
    "dense": (equal_layers, ["a"], (5,)),
    "dropout": (with_dropout, ["b"], (5,)),
    "recurrent": (with_recurrent, ["gru", "each", "norm"], (3, 2)),
    "convolutions": (with_convolutions, ["conv", "frozen_norm", "slope"], (6, 6, 2)),
    "shared": (with_sharing, ["shared", "nested", "table"], (4,), (4,)),
}


def filled(model, seed):
    """The model with other random weights; squares of them where a variance may stand."""
    random = np.random.default_rng(seed)
    model.set_weights([random.uniform(0.1, 1.0, w.shape) for w in model.get_weights()])
    return model


def frozen_in(model, names):
    """The model with these of its layers frozen and all others free."""
    for layer in model.layers:
        layer.trainable = layer.name not in names
    return model


def leaves(model):
    """Name of each layer that has weights and no layer inside, to its weights."""
    return {
        layer.name: layer.get_weights()
        for layer in model._flatten_layers()
        # Cells have names that count on from model to model.
        if layer.weights and not list(layer._flatten_layers(include_self=False))
        if "cell" not in layer.name
    }


def assert_same(mine, theirs, shapes):
    ours, expected = leaves(mine), leaves(theirs)
    inputs = [np.random.default_rng(7).normal(size=(2, *s)).astype("float32") for s in shapes]
    inputs = inputs if len(inputs) > 1 else inputs[0]
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(mine(inputs)), theirs(inputs).numpy(), rtol=1e-5, atol=1e-6
    )
    assert len(set(ours) & set(expected)) >= 3
    for name in set(ours) & set(expected):
        for a, b in zip(ours[name], expected[name], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


WRITTEN = {"eq": equal_layers, "drop": with_dropout, "lstm": with_lstm}


@pytest.mark.parametrize("frozen", [(), ("a", "b")], ids=["free", "frozen"])
@pytest.mark.parametrize("module", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_real_saved_model(name, module, frozen):
    model = frozen_in(WRITTEN[name](module), frozen)
    restored = restore_checkpoint(ZOO / name, root=model)
    with np.load(ZOO / f"{name}.npz") as arrays:
        expected = list(arrays.values())
    found = [w for layer in model.layers for w in layer.get_weights()]
    support.assert_equal(found, expected)
    assert restored.variables == len(expected)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_lands_in_its_layer(name, tmp_path):
    make, frozen, *shapes = MODELS[name]
    theirs = filled(make(tf_keras), 1)
    models = {module.__name__: make(module) for module in (keras, tf_keras)}
    # What was frozen then is free now, and the other way round.
    for then, now in ((frozen, ()), ((), frozen)):
        folder = tmp_path / ("frozen" if then else "free")
        # Without the functions, which take most of the time; what is stored of the layers is the
        # same.
        frozen_in(theirs, then).save(folder, save_format="tf", save_traces=False)
        for library, mine in models.items():
            frozen_in(filled(mine, 2), now)
            restored = restore_checkpoint(folder, root=mine)
            assert restored.variables == len(theirs.weights), (library, folder.name)
            assert_same(mine, theirs, shapes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("module", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_the_optimizer_of_a_frozen_model_goes_on_from_every_form(module, family, tmp_path):
    x, y = np.ones((4, 5), "float32"), np.arange(4.0, dtype="float32")[:, None]

    def compiled(model, optimizer):
        model.get_layer("a").trainable = False
        model.get_layer("dr").rate = 0.0
        model.compile(optimizer, "mse", run_eagerly=True)
        return model

    inner = FAMILIES[family].Adam(0.05)
    optimizer = WITNESS(inner, initial_scale=8, dynamic_growth_steps=2)
    theirs = compiled(filled(with_dropout(tf_keras), 1), optimizer)
    for _ in range(3):
        theirs.train_on_batch(x, y)
    tf_keras.models.save_model(theirs, tmp_path / "saved", save_format="tf", save_traces=False)
    migrate_file(tmp_path / "saved", tmp_path / "migrated.h5")
    theirs.save_weights(str(tmp_path / "weights"))
    tf.train.Checkpoint(model=theirs).write(str(tmp_path / "model"))
    tf.train.Checkpoint(model=theirs, optimizer=optimizer).write(str(tmp_path / "both"))
    for _ in range(2):
        theirs.train_on_batch(x, y)
    optimizers = FAMILIES[family] if module is tf_keras else keras.optimizers
    for form in ("saved", "migrated.h5", "weights", "model", "both"):
        optimizer = lossscale.LossScaleOptimizer(optimizers.Adam(0.5), dynamic_growth_steps=2)
        mine = compiled(filled(with_dropout(module), 2), optimizer)
        objects = {"model": mine} if form in ("model", "both") else {"root": mine}
        objects |= {"optimizer": optimizer} if form == "both" else {}
        restored = restore_checkpoint(tmp_path / form, **objects)
        assert (restored.variables, restored.slots) == (6, 8), form
        assert support.number(mine.optimizer.loss_scale) == 16.0
        assert support.number(mine.optimizer.dynamic_counter) == 1
        for _ in range(2):
            mine.train_on_batch(x, y)
        found, expected = (model.layers[-1].get_weights() for model in (mine, theirs))
        support.assert_close(found, expected, atol=0)
        assert support.number(mine.optimizer.loss_scale) == 32.0


def dense(layers, *units):
    return [layers.Dense(each) for each in units]


MISFITS = {
    "no bias": (
        lambda layers: [layers.Dense(5, name="a", use_bias=False), *dense(layers, 5, 5, 5)],
        r"layer_with_weights-0/bias, 'a/bias', does not exist in the layer 'a'",
    ),
    "another order": (
        lambda layers: [layers.Dense(5, name=n) for n in ("b", "a", "c", "other")],
        "the layer 'a' is at another position than in this model, which has 'b' there",
    ),
    "too few": (lambda layers: dense(layers, 5), "4 layers with weights, this one has 1"),
    "too large": (
        lambda layers: dense(layers, 5, 7, 6, 5),
        r"root/layer_with_weights-1/kernel has shape \(5, 5\) in the file and \(5, 7\) here",
    ),
    "more variables": (
        lambda layers: [*dense(layers, 5, 5, 5), layers.Reshape((5, 1)), layers.LSTM(1)],
        "contains no value for the variable|does not exist in the layer",
    ),
}


@pytest.mark.parametrize("module", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(name, module):
    layers, message = MISFITS[name]
    model = filled(stack(module, *layers(module.layers)), 1)
    before = model.get_weights()
    with pytest.raises(OldFileError, match=message):
        restore_checkpoint(ZOO / "eq", root=model)
    support.assert_equal(model.get_weights(), before)


def test_a_model_that_is_not_built_has_no_layers_with_weights():
    model = keras.Sequential([keras.layers.Dense(5) for _ in range(4)])
    with pytest.raises(OldFileError, match="4 layers with weights, this one has 0"):
        restore_checkpoint(ZOO / "eq", root=model)


def test_names_decide_about_layers_in_another_order():
    layers = keras.layers
    inputs = layers.Input((5,))
    c, out, a, b = (layers.Dense(5, name=n) for n in ("c", "out", "a", "b"))
    model = keras.Model(inputs, c(out(a(b(inputs)))))
    restore_checkpoint(ZOO / "eq", root=model)
    with np.load(ZOO / "eq.npz") as arrays:
        np.testing.assert_array_equal(a.kernel, arrays["arr_0"])
        np.testing.assert_array_equal(out.kernel, arrays["arr_6"])


def test_names_that_keras_made_go_by_their_order(tmp_path):
    def named(module, *names):
        return stack(module, *(module.layers.Dense(5, name=n) for n in names))

    theirs = filled(named(tf_keras, "dense_1", "dense_2"), 1)
    tf_keras.models.save_model(theirs, tmp_path / "s", save_format="tf", save_traces=False)
    mine = filled(named(keras, "dense_2", "dense_3"), 2)
    restore_checkpoint(tmp_path / "s", root=mine)
    support.assert_equal(mine.get_weights(), theirs.get_weights())


def test_an_export_of_keras_3_has_lists_alone(tmp_path):
    model = filled(with_dropout(keras), 1)
    model.get_layer("a").trainable = False
    model.export(str(tmp_path / "export"), verbose=False)
    mine = filled(with_dropout(keras), 2)
    with pytest.raises(OldFileError, match="contains no value for the variable 'kernel'"):
        restore_checkpoint(tmp_path / "export", root=mine)
    # What tf.saved_model makes of the model itself names the layers.
    tf.saved_model.save(model, str(tmp_path / "saved"))
    restore_checkpoint(tmp_path / "saved", root=mine)
    support.assert_equal(mine.get_weights(), model.get_weights())
