"""`lossscale.install()` on Keras 2: what `compile` makes, and who else looks for the names."""

import operator

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras.src import optimizers as optimizers_module
from tf_keras.src.engine import training, training_v1
from tf_keras.src.mixed_precision import loss_scale_optimizer as own

import lossscale
from frameworks.tf_keras.support import assert_same
from lossscale import experimental

X = np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2)
Y = X @ np.array([[1.0], [-2.0]], "float32")
_PLACES = {
    tf_keras.optimizers: ["deserialize"],
    tf.keras.optimizers: ["deserialize"],
    optimizers_module: ["deserialize"],
    tf_keras.mixed_precision: ["LossScaleOptimizer", "experimental"],
    tf.keras.mixed_precision: ["LossScaleOptimizer", "experimental"],
    tf.compat.v1.keras.mixed_precision: ["LossScaleOptimizer", "experimental"],
    tf.compat.v2.keras.mixed_precision: ["LossScaleOptimizer", "experimental"],
    training: ["lso"],
    training_v1: ["loss_scale_optimizer"],
}


def what_is_there():
    return [vars(place).get(name) for place, names in _PLACES.items() for name in names]


@pytest.fixture(autouse=True)
def _everything_as_before(mixed_float16):
    lossscale.install().undo()
    before = what_is_there()
    yield
    assert what_is_there() == before


def compiled(optimizer="sgd"):
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, dtype="float32")])
    # Wrapped or not is settled here: compiled steps are for the train_step below.
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def is_ours(optimizer):
    return isinstance(optimizer, lossscale.LossScaleOptimizer)


def test_the_names_are_in_every_place_and_compile_wraps_in_the_documented_class_until_undone():
    assert tf.keras.optimizers.SGD is tf_keras.optimizers.SGD
    before = what_is_there()
    with lossscale.install():
        assert not any(map(operator.is_, before, what_is_there()))
        for root in (tf.keras, tf.compat.v1.keras, tf.compat.v2.keras, tf_keras):
            found = root.mixed_precision
            assert found.LossScaleOptimizer is lossscale.tf_keras.LossScaleOptimizer
            older = found.experimental.LossScaleOptimizer
            assert older is experimental.tf_keras.LossScaleOptimizer
        assert type(compiled("adam").optimizer).__module__ == "lossscale.tf_keras"
    assert type(compiled("adam").optimizer) is own.LossScaleOptimizerV3


def test_each_of_several_optimizers_is_wrapped_unless_it_has_loss_scaling(optimizers):
    optimizer, first = optimizers.SGD(), lossscale.LossScaleOptimizer(optimizers.SGD())
    theirs = own.BaseLossScaleOptimizer(optimizers.SGD())
    with lossscale.install():
        assert all(map(is_ours, compiled([optimizers.SGD(), optimizers.Adam()]).optimizer))
        assert compiled(first).optimizer is first
        assert compiled(theirs).optimizer is theirs
        # A model that is compiled again keeps its loss scale.
        model = compiled(optimizer)
        first = model.optimizer
        model.compile(optimizer, "mae")
        assert model.optimizer is first


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("form", ["old.h5", "saved_model", "old.keras"])
def test_what_tf_keras_own_class_wrote_is_read_into_ours(optimizers, form, tmp_path):
    if optimizers is tf_keras.optimizers.legacy and form == "old.keras":
        pytest.skip("tf_keras writes no legacy optimizer there")
    model = tf_keras.Sequential([tf_keras.Input((2,)), tf_keras.layers.Dense(1, dtype="float32")])
    model.compile(optimizers.SGD(0.5, momentum=0.5), "mse")
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert isinstance(model.optimizer, own.BaseLossScaleOptimizer)
    assert not isinstance(model.optimizer, lossscale.LossScaleOptimizer)
    path = str(tmp_path / form)
    model.save(path)
    with lossscale.install():
        loaded = tf_keras.models.load_model(path)
        assert isinstance(loaded.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    assert isinstance(loaded.optimizer, lossscale.LossScaleOptimizer)
    assert float(loaded.optimizer.loss_scale) == 2.0**15
    if form == "saved_model":
        # Of these tf_keras restores no state of an optimizer.
        model = tf_keras.models.load_model(path)
    for each in (model, loaded):
        each.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert_same(model.get_weights(), loaded.get_weights())
