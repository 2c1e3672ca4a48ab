"""`diagnose` on models of tf_keras: what it measures, and that it leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from sklearn.datasets import load_digits
from tf_keras import layers

from frameworks.tf_keras.support import seed_initial_values
from lossscale import FixedScale, LossScaleOptimizer
from lossscale.diagnostics import TensorKind, Verdict, diagnose
from lossscale.errors import ArgumentError


def some_data(rows=24, features=6, classes=4):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, features)).astype(np.float32), rng.integers(
        classes, size=rows
    )


def classifier(policy="float32", optimizer="adam"):
    """Everything that has a state: statistics, random seeds, metrics, slots."""
    seed_initial_values()
    tf_keras.mixed_precision.set_global_policy(policy)
    model = tf_keras.Sequential(
        [
            layers.InputLayer((6,)),
            layers.Dense(8, name="first", kernel_regularizer="l2"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Dropout(0.5, seed=1, rng_type="stateful"),
            layers.GaussianNoise(0.1, seed=2),
            layers.Dense(4, activation="softmax", dtype="float32", name="last"),
        ],
        name="classifier",
    )
    tf_keras.mixed_precision.set_global_policy("float32")
    # What a diagnosis compiles it compiles itself; how the model trains is not its matter.
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=True)
    return model


def generators(model):
    found = [
        layer._random_generator for layer in model.layers if "_random_generator" in vars(layer)
    ]
    return [(g._seed, g._generator and g._generator.state.numpy().tolist()) for g in found]


def state(model):
    optimizer = model.optimizer
    slots = optimizer.variables if isinstance(optimizer.variables, list) else optimizer.variables()
    return {
        "variables": [variable.numpy() for variable in model.variables],
        "optimizer": [variable.numpy() for variable in slots],
        "policies": [layer.dtype_policy for layer in model.layers],
        "attributes": [sorted(vars(layer)) for layer in model.layers],
        "generators": generators(model),
        "loss": model.compiled_loss,
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key in ("variables", "optimizer"):
            assert len(value) == len(after[key])
            assert all(np.array_equal(*pair) for pair in zip(value, after[key], strict=True)), key
        else:
            assert value == after[key], key


@pytest.mark.parametrize(
    ("policy", "trained", "optimizers"),
    [
        ("float32", False, "new"),
        ("mixed_float16", True, "legacy"),
    ],
    indirect=["optimizers"],
)
def test_the_model_is_left_as_it_was(policy, trained, optimizers):
    x, y = some_data()
    model = classifier(policy, optimizers.Adam())
    untouched = classifier(policy, optimizers.Adam())
    if trained:
        for each in (model, untouched):
            tf.random.set_seed(1)
            each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    before = state(model)
    assert len(before["generators"]) == 2
    drawn = random.getstate()
    # The float16 half includes the other one, and knows nothing of optimizers.
    diagnose(model, x, y, batch_size=8, batches=3, quick=not trained)
    assert_same(before, state(model))
    assert random.getstate() == drawn
    # The states that nobody thought of show in what comes next.
    for each in (model, untouched):
        tf.random.set_seed(1)
        each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    after, expected = state(model), state(untouched)
    for key in ("variables", "optimizer", "generators"):
        assert_same({key: expected[key]}, {key: after[key]})


def test_the_seed_of_eager_mode_is_left_as_it_was():
    x, y = some_data()
    drawn = []
    for diagnosed in (False, True):
        model = classifier()
        tf.random.set_seed(1)
        if diagnosed:
            diagnose(model, x, y)
        drawn.append(tf.random.uniform([3]).numpy().tolist())
    assert drawn[0] == drawn[1]


def test_the_model_is_left_as_it_was_by_an_exception():
    x, y = some_data()
    model = classifier("mixed_float16")
    model.fit(x, y, batch_size=8, verbose=0)
    before = state(model)

    def fail(number):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diagnose(model, x, y, after_batch=fail)
    assert_same(before, state(model))
    with pytest.raises(Exception, match=r"(?i)shape|incompatible|expected"):
        diagnose(model, x[:, :5], y)
    assert_same(before, state(model))


def test_gradients_of_a_linear_model_are_those_of_the_formula():
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((8, 3)).astype(np.float32), np.zeros((8, 1), np.float32)
    model = tf_keras.Sequential([layers.InputLayer((3,)), layers.Dense(1, name="linear")])
    model.compile("sgd", "mse")
    report = diagnose(model, x, y, batch_size=8, quick=True)
    error = x @ model.trainable_variables[0].numpy() - y
    expected = {
        "linear/kernel": 2 / 8 * x.T @ error,
        "linear/bias": 2 / 8 * error.sum(axis=0),
        "output:linear": 2 / 8 * error,
    }
    assert {found.name for found in report.tensors} == set(expected)
    for found in report.tensors:
        gradient = expected[found.name]
        assert found.histogram.size == gradient.size
        assert found.histogram.mass == pytest.approx(np.abs(gradient).sum(), rel=1e-4)


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    return (data.images / 16).astype(np.float32)[..., None], data.target


def convolutional(policy, outputs, optimizer="sgd"):
    seed_initial_values()
    tf_keras.mixed_precision.set_global_policy(policy)
    model = tf_keras.Sequential(
        [
            layers.InputLayer((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10, name="last"),
            layers.Activation("softmax", dtype="float32", name="end"),
        ]
    )
    tf_keras.mixed_precision.set_global_policy("float32")

    def loss(labels, predictions):
        return tf_keras.losses.sparse_categorical_crossentropy(labels, predictions) / outputs

    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def test_the_plain_digits_do_not_need_scaling(digits):
    report = diagnose(convolutional("mixed_float16", 1), *digits, batch_size=64)
    assert report.verdict is Verdict.NOT_NEEDED
    assert report.framework == "tf_keras"
    assert report.policy == "mixed_float16"


def test_averaged_digits_require_it_and_train_with_the_recommended_scale(digits):
    outputs = 2**24
    report = diagnose(convolutional("mixed_float16", outputs), *digits, batch_size=64)
    same = diagnose(convolutional("float32", outputs), *digits, batch_size=64, quick=True)
    assert report.verdict is Verdict.REQUIRED
    assert report.worst.name == "output:end"
    # Sums of several threads may round otherwise from run to run.
    for found, expected in zip(report.ranges, same.ranges, strict=True):
        assert found.kind is expected.kind
        assert found.histogram.mass == pytest.approx(expected.histogram.mass, rel=1e-4)
    accuracy = {}
    for name, policy, rule in (
        ("float32", "float32", FixedScale(1.0)),
        ("unscaled", "mixed_float16", FixedScale(1.0)),
        ("recommended", "mixed_float16", FixedScale(report.recommended_scale)),
    ):
        inner = tf_keras.optimizers.SGD(0.05 * outputs, momentum=0.9)
        model = convolutional(policy, outputs, LossScaleOptimizer(inner, rule=rule))
        history = model.fit(*digits, batch_size=64, epochs=4, shuffle=False, verbose=0)
        accuracy[name] = history.history["accuracy"][-1]
    assert accuracy["float32"] > 0.85
    assert accuracy["unscaled"] < 0.3
    assert accuracy["recommended"] > accuracy["float32"] - 0.03


class Doubling(layers.Layer):
    """Control flow that AutoGraph has to translate, as training would."""

    def build(self, shape):
        self.factor = self.add_weight(name="factor", shape=(), initializer="ones")

    def call(self, x):
        total = x
        for _ in tf.range(3):
            total = total + x
        if tf.reduce_sum(x) > 1e4:
            total = total * 0.0
        return total * self.factor


class Subclassed(tf_keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.first = Doubling()
        self.second = layers.Dense(1)

    def call(self, x, training=None):
        return self.second(self.first(x))


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.filterwarnings("error")
def test_layers_with_control_flow_and_a_subclassed_model(policy):
    tf_keras.mixed_precision.set_global_policy(policy)
    x, _ = some_data()
    subclassed = Subclassed()
    inputs = tf_keras.Input((6,))
    graph = tf_keras.Model(inputs, layers.Dense(1, name="end")(Doubling(name="double")(inputs)))
    for model, kinds in (
        # What its first layer returns is measured too.
        (subclassed, set(TensorKind)),
        (graph, set(TensorKind)),
    ):
        model.compile("sgd", "mse")
        model(x)
        report = diagnose(model, x, x[:, :1], quick=policy == "float32")
        assert {found.kind for found in report.tensors} == kinds
        assert report.verdict is Verdict.NOT_NEEDED


def test_several_outputs_and_a_metric_of_each():
    inputs = tf_keras.Input((6,))
    shared = layers.Dense(5, name="shared")
    hidden = layers.concatenate([shared(inputs), shared(inputs * 2)])
    model = tf_keras.Model(
        inputs, {"a": layers.Dense(1, name="a")(hidden), "b": layers.Dense(2, name="b")(hidden)}
    )
    model.compile("sgd", {"a": "mse", "b": "mae"}, loss_weights={"a": 2.0, "b": 0.5})
    x, _ = some_data()
    before = state(model)
    report = diagnose(model, x, {"a": x[:, :1], "b": x[:, :2]}, batch_size=8, quick=True)
    assert_same(before, state(model))
    assert {"output:a", "output:b", "activation:shared"} <= {found.name for found in report.tensors}


def test_pure_float16_variables_make_the_prediction_unknown():
    x, y = some_data()
    model = classifier("float16")
    report = diagnose(model, x, y)
    assert report.prediction.verdict is Verdict.UNKNOWN
    assert "cannot show what it lost" in report.prediction.reason
    # In float16 it is measured beside itself at a high scale.
    assert report.verdict is Verdict.NOT_NEEDED


def test_a_dataset():
    x, y = some_data()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    assert diagnose(classifier(), data, batches=2, quick=True).samples == 16


def test_a_model_that_is_not_ready():
    x, y = some_data()
    model = tf_keras.Sequential([layers.Dense(1)])
    with pytest.raises(ArgumentError, match=r"is not compiled.*model\.compile"):
        diagnose(model, x, y)
    model.compile("sgd", "mse")
    with pytest.raises(ArgumentError, match="no trainable variables yet"):
        diagnose(model, x, y)
    model(x)
    model.compile("sgd")
    with pytest.raises(ArgumentError, match="without a loss"):
        diagnose(model, x, y)
