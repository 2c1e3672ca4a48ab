"""Model files of every release load with the state of their optimizer (more: test_zoo.py)."""

import contextlib
import json
import sys

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
import support
from lossscale import registry
from lossscale.errors import ArgumentError, MissingPackageError, OldFileError
from lossscale.keras import LossScaleOptimizer
from lossscale_migration import describe_file, load_model, migrate_file
from lossscale_migration.numbered_arrays import load_arrays
from support import FAMILIES, FIXTURES, ONLY_NEW, OPTIMIZERS, WITNESS

H5 = sorted(FIXTURES.glob("h5/*.h5"))
# Keras says so on every HDF5 file; it is the format that this is about.
pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")


def arrays(path):
    """The weights and the optimizer's arrays as the file holds them, read by h5py alone."""
    with h5py.File(path) as file:
        group = file["optimizer_weights"]
        names = [getattr(n, "decode", lambda n=n: n)() for n in group.attrs["weight_names"]]
        dense = file["model_weights/dense/dense"]
        return [dense["kernel:0"][()], dense["bias:0"][()]], [group[name][()] for name in names]


@pytest.mark.parametrize("path", H5, ids=lambda path: path.stem)
def test_a_real_file_holds_what_h5py_finds_and_goes_on_as_computed_by_hand(path):
    model, (weights, state) = load_model(path), arrays(path)
    optimizer = model.optimizer
    assert type(optimizer) is LossScaleOptimizer
    assert optimizer.rule == lossscale.DynamicScale(8.0, 3)
    assert model.loss == "mse"
    support.assert_equal(model.get_weights(), weights)
    support.assert_equal(optimizer.get_weights(), state)
    assert support.number(optimizer.iterations) == 1
    assert support.number(optimizer.loss_scale) == 8.0

    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    # Loaded models are all compiled alike.
    model.run_eagerly = path != H5[0]
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    (kernel, bias), (_, *velocities) = weights, state
    error = 2.0 * (x @ kernel + bias - y) / len(x)
    slopes = [x.T @ error, error.sum(axis=0)]
    expected = [
        value + 0.9 * velocity - 0.1 * slope
        for value, velocity, slope in zip(weights, velocities, slopes, strict=True)
    ]
    support.assert_close(model.get_weights(), expected, rtol=1e-5, atol=1e-6)
    assert support.number(optimizer.iterations) == 2
    assert support.number(optimizer.dynamic_counter) == 1


def save(model, path):
    # tf_keras says of its older form that it is older.
    warns = path.suffix == ".h5" and isinstance(model, tf_keras.Model)
    with pytest.warns() if warns else contextlib.nullcontext():
        model.save(path)


def saved_by_tf_keras(family, case, path, **compiling):
    name, arguments = {**OPTIMIZERS, **ONLY_NEW}[case]
    model = support.dense(tf_keras)
    inner = getattr(FAMILIES[family], name)(learning_rate=0.01, **arguments)
    # Traced, Nadam of tf_keras multiplies its product of momentums once for each variable.
    compiling = {"loss": "mse", "run_eagerly": case == "nadam", **compiling}
    model.compile(WITNESS(inner, initial_scale=16.0), **compiling)
    support.fit(model, 2)
    save(model, path)
    return model


def assert_go_on(mine, theirs, steps=1, rtol=1e-4, atol=1e-5):
    """All that was loaded enters the first step."""
    for model in (mine, theirs):
        support.fit(model, steps)
    support.assert_close(mine.get_weights(), theirs.get_weights(), rtol, atol)


def warning_of(case):
    """What is known of skipped steps matters to Nadam alone, whose product is not in the file."""
    if case != "nadam":
        return contextlib.nullcontext()
    return pytest.warns(lossscale.LossScaleWarning, match="some of these were skipped")


@pytest.mark.parametrize("kind", ["keras", "older"])
@pytest.mark.parametrize("name", ["Nadam", "Adafactor"])
def test_files_that_lack_what_an_optimizer_sets_as_attributes(name, kind, tmp_path):
    """Nadam's product is not written; of Adafactor stand-ins that no step reads are missing."""
    model = support.dense(keras)
    inner = getattr(keras.optimizers, name)(0.01)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=16.0), "mse")
    support.fit(model, 2)
    path = tmp_path / "model.keras"
    model.save(path)
    other = support.dense(keras)
    other.compile(lossscale.LossScaleOptimizer(getattr(keras.optimizers, name)(0.01)), "mse")
    if kind == "keras":
        other = load_model(path)
    else:
        other.optimizer.build(other.trainable_variables)
        other.set_weights(model.get_weights())
        load_arrays(other.optimizer, support.values(inner.variables))
    assert_go_on(other, model, steps=2)


class Gauged(keras.optimizers.SGD):
    """Sets a variable as an attribute, which Keras' own class writes into no file."""

    def build(self, variables):
        super().build(variables)
        self.gauge = keras.Variable(0.0, name="gauge")


def test_what_a_file_has_no_values_for_is_said():
    variables = [keras.Variable([1.0, 2.0])]
    saved = keras.optimizers.LossScaleOptimizer(Gauged(0.01))
    saved.build(variables)
    optimizer = lossscale.LossScaleOptimizer(Gauged(0.01))
    optimizer.build(variables)
    with pytest.warns(lossscale.LossScaleWarning, match="gauge.*They stay as they are"):
        load_arrays(optimizer, support.values(saved.inner_optimizer.variables))


@pytest.mark.parametrize(
    ("family", "case", "form"),
    [
        *[("legacy", case, "h5") for case in OPTIMIZERS],
        *[("new", case, "h5") for case in (*OPTIMIZERS, *ONLY_NEW)],
        *[
            ("new", case, "keras")
            for case in ("momentum", "adam", "amsgrad", "rmsprop_all", "ema", "nadam")
        ],
    ],
)
def test_training_goes_on_as_in_tf_keras(family, case, form, tmp_path):
    path = tmp_path / f"model.{form}"
    theirs = saved_by_tf_keras(family, case, path)
    with warning_of(case):
        mine = load_model(path)
    assert support.number(mine.optimizer.iterations) == 2
    assert_go_on(mine, theirs)


def test_a_keras_file_of_a_legacy_optimizer_has_no_state_to_load(tmp_path):
    theirs = saved_by_tf_keras("legacy", "adam", tmp_path / "model.keras")
    mine = load_model(tmp_path / "model.keras")
    support.assert_close(mine.get_weights(), theirs.get_weights())
    assert support.number(mine.optimizer.iterations) == 0


def test_a_loss_of_ones_own_is_named_or_given(tmp_path):
    def unheard(y_true, y_pred):
        return tf.reduce_mean(tf.abs(y_true - y_pred), -1)

    path = tmp_path / "model.h5"
    saved_by_tf_keras("legacy", "adam", path, loss=unheard)
    support.fit(load_model(path, loss=unheard), 1)
    with pytest.raises(ValueError, match="unheard"):
        support.fit(load_model(path), 1)


WRAPPED = {
    "keras": (keras, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))),
    "ours": (keras, lambda: support.ours(keras.optimizers.Adam(0.01))),
    **{
        f"tf_keras {family}": (tf_keras, lambda family=family: WITNESS(FAMILIES[family].Adam(0.01)))
        for family in FAMILIES
    },
}


@pytest.mark.parametrize("form", ["h5", "keras"])
@pytest.mark.parametrize(
    ("kind", "steps"), [*((kind, 0) for kind in WRAPPED), ("keras", 2), ("ours", 2)]
)
def test_a_model_goes_on_trained_or_not(kind, steps, form, tmp_path):
    module, optimizer = WRAPPED[kind]
    # How layers are nested matters to the form alone.
    nested = kind == "keras" and steps
    theirs = (support.sequential if nested else support.dense)(module)
    theirs.compile(optimizer(), "mse")
    support.fit(theirs, steps)
    path = tmp_path / f"model.{form}"
    save(theirs, path)
    mine = load_model(path)
    assert isinstance(mine.optimizer, LossScaleOptimizer)
    assert support.number(mine.optimizer.iterations) == steps
    assert support.number(mine.optimizer.dynamic_counter) == steps
    assert_go_on(mine, theirs, steps=2)
    assert support.number(mine.optimizer.dynamic_counter) == steps + 2


def as_policy_of_2_3(text):
    """A layer's policy as TensorFlow 2.1 to 2.3 wrote it, with a loss scale."""
    loss_scale = {"class_name": "DynamicLossScale", "config": {"initial_loss_scale": 32768.0}}
    for policy in (
        '{"class_name": "Policy", "config": {"name": "mixed_float16"}}',
        '{"module": "keras.mixed_precision", "class_name": "Policy", '
        '"config": {"name": "mixed_float16"}, "registered_name": null}',
    ):
        other = {"name": "mixed_float16", "loss_scale": loss_scale}
        text = text.replace(policy, json.dumps({"class_name": "PolicyV1", "config": other}))
    assert "PolicyV1" in text
    return text


@pytest.mark.parametrize(
    ("form", "policy"), [("h5", "as it is"), ("h5", "2.3"), ("keras", "as it is")]
)
def test_a_model_in_mixed_precision(form, policy, tmp_path):
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        theirs = saved_by_tf_keras("new", "adam", tmp_path / f"model.{form}")
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
    path = tmp_path / f"model.{form}"
    if policy == "2.3":
        with h5py.File(path, "r+") as file:
            file.attrs["model_config"] = as_policy_of_2_3(file.attrs["model_config"])
    mine = load_model(path)
    assert [layer.compute_dtype for layer in mine.layers] == ["float16"] * 3
    assert [v.dtype for v in mine.trainable_variables] == ["float32"] * 6
    assert_go_on(mine, theirs, steps=2, rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("path", H5, ids=lambda path: path.stem)
def test_a_converted_model_is_the_same(path, tmp_path):
    new = migrate_file(path, tmp_path / "new.keras")
    model, expected = keras.saving.load_model(new), load_model(path)
    assert type(model.optimizer) is LossScaleOptimizer
    for one, other in ((model, expected), (model.optimizer, expected.optimizer)):
        support.assert_equal(support.values(one.variables), support.values(other.variables))
    (described,) = describe_file(new).optimizers
    assert (described.era, described.iterations) == ("lossscale on Keras 3", 1)
    assert described.slots == {"unnamed": 2}


def changed(tmp_path, change):
    """A copy of a real file, with its attributes changed."""
    path = tmp_path / "model.h5"
    path.write_bytes((FIXTURES / "h5/2.4.4_new.h5").read_bytes())
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def rewrite(text, other):
    def change(file):
        training = file.attrs["training_config"]
        assert text in training
        file.attrs["training_config"] = training.replace(text, other)

    return change


def without(attribute):
    return lambda file: file.attrs.__delitem__(attribute)


def without_wrapper(file):
    training = json.loads(file.attrs["training_config"])
    training["optimizer_config"] = training["optimizer_config"]["config"]["inner_optimizer"]
    file.attrs["training_config"] = json.dumps(training)


def one_array_less(file):
    group = file["optimizer_weights"]
    group.attrs["weight_names"] = group.attrs["weight_names"][:-1]
    del group["cond_1/SGD/dense/bias/momentum:0"]


def another_shape(file):
    group = file["optimizer_weights/cond_1/SGD/dense/bias"]
    del group["momentum:0"]
    group["momentum:0"] = np.zeros(3, "float32")


BROKEN = {
    "model_config": (without("model_config"), "no `model_config` and no optimizer"),
    "training_config": (without("training_config"), "without a training configuration"),
    "no optimizer": (rewrite('"optimizer_config"', '"nothing"'), "does not name an optimizer"),
    "plain": (without_wrapper, "its optimizer, SGD, has no loss scaling"),
    "unknown": (rewrite('"SGD", "config"', '"Unheard", "config"'), "'Unheard'"),
    "setting": (rewrite('"nesterov"', '"warp"'), "warp"),
    "scale": (rewrite('"initial_scale": 8.0', '"initial_scale": -8.0'), "`initial_scale`"),
    "not json": (rewrite('{"loss"', '"loss"'), "damaged or incomplete"),
    "array": (another_shape, r"shape \(3,\) in the file and \(1,\) here"),
    "momentum": (rewrite('"momentum": 0.8999999761581421', '"momentum": 0.0'), "SGD has "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_loaded_is_named(name, tmp_path):
    change, message = BROKEN[name]
    path = changed(tmp_path, change)
    with pytest.raises(OldFileError, match=message) as caught:
        load_model(path)
    assert str(caught.value).startswith(str(path))


def test_a_variable_without_state_is_fine_if_it_had_no_gradient(tmp_path):
    # TensorFlow made no slot for it; here it starts at zero.
    model = load_model(changed(tmp_path, one_array_less))
    (_, kernel, bias) = model.optimizer.get_weights()
    assert kernel.any()
    assert not bias.any()


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
    support.assert_close(mine.get_weights(), theirs.get_weights(), rtol=1e-5, atol=0)


def test_the_older_optimizer_stays_one(tmp_path):
    older = lossscale.experimental.LossScaleOptimizer
    theirs = small(FAMILIES["legacy"].SGD(0.1, momentum=0.9), older, loss_scale="dynamic")
    theirs.save(tmp_path / "model.h5")
    mine = load_model(tmp_path / "model.h5", framework="tf_keras")
    assert isinstance(mine.optimizer, older)
    assert float(mine.optimizer.loss_scale()) == 2.0**15


DENSE = FIXTURES / "zoo" / "2.3.4" / "s_dense_def.h5"


@pytest.mark.parametrize("framework", ["keras", "tf_keras"])
def test_a_file_of_any_name_stays_as_it_is(framework, tmp_path):
    for path in (DENSE, FIXTURES / "zoo" / "2.15.1" / "s_dense_new.keras"):
        content = path.read_bytes()
        for name in ("model", "model.bin"):
            copied = tmp_path / name
            copied.write_bytes(content)
            optimizer = load_model(copied, framework=framework).optimizer
            assert support.number(optimizer.iterations) == 3
            assert copied.read_bytes() == content


def own_loss(true, found):
    return found - true


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize("kind", ["function", "class"])
def test_a_loss_and_a_class_of_ones_own(kind, suffix, tmp_path):
    class Own(tf_keras.layers.Dense):
        pass

    class OwnLoss(tf_keras.losses.Loss):
        call = staticmethod(own_loss)

    path = tmp_path / f"model{suffix}"
    model = tf_keras.Sequential([Own(1, input_shape=(2,))])
    wrapped = WITNESS(tf_keras.optimizers.SGD())
    loss = own_loss if kind == "function" else OwnLoss()
    metrics = [own_loss, "mae"]
    model.compile(wrapped, loss, metrics=metrics, loss_weights=[2.0], run_eagerly=True)
    model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    model.save(path)
    with pytest.raises(OldFileError, match=r"tf_keras cannot create its model: .*Own"):
        load_model(path, framework="tf_keras")
    with pytest.raises(OldFileError, match=r"cannot create its loss.*Pass loss=\.\.\. instead"):
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
    # Other tests have imported it.
    registry.package.cache_clear()
    monkeypatch.delitem(sys.modules, "lossscale_migration.tf_keras_models", raising=False)
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    with pytest.raises(MissingPackageError, match=r'pip install "lossscale\[tf-keras\]"'):
        load_model(DENSE, framework="tf_keras")


# Optimizers of Keras with few and with many slots.
SLOTS = {
    **{name: (name, {}) for name in ("SGD", "RMSprop", "Adam", "Ftrl", "Nadam")},
    "momentum": ("SGD", {"momentum": 0.9}),
    "averaging": ("SGD", {"use_ema": True}),
    "accumulating": ("Adam", {"gradient_accumulation_steps": 2}),
    "amsgrad": ("Adam", {"amsgrad": True}),
}


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", SLOTS)
def test_a_file_of_this_library_loads_however_many_slots_it_has(name, layers, tmp_path):
    dense = [keras.layers.Dense(3) for _ in range(layers)]
    model = keras.Sequential([keras.Input((1,)), *dense])
    cls, settings = SLOTS[name]
    optimizer = support.ours(getattr(keras.optimizers, cls)(0.1, **settings), initial_scale=8)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    for variable in optimizer.inner_optimizer.variables[2:]:
        variable.assign(np.random.default_rng(0).normal(size=variable.shape))
    # That of accumulation is divided.
    optimizer.inner_optimizer._iterations.assign(7)
    optimizer.dynamic_scale.assign(32.0)
    for form in ("model.keras", "model.h5"):
        model.save(tmp_path / form)
        loaded = load_model(tmp_path / form).optimizer
        support.assert_equal(
            support.values(loaded.inner_optimizer.variables),
            support.values(optimizer.inner_optimizer.variables),
        )
        assert float(loaded.dynamic_scale) == 32.0


NAMES = (
    *("SGD", "Adam", "AdamW", "Nadam", "Ftrl", "RMSprop", "Adagrad", "Adadelta", "Lion"),
    *("Adafactor", "Adamax", "Lamb", "Muon"),
)
OF_KERAS = [name for name in NAMES if hasattr(keras.optimizers, name)]


def saved_by_keras(optimizer, path, *, wrapped, built=True):
    """A model with Keras' own loss scaling, in a file; returns the optimizer inside."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    finally:
        keras.config.set_dtype_policy("float32")
    if wrapped:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 64.0, 5)
    model.compile(optimizer, "mse")
    theirs = model.optimizer
    assert type(theirs) is keras.optimizers.LossScaleOptimizer
    if built:
        theirs.build(model.trainable_variables)
        random = np.random.default_rng(0)
        for variable in theirs.inner_optimizer.variables[2:]:
            variable.assign(random.normal(size=variable.shape))
        theirs.inner_optimizer.iterations.assign(7)
        theirs.step_counter.assign(3)
        theirs.dynamic_scale.assign(512.0)
    model.save(path)
    return theirs.inner_optimizer


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["by_compile", "by_hand"])
@pytest.mark.parametrize("name", OF_KERAS)
def test_the_loss_scale_of_keras_own_optimizer_arrives(name, wrapped, suffix, tmp_path):
    if (name, suffix) == ("Adafactor", ".h5"):
        pytest.skip("Keras gives two of its arrays one name, and cannot write this file")
    path = tmp_path / f"model{suffix}"
    theirs = saved_by_keras(getattr(keras.optimizers, name)(0.25), path, wrapped=wrapped)
    (found,) = describe_file(path).optimizers
    assert (found.optimizer, found.era, found.scaling) == (name, "Keras 3", "dynamic")
    assert (found.scale, found.good_steps, found.iterations) == (512.0, 3, 7)
    mine = load_model(path).optimizer
    assert type(mine) is LossScaleOptimizer
    rule = (64.0, 5) if wrapped else (2.0**15, 2000)
    assert mine.rule == lossscale.DynamicScale(*rule)
    assert support.number(mine.loss_scale) == 512.0
    assert support.number(mine.dynamic_counter) == 3
    assert support.number(mine.iterations) == 7
    assert type(mine.inner_optimizer) is type(theirs)
    # Without what their file lacks: Nadam's product, and Adafactor's stand-ins.
    own = mine.inner_optimizer.variables
    lacks = name in ("Nadam", "Adafactor")
    kept = [each for place, each in enumerate(own) if place < 2 or len(each.shape) or not lacks]
    support.assert_equal(support.values(kept), support.values(theirs.variables))


@pytest.mark.parametrize("schedule", [False, True], ids=["rate", "schedule"])
@pytest.mark.parametrize("given", ["name", "optimizer", "wrapped"])
def test_keras_own_optimizer_before_its_first_step(given, schedule, tmp_path):
    path = tmp_path / "model.keras"
    rate = keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5) if schedule else 0.001
    optimizer = "adam" if given == "name" else keras.optimizers.Adam(rate)
    saved_by_keras(optimizer, path, wrapped=given == "wrapped", built=False)
    (found,) = describe_file(path).optimizers
    assert (found.scaling, found.good_steps) == ("dynamic", None)
    mine = load_model(path).optimizer
    assert type(mine.inner_optimizer) is keras.optimizers.Adam
    assert support.number(mine.loss_scale) == (64.0 if given == "wrapped" else 2.0**15)
    assert support.number(mine.iterations) == 0


@pytest.mark.parametrize("name", ["adam", "nadam", "schedule"])
def test_a_name_and_a_schedule_with_a_state(name, tmp_path):
    path, given = tmp_path / "model.keras", name
    if name == "schedule":
        given = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5))
    theirs = saved_by_keras(given, path, wrapped=False)
    (found,) = describe_file(path).optimizers
    assert (found.optimizer, found.scale, found.iterations) == (type(theirs).__name__, 512.0, 7)
    mine = load_model(path).optimizer
    assert type(mine.inner_optimizer) is type(theirs)
    assert (support.number(mine.loss_scale), support.number(mine.iterations)) == (512.0, 7)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("name", OF_KERAS)
def test_an_optimizer_without_loss_scaling_is_not_taken_for_one_with_it(name, steps, tmp_path):
    path = tmp_path / "model.keras"
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(getattr(keras.optimizers, name)(), "mse")
    if steps:
        model.optimizer.build(model.trainable_variables)
    model.save(path)
    assert describe_file(path).optimizers[0].scaling == "none"
    with pytest.raises(OldFileError, match=f"{name}, has no loss scaling"):
        load_model(path)
