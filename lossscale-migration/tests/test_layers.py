"""Every kind of layer of Keras 2 goes on in Keras 3 as in tf_keras, or is refused by its name."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras.src.utils import naming

import lossscale
import support
from lossscale.errors import OldFileError
from lossscale_migration import load_model, restore_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")

L = tf_keras.layers
random = np.random.default_rng(3)
FLAT = random.normal(size=(4, 5)).astype("float32")
ROWS = random.normal(size=(4, 3, 3)).astype("float32")
IMAGE = random.normal(size=(4, 6, 6, 2)).astype("float32")
FILM = random.normal(size=(4, 2, 4, 4, 2)).astype("float32")
IDS = random.integers(0, 6, (4, 3)).astype("int32")
WANTED = random.normal(size=(4, 1)).astype("float32")


def cells(*units):
    return [L.LSTMCell(unit) for unit in units]


def attention(layer):
    return lambda: _attended(layer())


def _attended(layer):
    x = tf_keras.Input(ROWS.shape[1:])
    y = L.Dense(3, name="keys")(x)
    return tf_keras.Model(x, L.Flatten()(layer([y, x])))


def inner(name="inside", trainable=True):
    x = tf_keras.Input((5,), name=f"{name}_in")
    y = L.Dense(5, activation="tanh", name=f"{name}_a")(x)
    y = L.BatchNormalization(name=f"{name}_b")(y)
    model = tf_keras.Model(x, y, name=name)
    model.trainable = trainable
    return model


def nested_in_nested():
    x = tf_keras.Input((5,))
    return tf_keras.Model(x, inner("deep")(L.Dense(5)(x)), name="middle")


def twice():
    x, model = tf_keras.Input((5,)), inner()
    return tf_keras.Model(x, model(L.Dense(5)(model(x))))


def encoder_decoder():
    x = tf_keras.Input(ROWS.shape[1:])
    _, h, c = L.LSTM(3, return_state=True, name="encoder")(x)
    return tf_keras.Model(x, L.LSTM(3, name="decoder")(x, initial_state=[h, c]))


def branches():
    """Branches of different depth, whose layers Keras 2 lists by depth and not as made."""
    x = tf_keras.Input((5,))
    short = L.Dense(5, name="short")(x)
    long = L.Dense(5, name="long_2")(L.Dense(5, name="long_1")(x))
    return tf_keras.Model(x, L.Dot(axes=-1)([short, long]))


def slashes():
    x = tf_keras.Input((5,))
    return tf_keras.Model(x, L.Dense(3, name="block/dense")(x))


def operations():
    x = tf_keras.Input((4,))
    y = (x + 1.0) * 2.0 - 1.0 / (2.0 + tf.abs(x)) + x @ tf.ones((4, 4))
    y = tf.concat([tf.nn.relu(y), -x, tf.nn.leaky_relu(x)], axis=-1)
    y = L.Dense(6)(y)
    y = tf.reshape(y, [-1, 2, 3])[:, 1:]
    y = tf.reduce_mean(tf.transpose(y, [0, 2, 1]), axis=[1, 2], keepdims=True)
    y = tf.squeeze(tf.math.maximum(y, -1e3), axis=-1)
    one, two = tf.split(tf.stack([y[:, 0], y[:, 0]], axis=1), 2, axis=1)
    weight = tf.cast(tf.argmax(x, axis=-1) < 9, tf.float32)
    # Not as wide as the batch: Keras 3's eager `add` then takes a column for a bias.
    narrow = tf.nn.softmax(x[:, :3]) ** 2
    return tf_keras.Model(x, narrow + tf.clip_by_value(one * two, -9, 9) * weight[0])


def adapted():
    layer = L.Normalization()
    layer.adapt(FLAT * 3.0 + 1.0)
    return layer


HERE = "hard_sigmoid"
MODELS = {
    "dense": (FLAT, lambda: L.Dense(3, "selu", kernel_regularizer="l2", bias_constraint="non_neg")),
    "einsum": (ROWS, lambda: L.EinsumDense("abc,cd->abd", (3, 4), bias_axes="d")),
    "embedding_masked": (IDS, lambda: [L.Embedding(6, 3, mask_zero=True), L.LSTM(3)]),
    "embedding_length": (IDS, lambda: L.Embedding(6, 3, input_length=3)),
    "convolutions_1d": (
        ROWS,
        lambda: [
            L.Conv1D(3, 2, padding="causal", dilation_rate=2),
            L.SeparableConv1D(3, 2, depth_multiplier=2),
            L.DepthwiseConv1D(2, padding="same", depth_multiplier=2),
            L.Conv1DTranspose(3, 3, strides=2),
        ],
    ),
    "convolutions_2d": (
        IMAGE,
        lambda: [
            L.Conv2D(4, 3, groups=2),
            L.DepthwiseConv2D(2, depth_multiplier=2),
            L.SeparableConv2D(3, 2),
            L.Conv2DTranspose(3, 3, strides=2, output_padding=1),
        ],
    ),
    "convolutions_3d": (FILM, lambda: [L.Conv3D(3, 2), L.Conv3DTranspose(2, 2, padding="same")]),
    "conv_lstm_1d": (FILM[:, :, 0], lambda: L.ConvLSTM1D(2, 2)),
    "conv_lstm_2d": (FILM, lambda: L.ConvLSTM2D(2, 2, recurrent_activation=HERE)),
    "simple_rnn": (ROWS, lambda: L.SimpleRNN(3)),
    "lstm": (ROWS, lambda: L.LSTM(3, recurrent_activation=HERE, go_backwards=True)),
    "gru": (ROWS, lambda: [L.GRU(3, reset_after=False, return_sequences=True), L.GRU(2)]),
    "rnn_of_a_cell": (ROWS, lambda: L.RNN(L.GRUCell(3, activation="elu"))),
    "rnn_of_cells": (ROWS, lambda: L.RNN(cells(3, 2))),
    "stacked_cells": (ROWS, lambda: L.RNN(L.StackedRNNCells([*cells(2), L.SimpleRNNCell(2)]))),
    "bidirectional": (ROWS, lambda: L.Bidirectional(L.LSTM(2, return_sequences=True), "mul")),
    "two_directions": (
        ROWS,
        lambda: L.Bidirectional(L.LSTM(2), backward_layer=L.GRU(2, go_backwards=True)),
    ),
    "time_distributed": (FILM, lambda: L.TimeDistributed(L.Conv2D(2, 2))),
    "time_distributed_model": (
        ROWS,
        lambda: L.TimeDistributed(tf_keras.Sequential([L.Dense(4, input_shape=(3,)), L.Dense(2)])),
    ),
    "batch_normalization": (FLAT, lambda: [L.BatchNormalization(scale=False), L.Dense(2)]),
    "batch_normalization_frozen": (FLAT, lambda: L.BatchNormalization(trainable=False)),
    "batch_normalization_first_axis": (ROWS, lambda: L.BatchNormalization(axis=1)),
    "synchronized": (FLAT, lambda: L.experimental.SyncBatchNormalization()),
    "layer_normalization": (ROWS, lambda: L.LayerNormalization(axis=[1, 2], epsilon=0.1)),
    "group_normalization": (IMAGE, lambda: [L.GroupNormalization(2), L.UnitNormalization()]),
    "normalization": (FLAT, adapted),
    "multi_head": (ROWS, attention(lambda: lambda x: L.MultiHeadAttention(2, 3)(*x))),
    "attention": (ROWS, attention(lambda: L.Attention(use_scale=True, score_mode="concat"))),
    "additive": (ROWS, attention(L.AdditiveAttention)),
    "activations": (
        IMAGE,
        lambda: [
            L.PReLU(shared_axes=[1, 2]),
            L.LeakyReLU(0.1),
            L.ThresholdedReLU(0.05),
            L.ELU(0.5),
            L.ReLU(6.0, 0.1),
            L.Activation(HERE),
            L.Softmax(axis=[1, 2]),
        ],
    ),
    "shapes": (
        IMAGE,
        lambda: [
            L.ZeroPadding2D(1),
            L.Cropping2D(((1, 0), (0, 1))),
            L.UpSampling2D(2, interpolation="bilinear"),
            L.AveragePooling2D(2, padding="same"),
            L.Permute((2, 1, 3)),
            L.Reshape((-1, 2)),
            L.SpatialDropout1D(0.0),
            L.GaussianNoise(0.0),
            L.ActivityRegularization(l2=0.1),
        ],
    ),
    "preprocessing": (IMAGE, lambda: [L.Rescaling(0.5, 0.1), L.Resizing(4, 4), L.CenterCrop(3, 3)]),
    "discretization": (FLAT, lambda: L.Discretization([-0.5, 0.5], output_mode="count")),
    "lookup": (IDS, lambda: L.IntegerLookup(vocabulary=[1, 2, 5], output_mode="multi_hot")),
    "masking": (ROWS, lambda: [L.Masking(0.0), L.GRU(2)]),
    "nested_frozen": (FLAT, lambda: [inner(trainable=False), L.Dense(2)]),
    "nested_in_nested": (FLAT, nested_in_nested),
    "nested_twice": (FLAT, twice),
    "nested_sequential": (FLAT, lambda: [tf_keras.Sequential([L.Dense(4), L.Dense(3)]), L.ReLU()]),
    "initial_state": (ROWS, encoder_decoder),
    "branches": (FLAT, branches),
    "slashes": (FLAT, slashes),
    "operations": (FLAT[:, :4], operations),
}


def trained(name, folder=None):
    """A model of tf_keras after one step; its files."""
    x, make = MODELS[name]
    tf_keras.backend.reset_uids()
    made = make()
    inputs = tf_keras.Input(x.shape[1:], dtype=x.dtype.name)
    y = inputs
    for layer in made if isinstance(made, list) else [made]:
        y = layer(y)
    y = L.Dense(1, name="out")(L.Flatten(name="flat")(y))
    model = tf_keras.Model(inputs, y)
    # Rate and momentum with which no rounding grows; tf_keras' own loops stay untraced.
    optimizer = support.WITNESS(tf_keras.optimizers.SGD(0.02, momentum=0.5), initial_scale=8.0)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.train_on_batch(x, WANTED)
    return model, x


def gone_on(model, x):
    """What a model says as it is, and after one more step."""
    model.run_eagerly = True
    now = model.predict_on_batch(x)
    model.train_on_batch(x, WANTED)
    return now, model.predict_on_batch(x)


def loaded(path):
    # Names that Keras makes count on from model to model.
    naming.reset_uids()
    return load_model(path)


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on(name, tmp_path):
    theirs, x = trained(name)
    theirs.save(tmp_path / "m.h5")
    theirs.save(tmp_path / "m.keras")
    path = tf.train.Checkpoint(model=theirs).write(str(tmp_path / "ck"))
    mine = loaded(tmp_path / "m.h5")
    description, values = mine.to_json(), support.held(mine)
    for found, witnessed in zip(gone_on(mine, x), gone_on(theirs, x), strict=True):
        np.testing.assert_allclose(found, witnessed, rtol=1e-4, atol=1e-5)
    # What the other forms give is the very same, and so goes on as well.
    same = loaded(tmp_path / "m.keras")
    assert same.to_json() == description
    support.assert_held(same, values)
    for variable in same.weights:
        variable.assign(keras.ops.zeros_like(variable))
    inner = keras.optimizers.SGD(0.5, momentum=0.5)
    same.compile(lossscale.LossScaleOptimizer(inner, initial_scale=4.0), "mse")
    restore_checkpoint(path, model=same)
    support.assert_held(same, values)
    assert support.number(same.optimizer.loss_scale) == 8.0


def of(layer, *shape, **arguments):
    x = tf_keras.Input(shape, **arguments)
    return tf_keras.Model(x, layer(x))


def saved(model, path, loss="mse", metrics=None):
    inner = tf_keras.optimizers.SGD(0.1, momentum=0.5)
    model.compile(support.WITNESS(inner), loss, metrics=metrics)
    model.save(path)
    return path


def with_added_loss():
    model = of(L.Dense(1), 3)
    model.add_loss(tf.reduce_mean(model.output))
    return model


class Subclassed(tf_keras.Model):
    def __init__(self):
        super().__init__(name="mine")
        self.dense = L.Dense(1)
        self(np.ones((1, 3), "float32"))

    def call(self, x):
        return self.dense(x)


def with_words():
    layer = L.StringLookup(name="words")
    layer.adapt(["a", "b"])
    return layer


REFUSED = {
    "h5-local": (lambda: of(L.LocallyConnected1D(2, 2, name="local"), 4, 3), "'local'.*Locally"),
    "keras-height": (lambda: of(L.RandomHeight(0.1, name="high"), 5, 5, 3), "'high'.*RandomHeight"),
    "h5-time": (lambda: of(L.LSTM(2, time_major=True, name="l"), 4, 3), "'l'.*time_major=True"),
    "keras-lambda": (lambda: of(L.Lambda(lambda x: x * 2, name="double"), 3), "'double'.*function"),
    "h5-ragged": (
        lambda: of(L.LSTM(2), None, 2, ragged=True, name="torn"),
        "input 'torn' is ragged",
    ),
    "h5-operation": (lambda: of(tf.math.lgamma, 3), r"'tf.math.lgamma'.*uses tf.math.lgamma"),
    "h5-add_loss": (with_added_loss, "AddLoss"),
    "keras-vocabulary": (lambda: of(with_words(), 1, dtype="string"), "'words'.*vocabulary"),
    "keras-subclassed": (Subclassed, r"its class 'Subclassed' is not in the file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_layer_is_named(name, tmp_path):
    make, message = REFUSED[name]
    path = saved(make(), tmp_path / f"model.{name.partition('-')[0]}")
    with pytest.raises(OldFileError, match=message):
        load_model(path)


class Local(keras.layers.Layer):
    """LocallyConnected1D with a stride of 1."""

    def __init__(self, filters, kernel_size, name, **unused):
        super().__init__(name=name)
        self.filters, self.size = filters, kernel_size[0]

    def build(self, shape):
        length = shape[1] - self.size + 1
        self.kernel = self.add_weight(shape=(length, self.size * shape[2], self.filters))
        self.bias = self.add_weight(shape=(length, self.filters))

    def call(self, x):
        pieces = [x[:, at : at + self.size] for at in range(x.shape[1] - self.size + 1)]
        flat = [keras.ops.reshape(piece, (-1, self.kernel.shape[1])) for piece in pieces]
        return keras.ops.einsum("lbi,lio->blo", keras.ops.stack(flat), self.kernel) + self.bias


@pytest.mark.parametrize("form", ["h5", "keras"])
def test_a_class_of_the_callers_takes_its_place(form, tmp_path):
    theirs = of(L.LocallyConnected1D(2, 2, bias_initializer="uniform"), 4, 3)
    path = saved(theirs, tmp_path / f"model.{form}")
    mine = load_model(path, {"LocallyConnected1D": Local})
    x = support.data(4, 3)[0]
    np.testing.assert_allclose(mine(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [lambda x: x * 2, keras.layers.Rescaling(2.0, name="double")])
def test_a_lambda_is_given_by_the_name_of_its_layer(given, tmp_path):
    path = saved(of(L.Lambda(lambda x: x * 2, name="double"), 3), tmp_path / "model.h5")
    mine = load_model(path, {"double": given})
    np.testing.assert_allclose(mine(np.ones((1, 3), "float32")), [[2.0, 2.0, 2.0]])


@pytest.mark.parametrize(
    ("loss", "metrics"),
    [
        *((name, [name]) for name in ("logcosh", "kullback_leibler_divergence")),
        ("huber_loss", []),
        (
            tf_keras.losses.Huber(delta=0.5),
            ["mae", tf_keras.metrics.RootMeanSquaredError(name="root")],
        ),
    ],
    ids=["logcosh", "kullback_leibler_divergence", "huber_loss", "instances"],
)
def test_losses_and_metrics_mean_the_same(loss, metrics, tmp_path):
    model = of(L.Dense(2, "softmax"), 3)
    path = saved(model, tmp_path / "model.h5", loss, metrics)
    x, y = support.data(3)
    y = np.abs(np.concatenate([y, y], axis=1))
    expected = model.evaluate(x, y, return_dict=True, verbose=0)
    found = load_model(path).evaluate(x, y, return_dict=True, verbose=0)
    assert len(expected) == 1 + len(metrics)
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_metric_that_keras_3_has_not_is_named(tmp_path):
    metric = tf_keras.metrics.MeanRelativeError(normalizer=[1.0])
    path = saved(of(L.Dense(1), 3), tmp_path / "model.h5", metrics=[metric])
    with pytest.raises(OldFileError, match=r"MeanRelativeError.*Pass metrics="):
        load_model(path)
    load_model(path, metrics=["mae"])
