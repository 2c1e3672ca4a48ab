"""Passes of Keras models, beside the gradients that the framework gives for the same loss."""

import numpy as np
import pytest

import keras_cases as cases
from keras_cases import BACKEND, LAYERS, RANDOM_LAYERS, keras, layers, ops, wide
from lossscale.diagnosis import diagnose
from lossscale.diagnosis.keras import KerasGradientFunction
from lossscale.errors import ArgumentError, ArgumentTypeError

pytestmark = pytest.mark.usefixtures("compiled_quickly")
SCALE = 2.0**8


@pytest.fixture(autouse=True)
def _float32_policy_and_fixed_seed():
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    yield
    cases.set_policy("float32")


def own(model, x, y, scale=1.0):
    """The gradients of the compiled loss, taken by hand."""

    def loss_of(model):
        y_pred = model(ops.convert_to_tensor(x), training=True)
        return ops.mean((wide(y_pred) - ops.convert_to_tensor(y)) ** 2)

    return cases.gradients(model, loss_of, scale)


def assert_alike(found, expected, most):
    assert len(found.gradients) == len(expected)
    # A gradient that is 0 but for rounding is rounded otherwise.
    least = 1e-2 * max(np.linalg.norm(each) for each in expected if each is not None)
    for (name, gradient), wanted in zip(found.gradients.items(), expected, strict=True):
        if wanted is None:
            assert gradient is None or not gradient.any()
        elif "embeddings" in name:
            # Of a sparse one the rows that are in it, in any order.
            rows = [each[np.abs(each).sum(-1) > 0] for each in (gradient, wanted)]
            assert BACKEND != "tensorflow" or len(gradient) == len(rows[1])
            assert cases.error(*(np.sort(each, axis=0) for each in rows)) < most
        else:
            assert cases.error(gradient, wanted, least) < most, name


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_the_framework(kind):
    model, x, y = cases.with_layer(*LAYERS[kind])
    run = KerasGradientFunction(model)
    wider = run((x, y), 1.0, False)
    assert_alike(wider, own(model, x, y), 1e-5)
    narrow, *_ = cases.with_layer(*LAYERS[kind], policy="mixed_float16")
    narrow.set_weights(model.get_weights())
    expected = own(narrow, x, y, SCALE)
    # The framework may round otherwise inside of a compiled pass.
    most = 2e-2 if BACKEND == "jax" else 5e-3
    found = run((x, y), SCALE, True)
    assert_alike(found, expected, most)
    if kind != "MaxPooling2D":
        # Float16 rounds by more than what two passes in float32 may differ by.
        assert any(
            cases.error(gradient, wider.gradients[name] * SCALE) > 1e-5
            for name, gradient in found.gradients.items()
            if gradient is not None
        )


@pytest.mark.parametrize("kind", RANDOM_LAYERS)
def test_random_numbers_are_those_of_float32_and_the_same_each_time(kind):
    _, x, y = cases.with_layer(RANDOM_LAYERS[kind], (5, 2))
    made = [layers.Dense(2), RANDOM_LAYERS[kind](), layers.Flatten(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((5, 2)), *made])
    run = KerasGradientFunction(cases.compiled(model, cases.divided(1.0)))
    first, again = (run((x, y), 1.0, False).gradients for _ in range(2))
    narrow = run((x, y), 1.0, True).gradients
    for name, gradient in first.items():
        assert np.array_equal(gradient, again[name])
        assert cases.error(narrow[name], gradient) < 0.02, name


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_the_reference_is_float32_whatever_the_policy(policy):
    model, x, y = cases.with_layer(lambda: layers.Dense(4), (6,), policy)
    plain, *_ = cases.with_layer(lambda: layers.Dense(4), (6,))
    plain.set_weights(model.get_weights())
    run = KerasGradientFunction(model)
    before = [layer.dtype_policy for layer in model._flatten_layers()]
    assert_alike(run((x, y), 1.0, False), own(plain, x, y), 1e-5)
    assert [layer.dtype_policy for layer in model._flatten_layers()] == before
    assert ("own" in run.setting) == ("float16" in policy.replace("bfloat16", ""))


def test_layers_that_ask_for_a_dtype_keep_it():
    model = keras.Sequential(
        [
            keras.Input((5, 6)),
            layers.Bidirectional(layers.LSTM(3), name="both"),
            layers.Dense(8, name="narrow"),
            layers.Dense(1, dtype="float32", name="head"),
        ]
    )
    x = np.random.default_rng(0).standard_normal((8, 5, 6)).astype(np.float32)

    def narrow(model):
        found = set()

        def loss_fn(model, batch):
            flat = model._flatten_layers()
            found.update(layer.name for layer in flat if layer.compute_dtype == "float16")
            return ops.mean(wide(model(batch[0])))

        KerasGradientFunction(model, loss_fn)((x, None), 1.0, True)
        return found

    assert "narrow" in narrow(model)
    assert "head" not in narrow(model)
    # In a model that was made from its configuration, every layer has one.
    assert "head" in narrow(keras.models.clone_model(model))
    # The model returns float32, whose range does not end.
    report = diagnose(cases.compiled(model), x, x[:, 0, :1] * 1e6, max_batches=1)
    assert report.verdict != "cannot help"


# --- What is watched -----------------------------------------------------------------------------


def chain(activation=None, scale=1.0):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, activation=activation, name="first", kernel_initializer="ones"),
            layers.Dense(1, name="last", use_bias=False),
        ]
    )
    return cases.compiled(model, cases.divided(scale))


def test_targets_beyond_float16_are_named_if_the_output_has_to_reach_them():
    x, classes = cases.some_data()
    far = np.linspace(0, 90000, 24, dtype=np.float32)[:, None]
    report = diagnose(chain(scale=2.0**30), x, far)
    assert report.verdict == "cannot help"
    assert "the targets are beyond the range of float16" in " ".join(str(report).split())
    # For the same reason whatever the structure and the dtype of the targets.
    y = {"one": x[:, :1], "two": far.astype(np.int64)}
    assert diagnose(two_outputs(), {"a": x, "b": x}, y).verdict == "cannot help"

    def loss_fn(model, batch):
        return ops.mean((wide(model(batch[0])) - ops.log(batch[1] + 1)) ** 2)

    # What a function of the user's makes of them is not known.
    assert diagnose(chain(), x, far, loss_fn=loss_fn).verdict == "not needed"
    sparse = cases.compiled(
        keras.Sequential([keras.Input((6,)), layers.Dense(4, activation="softmax")]),
        lambda y, y_pred: ops.mean(wide(y_pred), axis=-1) + 0 * wide(y)[:, 0],
    )
    assert diagnose(sparse, x, classes[:, None] * 10**6).verdict != "cannot help"


class Casts(layers.Layer):
    """Casts to a dtype and back, whatever the policy."""

    def __init__(self, to):
        super().__init__()
        self.to = to

    def call(self, x):
        return ops.cast(ops.cast(x, self.to), x.dtype)


@pytest.mark.parametrize("divisor", [2.0**27, 2.0**21, 1.0])
def test_a_model_that_casts_to_float16_itself_has_a_reference_in_float32(divisor):
    def model(to):
        keras.utils.set_random_seed(0)
        made = [layers.Dense(8, activation="tanh"), Casts(to), layers.Dense(1)]
        return cases.compiled(keras.Sequential([keras.Input((6,)), *made]), cases.divided(divisor))

    x, _ = cases.some_data()
    y = x[:, :1]
    report = diagnose(model("float16"), x, y, batch_size=24, max_batches=1)
    lost = divisor > 1
    assert report.verdict == ("needed" if lost else "not needed")
    assert ("the model casts to float16 itself" in " ".join(str(report).split())) == lost
    expected = own(model("float32"), x, y)
    for gradient, wanted in zip(report.measurement.gradients, expected, strict=True):
        assert gradient.largest == pytest.approx(np.abs(wanted).max() / divisor, rel=1e-2)
        assert min(gradient.errors.values()) < 0.02


# --- Kinds of models -----------------------------------------------------------------------------


def two_outputs():
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((6,), name="b")}
    shared = layers.Dense(5, name="shared")
    hidden = layers.concatenate([shared(inputs["a"]), shared(inputs["b"])])
    outputs = {name: layers.Dense(1, name=name)(hidden) for name in ("one", "two")}
    model = keras.Model(inputs, outputs)
    return cases.compiled(
        model, {"one": "mse", "two": "mae"}, loss_weights={"one": 2.0, "two": 0.5}
    )


def test_several_inputs_and_outputs():
    x, _ = cases.some_data()
    model, given = two_outputs(), {"a": x, "b": x * 2}
    y = {"one": x[:, :1], "two": x[:, 1:2]}

    def loss_of(model):
        found = model({key: ops.convert_to_tensor(each) for key, each in given.items()})
        apart = {key: wide(each) - ops.convert_to_tensor(y[key]) for key, each in found.items()}
        return 2 * ops.mean(apart["one"] ** 2) + 0.5 * ops.mean(ops.abs(apart["two"]))

    expected = cases.gradients(model, loss_of)
    assert_alike(KerasGradientFunction(model)((given, y), 1.0, False), expected, 1e-5)
    assert diagnose(model, given, y, batch_size=8).verdict == "not needed"


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.inner = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="in")])
        self.end = layers.Dense(1, name="end")
        self.calls = 0

    def call(self, x, training=None):
        self.calls += 1
        self.add_loss(
            ops.mean(wide(x) ** 2) * 0.25 + ops.sum(wide(self.inner.layers[-1].bias)) * 3.0
        )
        return self.end(self.inner(x))


class OwnLoss(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(wide(y_pred) ** 2) / 2.0**30


def test_a_subclassed_model_with_losses_of_its_own():
    x, _ = cases.some_data()
    model = Subclassed()
    model(x)
    cases.compiled(model, cases.divided(1.0))
    calls = model.calls
    run = KerasGradientFunction(model)
    found = run((x, x[:, :1]), 1.0, False)
    bias = own(model, x, x[:, :1])[1] + 3.0
    assert cases.error(list(found.gradients.values())[1], bias) < 1e-5
    # An attribute that counts is no matter of a diagnosis.
    assert model.calls == calls + 1
    assert not getattr(model, "_losses_override", None)


def test_a_loss_that_the_model_computes_itself():
    x, _ = cases.some_data()
    model = OwnLoss()
    model.compile("sgd")
    model(x)
    assert diagnose(model, x).verdict == "needed"


def test_a_frozen_layer_and_one_that_the_loss_does_not_depend_on():
    inputs = keras.Input((6,))
    used, idle = (layers.Dense(1, name=name)(inputs) for name in ("used", "idle"))
    model = keras.Model(inputs, [used, idle])
    model.compile("sgd", ["mse", None])
    model.get_layer("used").use_bias = True
    x, _ = cases.some_data()
    y = [x[:, :1], x[:, :1]]
    report = diagnose(model, x, y)
    assert report.verdict == "not needed"
    model.get_layer("idle").trainable = False
    assert not any(
        "idle" in name for name in KerasGradientFunction(model)((x, y), 1.0, False).gradients
    )


# --- As it was -----------------------------------------------------------------------------------


def classifier(policy="float32"):
    """Everything that has a state: statistics, random seeds, metrics, slots."""
    keras.utils.set_random_seed(0)
    cases.set_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, name="first", kernel_regularizer="l2"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Dropout(0.5, seed=1),
            layers.GaussianNoise(0.1, seed=2),
            layers.Dense(4, activation="softmax", dtype="float32", name="last"),
        ]
    )
    cases.set_policy("float32")
    model.compile(
        "adam",
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=BACKEND == "jax",
        run_eagerly=BACKEND == "tensorflow",
    )
    return model


def state(model):
    arrays = [cases.numpy_of(each) for each in (*model.variables, *model.optimizer.variables)]
    arrays += [cases.numpy_of(each) for metric in model.metrics for each in metric.variables]
    flat = list(model._flatten_layers())
    return arrays, [
        *(layer.dtype_policy for layer in flat),
        *(sorted(vars(layer)) for layer in flat),
        getattr(model, "_compile_loss", None),
    ]


def assert_same(before, after):
    assert before[1] == after[1]
    for one, other in zip(before[0], after[0], strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(("policy", "trained"), [("mixed_float16", False), ("float32", True)])
def test_the_model_is_left_as_it_was(policy, trained):
    x, y = cases.some_data()
    model, untouched = classifier(policy), classifier(policy)
    for each in (model, untouched) if trained else ():
        keras.utils.set_random_seed(1)
        each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    before = state(model)
    numbers = np.random.get_state()[1].copy()
    diagnose(model, x, y, batch_size=8, max_batches=3)
    assert_same(before, state(model))
    assert np.array_equal(numbers, np.random.get_state()[1])
    # The states that nobody thought of show in what comes next.
    for each in (model, untouched):
        keras.utils.set_random_seed(1)
        each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_same((state(untouched)[0], []), (state(model)[0], []))


def test_the_model_is_left_as_it_was_by_an_exception():
    x, y = cases.some_data()
    model = classifier("mixed_float16")
    model.fit(x, y, batch_size=8, verbose=0)
    before = state(model)

    def fail(*arguments):
        raise KeyboardInterrupt

    def batches():
        yield x, y
        raise KeyboardInterrupt

    def late(model, batch):
        model(batch[0], training=True)
        raise ZeroDivisionError

    for error, arguments in (
        (KeyboardInterrupt, {"x": batches(), "y": None}),
        (KeyboardInterrupt, {"loss_fn": fail}),
        (ZeroDivisionError, {"loss_fn": late}),
        (ValueError, {"x": x[:, :5]}),
    ):
        with pytest.raises(error):
            diagnose(model, **{"x": x, "y": y, **arguments})
        assert_same(before, state(model))


# --- Data ----------------------------------------------------------------------------------------


def test_weights_weigh():
    x, y = cases.some_data()
    model = cases.compiled(
        keras.Sequential([keras.Input((6,)), layers.Dense(4)]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    assert diagnose(model, x, y).verdict == "not needed"
    assert diagnose(model, x, y, sample_weight=np.full(24, 2.0**-18)).verdict == "needed"


def loader(batches):
    return pytest.importorskip("torch").utils.data.DataLoader(batches, batch_size=None)


@pytest.mark.parametrize("places", [list, iter, loader], ids=["list", "generator", "DataLoader"])
def test_batches_can_come_from_many_places(places):
    x, y = cases.some_data()
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8)]
    model = cases.compiled(
        keras.Sequential([keras.Input((6,)), layers.Dense(4, activation="softmax")]),
        "sparse_categorical_crossentropy",
    )
    report = diagnose(model, places(batches))
    assert report.measurement.batches == 2
    assert report.verdict == "not needed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y": np.zeros(23)}, r"same number of rows.*\[23, 24\] rows"),
        ({"sample_weight": np.zeros(3)}, r"\[3, 24\] rows"),
        ({"x": np.zeros((0, 6)), "y": np.zeros(0)}, "same number of rows, at least one"),
        ({"x": iter([])}, "`y` and `sample_weight` must be None"),
        ({"x": iter([]), "y": None}, "at least one batch"),
        ({"x": iter([(1, 2, 3, 4)]), "y": None}, "4 parts"),
        ({"y": None}, "`y` is missing, and the loss of this model"),
        ({"x": iter([(np.zeros((4, 6)),)]), "y": None}, r"or in batches \(x, y\)"),
        # Keras' own message, as from `fit`.
        ({"x": np.zeros((24, 7))}, r"expected axis -1 .* to have value 6.*\(24, 7\)"),
        ({"max_batches": 0}, "`max_batches`"),
        ({"batch_size": -1}, "`batch_size`"),
        ({"loss_fn": lambda model, batch: None}, "must return the loss.*a NoneType"),
    ],
)
def test_bad_arguments_change_nothing(arguments, message):
    x, y = cases.some_data()
    model = classifier()
    before = state(model)
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        diagnose(model, **{"x": x, "y": y, **arguments})
    assert_same(before, state(model))


def test_a_model_that_is_not_ready():
    x, y = cases.some_data()
    with pytest.raises(ArgumentTypeError, match="must be a model of Keras 3"):
        diagnose(layers.Dense(1), x)
    model = keras.Sequential([layers.Dense(1)])
    with pytest.raises(ArgumentError, match=r"is not compiled.*model\.compile"):
        diagnose(model, x, y)
    model.compile("sgd", "mse")
    with pytest.raises(ArgumentError, match="not built yet"):
        diagnose(model, x, y)
    model(x)
    model.trainable = False
    with pytest.raises(ArgumentError, match="no trainable variables"):
        diagnose(model, x, y)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd")
    if BACKEND == "jax":
        # Keras takes 0 for the loss there.
        assert "every gradient is 0" in str(diagnose(model, x, y))
    else:
        with pytest.raises(ValueError, match="No loss to compute"):
            diagnose(model, x, y)
