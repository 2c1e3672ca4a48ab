"""What `compile` makes of an unwrapped optimizer under `lossscale.install()`, on Keras 3."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import trainer

import lossscale
from backends.support import assert_same, everything
from lossscale import experimental
from seeding import seed

OWN = keras.optimizers.LossScaleOptimizer
WRAPPED = keras.optimizers.serialize(lossscale.LossScaleOptimizer(keras.optimizers.Adam()))
X = np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2)
Y = X @ np.array([[1.0], [-2.0]], "float32")


@pytest.fixture(autouse=True)
def _mixed_float16_and_nothing_left_behind():
    seed(0)
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")
    assert trainer.LossScaleOptimizer is OWN


def compiled(*optimizer, **kwargs):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float32")])
    # Wrapped or not is settled here: compiled steps are for the train_step below.
    model.compile(*optimizer, loss="mse", run_eagerly=True, **kwargs)
    return model


@pytest.mark.parametrize(
    ("given", "inner"),
    [
        (["adam"], keras.optimizers.Adam),
        ([keras.optimizers.RMSprop(0.5)], keras.optimizers.RMSprop),
        ([{"class_name": "SGD", "config": {"learning_rate": 0.5}}], keras.optimizers.SGD),
        ([WRAPPED], keras.optimizers.Adam),
        ([], keras.optimizers.RMSprop),
    ],
    ids=["name", "instance", "configuration", "wrapped", "none"],
)
def test_compile_wraps_in_the_documented_class(given, inner):
    with lossscale.install():
        optimizer = compiled(*given).optimizer
        assert isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    assert type(optimizer) is lossscale.keras.LossScaleOptimizer
    assert type(optimizer.inner_optimizer) is inner
    assert optimizer.rule == lossscale.DynamicScale()
    expected = lossscale.LossScaleOptimizer(inner())
    assert [v.name for v in optimizer.variables] == [v.name for v in expected.variables]
    assert any(variable is optimizer.iterations for variable in optimizer.variables)


@pytest.mark.parametrize(
    ("wrap", "policy", "arguments"),
    [
        (lossscale.LossScaleOptimizer, "mixed_float16", {}),
        (lambda sgd: experimental.LossScaleOptimizer(sgd, 8), "mixed_float16", {}),
        (OWN, "mixed_float16", {}),
        (lambda sgd: sgd, "float32", {}),
        (lambda sgd: sgd, "mixed_bfloat16", {}),
        (lambda sgd: sgd, "mixed_float16", {"auto_scale_loss": False}),
    ],
    ids=["ours", "older", "keras", "float32", "bfloat16", "auto_scale_loss"],
)
def test_what_compile_leaves_alone(wrap, policy, arguments):
    keras.mixed_precision.set_global_policy(policy)
    optimizer = wrap(keras.optimizers.SGD())
    with lossscale.install():
        assert compiled(optimizer, **arguments).optimizer is optimizer


def test_models_go_on_after_it_is_undone_and_their_files_load_under_it(tmp_path):
    path = tmp_path / "model.keras"
    with lossscale.install():
        model = compiled(keras.optimizers.SGD(0.25, momentum=0.5))
        model.fit(X, Y, verbose=0)
    model.fit(X, Y, verbose=0)
    model.optimizer.dynamic_scale.assign(2.0**10)
    model.save(path)
    with lossscale.install():
        loaded = keras.saving.load_model(path)
        clone = keras.models.clone_model(model)
        clone.compile_from_config(model.get_compile_config())
    for each in (model, loaded, clone):
        assert type(each.optimizer) is lossscale.keras.LossScaleOptimizer
        each.fit(X, Y, shuffle=False, verbose=0)
    assert float(loaded.optimizer.loss_scale) == 2.0**10
    assert int(loaded.optimizer.iterations) == 3
    found, expected = (everything(each.optimizer, *each.variables) for each in (loaded, model))
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("arguments", "initial_scale", "dynamic"),
    [
        ([], 2.0**15, True),
        (["dynamic"], 2.0**15, True),
        ([128], 128.0, False),
        ([experimental.DynamicLossScale(8, multiplier=4)], 8.0, True),
    ],
)
def test_compile_takes_the_loss_scale_of_the_older_policy(arguments, initial_scale, dynamic):
    with lossscale.install():
        older = tf.keras.mixed_precision.experimental
        policy = older.Policy("mixed_float16", *arguments)
        older.set_policy(policy)
        assert older.global_policy() is policy
        assert (policy.compute_dtype, policy.variable_dtype) == ("float16", "float32")
        optimizer = compiled().optimizer
        assert isinstance(optimizer, older.LossScaleOptimizer)
        assert optimizer.loss_scale is policy.loss_scale
    assert optimizer.loss_scale() == initial_scale
    assert optimizer.dynamic is dynamic


def test_a_policy_set_by_its_name_or_without_a_loss_scale():
    optimizer = keras.optimizers.SGD()
    with lossscale.install():
        older = tf.keras.mixed_precision.experimental
        older.set_policy("mixed_float16")
        assert isinstance(older.global_policy().loss_scale, experimental.DynamicLossScale)
        assert isinstance(compiled().optimizer, older.LossScaleOptimizer)
        for policy in ("float32", older.Policy("mixed_float16", loss_scale=None)):
            older.set_policy(policy)
            assert older.global_policy().loss_scale is None
            assert compiled(optimizer).optimizer is optimizer


def test_the_older_policy_is_a_policy_of_keras(tmp_path):
    with lossscale.install():
        older = tf.keras.mixed_precision.experimental
        policy = older.Policy("mixed_float16", loss_scale=128)
        layer = keras.layers.Dense(1, dtype=policy)
        assert older.get_layer_policy(layer) is policy
        assert isinstance(policy, older.Policy)
        assert isinstance(policy, keras.mixed_precision.Policy)
        assert not isinstance("mixed_float16", older.Policy)
        model = keras.Sequential([keras.Input((2,)), layer])
        model.save(tmp_path / "model.keras")
    # Without lossscale's names: the file says what every Keras knows.
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.layers[-1].dtype_policy == keras.mixed_precision.Policy("mixed_float16")


@pytest.mark.parametrize(
    ("name", "loss_scale", "message"),
    [
        *((name, 128, "'mixed_float16' only") for name in ("float32", "mixed_bfloat16")),
        *(("mixed_float16", loss_scale, "loss_scale") for loss_scale in ("static", 0, True)),
    ],
)
def test_a_loss_scale_that_has_no_effect_or_cannot_be_used_is_an_error(name, loss_scale, message):
    with lossscale.install():
        older = tf.keras.mixed_precision.experimental
        assert (older.Policy(name).loss_scale is None) == (name != "mixed_float16")
        with pytest.raises(ValueError, match=message):
            older.Policy(name, loss_scale=loss_scale)
