"""`diagnose` on every backend: what it measures, what it says, and that it leaves no trace."""

from __future__ import annotations

import functools
import math

import keras
import numpy as np
import pytest
from keras import layers

from backends.support import BACKEND, arrays
from lossscale import FixedScale
from lossscale.demo import experiment, images, training
from lossscale.diagnostics import (
    GradientHistogram,
    GradientReport,
    TensorKind,
    Thresholds,
    Verdict,
    diagnose,
)
from lossscale.errors import ArgumentError, ArgumentTypeError
from seeding import seed

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(autouse=True)
def _float32_policy_and_fixed_seed():
    if BACKEND == "torch":
        import torch

        # The arrays are small. On a busy machine two threads wait for each other for minutes.
        torch.set_num_threads(1)
    seed(0)
    yield
    keras.config.set_dtype_policy("float32")


def some_data(rows=24, features=6, classes=4):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, features)).astype(np.float32), rng.integers(
        classes, size=rows
    )


def classifier(policy="float32"):
    """Everything that has a state: statistics, random seeds, metrics, slots."""
    seed(0)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, name="first", kernel_regularizer="l2"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Dropout(0.5, seed=1),
            layers.Dense(4, activation="softmax", dtype="float32", name="last"),
        ],
        name="classifier",
    )
    keras.config.set_dtype_policy("float32")
    # tests/conformance/test_own_steps.py has models whose steps are graphs of TensorFlow.
    model.compile(
        "adam",
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=BACKEND == "jax",
        run_eagerly=BACKEND == "tensorflow",
    )
    return model


def state(model):
    return {
        "variables": arrays(model.variables),
        "optimizer": arrays(model.optimizer.variables),
        "metrics": arrays(model.metrics_variables),
        "policies": [layer.dtype_policy for layer in model._flatten_layers()],
        "attributes": [sorted(vars(layer)) for layer in model._flatten_layers()],
        "loss": model._compile_loss,
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        for one, other in zip(value, after[key], strict=True) if isinstance(value, list) else ():
            assert np.array_equal(one, other), key
        assert isinstance(value, list) or value is after[key], key


def tensor(report, name):
    return next(found for found in report.tensors if found.name == name)


def values_of(report, name):
    """The histogram of one tensor."""
    return tensor(report, name).histogram


@pytest.mark.parametrize(
    ("policy", "trained"), [("mixed_float16", False), ("float32", True)], ids=["fresh", "trained"]
)
def test_the_model_is_left_as_it_was(policy, trained):
    x, y = some_data()
    model, untouched = classifier(policy), classifier(policy)
    if trained:
        for each in (model, untouched):
            each.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    before = state(model)
    diagnose(model, x, y, batch_size=8, batches=3)
    assert_same(before, state(model))
    # The states that nobody thought of show in what comes next.
    for each in (model, untouched):
        each.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert_same(
        {"all": arrays(untouched.variables + untouched.optimizer.variables)},
        {"all": arrays(model.variables + model.optimizer.variables)},
    )


def test_the_model_is_left_as_it_was_by_an_exception():
    x, y = some_data()
    model = classifier("mixed_float16")
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
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
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, name="linear")], name="net")
    model.compile("sgd", "mse")
    kernel = keras.ops.convert_to_numpy(model.trainable_variables[0].value)
    report = diagnose(model, x, y, batch_size=8, quick=True)
    error = x @ kernel - y
    assert report.samples == 8
    expected = {
        "net/linear/kernel": 2 / 8 * x.T @ error,
        "net/linear/bias": 2 / 8 * error.sum(axis=0),
        "output:linear": 2 / 8 * error,
    }
    assert {found.name for found in report.tensors} == set(expected)
    for found in report.tensors:
        gradient = expected[found.name]
        assert found.histogram.size == gradient.size
        assert found.histogram.amax == pytest.approx(np.abs(gradient).max(), rel=1e-4)
        assert found.histogram.mass == pytest.approx(np.abs(gradient).sum(), rel=1e-4)


@pytest.mark.parametrize(
    "ending",
    [
        [layers.Dense(4, activation="softmax", name="end")],
        [layers.Dense(4), layers.Activation("softmax", name="end")],
        [layers.Dense(4), layers.Softmax(name="end")],
    ],
    ids=["argument", "Activation", "Softmax"],
)
def test_behind_a_softmax_the_gradient_is_that_of_the_logits(ending):
    x, y = some_data(rows=8)
    # The layers of the parameters are made once, and must not keep their variables.
    ending = [layer.__class__.from_config(layer.get_config()) for layer in ending]
    model = keras.Sequential([keras.Input((6,)), *ending])
    model.compile("sgd", "sparse_categorical_crossentropy")
    report = diagnose(model, x, y, batch_size=8, quick=True)
    expected = (model.predict(x, verbose=0) - np.eye(4)[y]) / 8
    (output,) = (found for found in report.tensors if found.kind is TensorKind.OUTPUT)
    assert output.name == "output:end"
    assert output.histogram.mass == pytest.approx(np.abs(expected).sum(), rel=1e-3)
    assert output.histogram.amax == pytest.approx(np.abs(expected).max(), rel=1e-3)
    # What the last weights return is the same tensor.
    assert not any(found.kind is TensorKind.ACTIVATION for found in report.tensors)


def test_dividing_the_loss_shifts_every_histogram():
    data = images.load_digits(0)
    model = training.build_model("float32", seed=0)
    reports = []
    for power in (0, 10, 30):
        model.compile("sgd", training.averaged_loss(2**power))
        reports.append(diagnose(model, data.images, data.labels, batches=1, quick=True))
    whole, *divided = reports
    for power, report in zip((10, 30), divided, strict=True):
        for found, same in zip(whole.ranges, report.ranges, strict=True):
            # Constants that keep a logarithm from 0 are not divided with the loss.
            assert same.histogram.amax * 2.0**power == pytest.approx(found.histogram.amax, rel=1e-5)
            assert same.histogram.mass * 2.0**power == pytest.approx(found.histogram.mass, rel=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_a_16_bit_model_is_measured_in_float32(policy):
    data = images.load_digits(0)
    models = {name: training.build_model(name, seed=0) for name in ("float32", policy)}
    models["float32"].set_weights(models[policy].get_weights())
    reports = {}
    for name, model in models.items():
        model.compile("sgd", training.averaged_loss(experiment.OUTPUTS))
        reports[name] = diagnose(model, data.images, data.labels, batches=2, quick=True)
    assert reports[policy].measured_in == "float32"
    assert reports[policy].policy == policy
    assert f"dtype policy is {policy}" in str(reports[policy])
    assert "dtype policy" not in str(reports["float32"])
    for found, same in zip(reports["float32"].ranges, reports[policy].ranges, strict=True):
        # Sums of several threads may round otherwise from run to run.
        assert same.kind is found.kind
        assert same.histogram.size == found.histogram.size
        assert same.histogram.mass == pytest.approx(found.histogram.mass, rel=1e-4)


def test_the_plain_digits_do_not_need_scaling():
    data = images.load_digits(0)
    model = training.build_model("mixed_float16", seed=0)
    model.compile("sgd", training.averaged_loss(1))
    report = diagnose(model, data.images, data.labels, batch_size=experiment.BATCH)
    assert report.verdict is Verdict.NOT_NEEDED
    assert report.recommended_scale == 1.0
    assert report.suitable_scales[0] <= 1 <= report.suitable_scales[1]
    assert report.reason.startswith("In float16 no gradient gets better by scaling")
    assert report.prediction.verdict is Verdict.NOT_NEEDED
    assert "fit into float16 as they are" in report.prediction.reason


@pytest.fixture(scope="module")
def needy():
    """The digits as the demo trains them: the loss is averaged over 2**20 outputs."""
    data = images.load_digits(0)
    model = training.build_model("mixed_float16", seed=0)
    model.compile("sgd", training.averaged_loss(experiment.OUTPUTS))
    return diagnose(model, data.images, data.labels, batch_size=experiment.BATCH)


def test_the_averaged_digits_require_scaling(needy):
    assert needy.verdict is Verdict.REQUIRED
    assert needy.worst.kind is TensorKind.OUTPUT
    assert needy.worst.flushed_mass > 0.9
    lowest, highest = needy.suitable_scales
    assert lowest <= needy.recommended_scale <= highest
    assert f"FixedScale(2**{round(math.log2(needy.recommended_scale))})" in str(needy)
    for found in needy.tensors:
        assert found.histogram.flushed_mass("float16", needy.recommended_scale) <= 1e-3
        assert found.histogram.headroom_bits("float16", needy.recommended_scale) >= 2


def test_the_recommended_scale_trains_the_averaged_digits(needy):
    data = images.load_digits(0)
    recipes = {
        "float32": experiment.RECIPES[0],
        "unscaled": experiment.RECIPES[1],
        "recommended": experiment.Recipe("", "mixed_float16", FixedScale(needy.recommended_scale)),
    }
    accuracy = {
        name: training.train(recipe, data, epochs=6, seed=0).accuracy[-1]
        for name, recipe in recipes.items()
    }
    assert accuracy["float32"] > 0.9
    assert accuracy["unscaled"] < 0.3
    assert accuracy["recommended"] > accuracy["float32"] - 0.02


@pytest.mark.skipif(BACKEND != "tensorflow", reason="it is about gradients, not about a backend")
def test_gradients_outgrow_the_margin_while_the_network_learns():
    # The reason to recommend the middle of the suitable scales, and not one end.
    data = images.load_digits(0)
    seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
            keras.layers.Activation("softmax"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(experiment.LEARNING_RATE, momentum=0.9), training.averaged_loss(1)
    )
    scales = []
    for epochs in (1, 7):
        scales.append(
            diagnose(model, data.images, data.labels, batch_size=64, batches=22, quick=True)
        )
        model.fit(data.images, data.labels, batch_size=64, epochs=epochs, verbose=0)
    scales.append(diagnose(model, data.images, data.labels, batch_size=64, batches=22, quick=True))
    (low_at_first, high_at_first), (_, high_soon), (low_at_last, _) = (
        report.suitable_scales for report in scales
    )
    assert high_soon < high_at_first / 4
    assert low_at_last > low_at_first * 4


def test_each_other_format_has_its_own_verdict(needy):
    assert needy.with_format("bfloat16").verdict is Verdict.NOT_NEEDED
    assert needy.with_format("float8_e5m2").verdict is Verdict.REQUIRED
    strict = needy.with_format("float8_e4m3fn", Thresholds(flushed_mass=1e-8))
    assert strict.verdict is Verdict.INSUFFICIENT
    assert strict.recommended_scale is None


def test_a_report_can_be_written_and_read(needy):
    assert GradientReport.from_json(needy.to_json()) == needy


def test_layers_are_as_bad_as_their_worst_gradient(needy):
    assert {layer.name for layer in needy.layers} == {found.layer for found in needy.tensors}
    for layer in needy.layers:
        found = [each for each in needy.tensors if each.layer == layer.name]
        assert layer.verdict is max((each.weight for each in found), key=lambda v: v.severity)
        assert layer.worst is found[0]
    variables = [each for each in needy.tensors if each.kind is TensorKind.VARIABLE]
    assert needy.total == GradientHistogram.merge(each.histogram for each in variables)


def compiled(model, loss="mse", **arguments):
    model.compile("sgd", loss, **arguments)
    return model


def two_outputs():
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((6,), name="b")}
    shared = layers.Dense(5, name="shared")
    hidden = layers.concatenate([shared(inputs["a"]), shared(inputs["b"])])
    outputs = {
        "one": layers.Dense(1, name="one")(hidden),
        "two": layers.Dense(4, activation="softmax", name="two")(hidden),
    }
    return compiled(
        keras.Model(inputs, outputs),
        {"one": "mse", "two": "sparse_categorical_crossentropy"},
        loss_weights={"one": 2.0, "two": 0.5},
    )


def test_several_inputs_and_outputs_and_a_shared_layer():
    x, y = some_data()
    model = two_outputs()
    before = state(model)
    report = diagnose(model, {"a": x, "b": x * 2}, {"one": x[:, :1], "two": y}, batch_size=8)
    assert_same(before, state(model))
    names = {found.name for found in report.tensors}
    assert {"output:one", "output:two", "activation:shared"} <= names
    # It is called twice in each batch.
    assert values_of(report, "activation:shared").size == 3 * 2 * 8 * 5
    alone = compiled(keras.Model(model.inputs, model.outputs[0]))
    doubled = diagnose(alone, {"a": x, "b": x * 2}, x[:, :1], batch_size=8, quick=True)
    one = values_of(report, "output:one")
    assert one.amax == pytest.approx(2 * values_of(doubled, "output:one").amax, rel=1e-5)


def test_a_model_in_a_model():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(5, name="in"), layers.ReLU()])
    inputs = keras.Input((6,))
    outer = keras.Model(inputs, inner(layers.Dense(6, name="out")(inputs)))
    report = diagnose(compiled(outer), some_data()[0], np.zeros((24, 5), np.float32), quick=True)
    kinds = [found.kind for found in report.tensors]
    assert kinds.count(TensorKind.OUTPUT) == 1
    assert any(found.name.endswith("out") for found in report.tensors)
    assert len([kind for kind in kinds if kind is TensorKind.VARIABLE]) == 4


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.dense = layers.Dense(1)
        self.noise = layers.GaussianNoise(0.1)

    def call(self, x, training=None):
        self.add_loss(keras.ops.sum(keras.ops.cast(x, "float32")) * 0.0)
        return self.noise(self.dense(x), training=training)


class OwnLoss(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.cast(y_pred, "float32") ** 2) / 2.0**30


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_subclassed_model(policy):
    keras.config.set_dtype_policy(policy)
    x, _ = some_data()
    model = compiled(Subclassed())
    model(x)
    before = state(model)
    report = diagnose(model, x, x[:, :1])
    assert_same(before, state(model))
    assert {found.kind for found in report.tensors} == {TensorKind.OUTPUT, TensorKind.VARIABLE}
    assert tensor(report, "output:subclassed").histogram.size == 24
    assert report.measured_in == "float32"
    assert report.verdict is Verdict.NOT_NEEDED


def test_a_loss_of_the_models_own():
    x, _ = some_data()
    model = OwnLoss()
    model.compile("sgd")
    model(x)
    assert diagnose(model, x).verdict is Verdict.REQUIRED


def test_an_embedding_counts_the_rows_that_are_used():
    tokens = np.random.default_rng(0).integers(10, size=(16, 5))
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(10, 3, mask_zero=True, name="embedding"),
            layers.LSTM(4, name="lstm"),
            layers.Dense(1, name="end"),
        ]
    )
    report = diagnose(compiled(model), tokens, np.ones((16, 1)), batch_size=16, quick=True)
    names = [found.name for found in report.tensors]
    embedding = next(name for name in names if name.endswith("embeddings"))
    assert values_of(report, embedding).size == 10 * 3
    assert any(name.endswith("recurrent_kernel") for name in names)
    assert any(name.startswith("activation:") and name.endswith("lstm") for name in names)


def test_attention_and_normalization_have_no_false_alarm():
    # The gradient of the keys' bias, and of a bias in front of a batch normalization, is zero but
    # for rounding errors: all of it would be lost, and nothing with it.
    inputs = keras.Input((8, 6))
    hidden = layers.Conv1D(32, 3, padding="same", name="conv")(inputs)
    hidden = layers.ReLU()(layers.BatchNormalization(name="norm")(hidden))
    hidden = layers.MultiHeadAttention(2, 8, name="attention")(hidden, hidden)
    outputs = layers.Dense(4, activation="softmax")(layers.GlobalAveragePooling1D()(hidden))
    model = compiled(keras.Model(inputs, outputs), "sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((256, 8, 6)), rng.integers(4, size=256)
    report = diagnose(model, x, y, batch_size=64)
    for name in ("conv/bias", "key/bias"):
        noise = next(found for found in report.tensors if found.name.endswith(name))
        assert noise.weight is Verdict.UNKNOWN
        assert report.cells(noise)[-1] == "negligible"
    assert report.prediction.verdict is Verdict.NOT_NEEDED
    if BACKEND == "jax":
        # On a processor JAX has no attention in float16.
        assert report.verdict in (Verdict.NOT_NEEDED, Verdict.UNKNOWN)
        assert report.verdict is Verdict.NOT_NEEDED or "F16" in report.reason
    else:
        assert report.verdict is Verdict.NOT_NEEDED


def test_sample_weights_weigh():
    x, y = some_data()
    reports = [
        diagnose(classifier(), x, y, sample_weight=np.full(24, weight), quick=True)
        for weight in (1.0, 2.0**-20)
    ]
    plain, light = (values_of(report, "output:last") for report in reports)
    assert light.mass == pytest.approx(plain.mass * 2.0**-20, rel=1e-5)


def test_a_frozen_layer_has_no_row():
    x, y = some_data()
    model = classifier()
    model.get_layer("first").trainable = False
    names = [found.name for found in diagnose(model, x, y, quick=True).tensors]
    assert not any("first" in name for name in names)
    assert any("last" in name for name in names)


def test_a_variable_that_the_loss_does_not_depend_on():
    inputs = keras.Input((6,))
    model = keras.Model(
        inputs, [layers.Dense(1, name="used")(inputs), layers.Dense(1, name="idle")(inputs)]
    )
    model.compile("sgd", ["mse", None])
    x, _ = some_data()
    report = diagnose(model, x, [x[:, :1], x[:, :1]])
    idle = next(found for found in report.tensors if found.name.endswith("idle/kernel"))
    assert idle.weight is Verdict.UNKNOWN
    # JAX gives a gradient of zeros where the others give none.
    assert idle.reason in ("The loss does not depend on it.", "Every element is zero.")
    assert report.verdict is Verdict.NOT_NEEDED


class HardCast(layers.Layer):
    def __init__(self):
        super().__init__(name="cast")
        self.dense = layers.Dense(3)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return keras.ops.cast(self.dense(x), "float16")


def test_a_layer_that_insists_on_float16_makes_the_prediction_unknown():
    x, _ = some_data()
    model = keras.Sequential([keras.Input((6,)), HardCast(), layers.Dense(1)])
    report = diagnose(compiled(model), x, x[:, :1], quick=True)
    assert report.verdict is Verdict.UNKNOWN
    assert report.recommended_scale is None
    assert "cast" in report.reason
    assert "cannot show what it lost" in report.reason


def test_gradients_that_are_not_finite_make_the_verdict_unknown():
    x, y = some_data()
    x[3, 0] = np.inf
    report = diagnose(classifier(), x, y)
    assert report.verdict is Verdict.UNKNOWN
    assert "infinite or NaN in float32, before any scaling" in report.reason
    predicted = diagnose(classifier(), x, y, quick=True)
    assert "infinite or NaN before any scaling" in predicted.reason


def test_the_same_rows_are_picked_every_time_and_each_once():
    seen = []

    class Watching(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    x = np.arange(20, dtype=np.float32)[:, None]
    model = compiled(Watching())
    model(x)

    def loss(y, prediction):
        return keras.ops.mean((prediction - y) ** 2)

    model.compile("sgd", loss)
    first, again = (
        diagnose(model, x, x, batch_size=5, after_batch=seen.append, quick=True) for _ in range(2)
    )
    assert [found.histogram.mass for found in first.ranges] == pytest.approx(
        [found.histogram.mass for found in again.ranges], rel=1e-5
    )
    assert seen == [1, 2, 3, 4] * 2
    assert (first.batches, first.samples) == (4, 20)
    assert diagnose(model, x, x, batch_size=6, batches=9, quick=True).samples == 18
    assert diagnose(model, x, x, batch_size=64, batches=9, quick=True).samples == 20


def batches_from(kind, x, y):
    if kind == "generator":
        return ((x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8))
    if kind == "PyDataset":

        class Rows(keras.utils.PyDataset):
            def __len__(self):
                return len(x) // 8

            def __getitem__(self, number):
                return x[8 * number : 8 * number + 8], y[8 * number : 8 * number + 8]

        return Rows()
    if kind == "tf.data":
        tf = pytest.importorskip("tensorflow")
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    return torch.utils.data.DataLoader(data, batch_size=8)


@functools.cache
def report_on_a_list():
    x, y = some_data()
    return diagnose(classifier(), iter([(x[:8], y[:8]), (x[8:16], y[8:16])]), quick=True)


@pytest.mark.parametrize("kind", ["generator", "PyDataset", "tf.data", "DataLoader"])
def test_batches_can_come_from_an_iterable(kind):
    x, y = some_data()
    report = diagnose(classifier(), batches_from(kind, x, y), batches=2, quick=True)
    assert (report.batches, report.samples) == (2, 16)
    for found, expected in zip(report.ranges, report_on_a_list().ranges, strict=True):
        assert found.name == expected.name
        assert found.histogram.mass == pytest.approx(expected.histogram.mass, rel=1e-5)


def test_what_is_no_model():
    with pytest.raises(ArgumentTypeError, match="must be a compiled model of Keras 3"):
        diagnose(layers.Dense(1), np.zeros((2, 2)))


def test_a_model_that_is_not_ready():
    x, y = some_data()
    model = keras.Sequential([layers.Dense(1)])
    with pytest.raises(ArgumentError, match=r"is not compiled.*model\.compile"):
        diagnose(model, x, y)
    model.compile("sgd", "mse")
    with pytest.raises(ArgumentError, match="no trainable variables yet"):
        diagnose(model, x, y)
    assert not model.built
    model(x)
    model.trainable = False
    with pytest.raises(ArgumentError, match="no trainable variables"):
        diagnose(model, x, y)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd")
    with pytest.raises(ArgumentError, match="without a loss"):
        diagnose(model, x, y)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y": np.zeros(23)}, r"same number of rows.*x: \[24\], y: \[23\]"),
        ({"sample_weight": np.zeros(3)}, r"sample_weight: \[3\]"),
        ({"x": np.zeros((0, 6)), "y": np.zeros(0)}, "same number of rows, at least one"),
        ({"x": [], "y": None}, "same number of rows, at least one"),
        ({"x": iter([])}, "`y` and `sample_weight` must be None"),
        ({"x": iter([]), "y": None}, "no batch"),
        ({"x": iter([(1, 2, 3, 4)]), "y": None}, "4 parts"),
        ({"y": None}, "`y` is missing: the loss of the model compares"),
        ({"x": iter([(np.zeros((4, 6)),)]), "y": None}, r"or in batches \(x, y\)"),
        ({"y": np.zeros((24, 3, 5))}, r"`y` does not fit .*\(24, 3, 5\), for outputs of the shape"),
        (
            {"x": np.zeros((24, 7))},
            r"`x` must have the shape \(rows, 6\) for the input .*\(24, 7\)",
        ),
        ({"x": np.zeros(24)}, r"`x` must have the shape \(rows, 6\) .*\(24,\)"),
        ({"x": [np.zeros((24, 6))] * 2}, "`x` must have one array for each input of the model"),
        (
            {"x": np.array([["a"] * 6] * 24)},
            "`x` must hold numbers. Received: an array of dtype <U",
        ),
        ({"y": np.array(["a"] * 24)}, "`y` must hold numbers"),
        ({"y": np.array([None] * 24)}, "`y` must hold numbers. Received: an array of dtype object"),
        ({"sample_weight": np.array(["1"] * 24)}, "`sample_weight` must hold numbers"),
        ({"batches": 0}, "`batches`"),
        ({"batch_size": -1}, "`batch_size`"),
        ({"format": "float99"}, "`format` must be one of"),
    ],
    ids=[
        "rows of y",
        "rows of sample_weight",
        "no rows",
        "an empty list",
        "y beside batches",
        "no batch",
        "a batch of 4",
        "no y",
        "no y in batches",
        "shape of y",
        "shape of x",
        "dimensions of x",
        "too many inputs",
        "texts in x",
        "texts in y",
        "objects in y",
        "texts in sample_weight",
        "batches",
        "batch_size",
        "format",
    ],
)
def test_bad_arguments_change_nothing(arguments, message):
    x, y = some_data()
    model = classifier()
    before = state(model)
    with pytest.raises(ArgumentError, match=message):
        diagnose(model, **{"x": x, "y": y, **arguments})
    assert_same(before, state(model))


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch draws from a state of its own")
def test_the_random_state_of_torch_is_left_as_it_was():
    import torch

    x, _ = some_data()
    model = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5), layers.Dense(4)])
    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(x[:, :4]))
    before = torch.get_rng_state()
    diagnose(compiled(model), torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow has a seed of eager mode")
def test_the_seed_of_tensorflow_is_left_as_it_was():
    import tensorflow as tf

    x, y = some_data()
    drawn = []
    for diagnosed in (False, True):
        model = classifier()
        tf.random.set_seed(1)
        if diagnosed:
            diagnose(model, x, y)
        drawn.append(tf.random.uniform([3]).numpy().tolist())
    assert drawn[0] == drawn[1]
