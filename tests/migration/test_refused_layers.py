"""What Keras 3 cannot do is refused by the name of the layer, or made of what the caller gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from lossscale.errors import OldFileError
from lossscale.migration import load_model
from migration import support

pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")

L = tf_keras.layers


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


def adapted():
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
    "h5-operation": (lambda: of(tf.math.lgamma, 3), r"'tf.math.lgamma'.*does tf.math.lgamma"),
    "h5-add_loss": (with_added_loss, "AddLoss"),
    "keras-vocabulary": (lambda: of(adapted(), 1, dtype="string"), "'words'.*vocabulary"),
    "keras-subclassed": (Subclassed, r"\(Subclassed\) is of a class of its own"),
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


@pytest.mark.parametrize("name", ["logcosh", "kullback_leibler_divergence", "huber_loss"])
def test_names_of_losses_that_changed(name, tmp_path):
    model = of(L.Dense(2, "softmax"), 3)
    path = saved(model, tmp_path / "model.h5", name, [name] if name != "huber_loss" else None)
    x, y = support.data(3)
    y = np.abs(np.concatenate([y, y], axis=1))
    expected = model.evaluate(x, y, return_dict=True, verbose=0)["loss"]
    found = load_model(path).evaluate(x, y, return_dict=True, verbose=0)["loss"]
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_metric_that_keras_3_has_not_is_named(tmp_path):
    metric = tf_keras.metrics.MeanRelativeError(normalizer=[1.0])
    path = saved(of(L.Dense(1), 3), tmp_path / "model.h5", metrics=[metric])
    with pytest.raises(OldFileError, match=r"MeanRelativeError.*Pass metrics="):
        load_model(path)
    load_model(path, metrics=["mae"])
