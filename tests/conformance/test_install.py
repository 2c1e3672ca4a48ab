"""`lossscale.install()`: the documented names, put in place and taken out again, on each Keras."""

import importlib
import operator
import os
import subprocess
import sys

import numpy as np
import pytest

from conformance.wrappers import BACKEND, KERAS

if BACKEND != "tensorflow":
    pytest.skip("puts names into TensorFlow", allow_module_level=True)

import tensorflow as tf

import lossscale
from kerases import assert_same, values
from lossscale import experimental
from seeding import seed

keras = importlib.import_module(KERAS)
IS_KERAS_3 = KERAS == "keras"
CURRENT = importlib.import_module(f"lossscale.{KERAS}").LossScaleOptimizer
OLDER = getattr(experimental, KERAS).LossScaleOptimizer
PUBLIC = keras.optimizers if IS_KERAS_3 else keras.mixed_precision
OWN = PUBLIC.LossScaleOptimizer
of_keras_3 = pytest.mark.skipif(not IS_KERAS_3, reason="of Keras 3")
of_tf_keras = pytest.mark.skipif(IS_KERAS_3, reason="of tf_keras")
FAMILIES = [keras.optimizers] if IS_KERAS_3 else [keras.optimizers, keras.optimizers.legacy]

# Every documented name and what it leads to.
ROOTS = ["tf", "tf.compat.v1", "tf.compat.v2"]
NAMES = {
    f"{root}.{parent}.experimental.{cls.__name__}": cls
    for root in ROOTS
    for parent in ("mixed_precision", "train")
    for cls in (experimental.LossScale, experimental.FixedLossScale, experimental.DynamicLossScale)
}
for root in [f"{root}.keras" for root in ROOTS] + ([] if IS_KERAS_3 else [KERAS]):
    NAMES[f"{root}.mixed_precision.LossScaleOptimizer"] = CURRENT
    NAMES[f"{root}.mixed_precision.experimental.LossScaleOptimizer"] = OLDER
# What else is replaced.
OTHERS = {
    "keras": ["keras.src.trainers.trainer.LossScaleOptimizer"],
    "tf_keras": [
        "tf_keras.src.engine.training.lso",
        "tf_keras.src.engine.training_v1.loss_scale_optimizer",
        "tf_keras.src.optimizers.deserialize",
        "tf_keras.optimizers.deserialize",
        "tf.keras.optimizers.deserialize",
    ],
}[KERAS]

X = np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2)
Y = X @ np.array([[1.0], [-2.0]], "float32")


def found(names=NAMES):
    """What a program finds under dotted names, None where there is nothing."""
    values = {}
    for name in names:
        root, *parts = name.split(".")
        value = {"tf": tf, KERAS: keras}[root]
        for part in parts:
            value = getattr(value, part, None)
        values[name] = value
    return values


def all_that_is_replaced():
    modules = {name for name in sys.modules if "mixed_precision" in name}
    return found([*NAMES, *OTHERS]), modules


@pytest.fixture(autouse=True)
def _mixed_float16_and_nothing_left_behind():
    # The first install may import parts of TensorFlow that stay imported.
    lossscale.install().undo()
    before = all_that_is_replaced()
    seed(0)
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")
    assert all_that_is_replaced() == before


def compiled(*optimizer, **arguments):
    layers = [keras.layers.Input((2,)), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential(layers)
    # Wrapped or not is settled here, whatever is compiled.
    model.compile(*optimizer, loss="mse", run_eagerly=True, **arguments)
    return model


def fit(model):
    model.run_eagerly = True
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)


# --- The names ------------------------------------------------------------------------------------


def test_names_that_no_tensorflow_has_any_more_go():
    with lossscale.install():
        assert (PUBLIC.LossScaleOptimizer is OWN) == IS_KERAS_3
        importlib.import_module("tensorflow.keras.mixed_precision.experimental")
        # What the page of TensorFlow 2.3 has.
        assert {n for n in dir(tf.keras.mixed_precision.experimental) if n[0] != "_"} == {
            "LossScaleOptimizer",
            "Policy",
            "get_layer_policy",
            "global_policy",
            "set_policy",
        }
    assert PUBLIC.LossScaleOptimizer is tf.keras.mixed_precision.LossScaleOptimizer is OWN
    assert not hasattr(tf.keras.mixed_precision, "experimental")
    assert not hasattr(tf, "mixed_precision")
    with pytest.raises(ImportError):
        exec("from tensorflow.keras.mixed_precision import experimental", {})
    with pytest.raises(ImportError):
        importlib.import_module("tensorflow.keras.mixed_precision.experimental")


def test_the_first_of_several_installations_removes_all_names_and_the_others_none():
    before = found(OTHERS)
    first, second = lossscale.install(), lossscale.install()
    assert not [name for name, value in found(OTHERS).items() if value is before[name]]
    assert isinstance(first, lossscale.Installation)
    second.undo()
    assert found() == NAMES
    for _ in range(2):
        first.undo()
        assert not found().items() & NAMES.items()
    with lossscale.install():
        # It is over, and removes nothing of another.
        first.undo()
        assert found() == NAMES


IMPORTS = {
    "keras.mixed_precision import LossScaleOptimizer as it": CURRENT,
    "keras.mixed_precision.experimental import LossScaleOptimizer as it": OLDER,
    "compat.v1 import keras; it = keras.mixed_precision.LossScaleOptimizer": CURRENT,
    "mixed_precision.experimental import FixedLossScale as it": experimental.FixedLossScale,
}


@pytest.mark.parametrize("imports", IMPORTS)
def test_import_statements_find_the_names(imports):
    namespace = {}
    with lossscale.install():
        exec(f"from tensorflow.{imports}", namespace)
    assert namespace["it"] is IMPORTS[imports]


@pytest.mark.parametrize("missing", ["tensorflow", "tensorflow_of_someone_else"])
def test_without_tensorflow_it_says_so_and_changes_nothing(monkeypatch, missing):
    def cannot_import(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    before = found()
    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", cannot_import)
        lossscale.registry.package.cache_clear()
        with pytest.raises(ImportError) as raised:
            lossscale.install()
    ours = isinstance(raised.value, lossscale.LossScaleError)
    # A TensorFlow that is there and broken speaks for itself.
    assert ours is (missing == "tensorflow")
    assert not ours or 'not found: pip install "lossscale[tensorflow]"' in str(raised.value)
    assert found() == before
    with lossscale.install():
        assert found() == NAMES


def test_a_second_call_does_what_was_imported_since(monkeypatch):
    def compile_makes_ours():
        return isinstance(compiled("sgd").optimizer, CURRENT)

    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, KERAS)
        first = lossscale.install()
    assert not compile_makes_ours()
    with lossscale.install():
        assert compile_makes_ours()
    assert compile_makes_ours()
    first.undo()
    assert not compile_makes_ours()


BEFORE_TENSORFLOW = """
import sys
import lossscale
with lossscale.install():
    from tensorflow.keras.mixed_precision import experimental
import tensorflow as tf
assert not hasattr(tf.keras.mixed_precision, "experimental")
assert not hasattr(tf, "mixed_precision")
lossscale.install()
opt = tf.keras.mixed_precision.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(0.25), 8)
var = tf.Variable(1.)
opt.minimize(lambda: var ** 2, var_list=var)
print("var", var.numpy())
loaded = tf.keras.models.load_model(sys.argv[1]).optimizer
assert isinstance(loaded, lossscale.LossScaleOptimizer), loaded
print("loaded", float(loaded.loss_scale), int(loaded.iterations))
"""


@of_keras_3
def test_it_works_in_a_fresh_process_before_tensorflow_and_keras_then_loads_files(tmp_path):
    path = tmp_path / "model.keras"
    model = compiled(lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.5)))
    for target in (0.0, float("inf"), 0.0):
        model.train_on_batch(np.ones((1, 2)), np.full((1, 1), target))
    model.save(path)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", BEFORE_TENSORFLOW, str(path)],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["var 0.5", f"loaded {2.0**14} 3"]


# --- What `compile` makes of an optimizer ---------------------------------------------------------


SERIALIZED = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
WRAPPED = keras.optimizers.serialize(lossscale.LossScaleOptimizer(keras.optimizers.Adam()))


@pytest.mark.parametrize(
    ("given", "inner"),
    [
        (["adam"], keras.optimizers.Adam),
        ([keras.optimizers.RMSprop(0.5)], keras.optimizers.RMSprop),
        ([], keras.optimizers.RMSprop),
        pytest.param([SERIALIZED], keras.optimizers.SGD, marks=of_keras_3),
        pytest.param([WRAPPED], keras.optimizers.Adam, marks=of_keras_3),
    ],
    ids=["name", "instance", "none", "configuration", "wrapped"],
)
def test_compile_wraps_in_the_documented_class(given, inner):
    with lossscale.install():
        optimizer = compiled(*given).optimizer
        assert isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    assert type(optimizer).__module__ == f"lossscale.{KERAS}"
    assert type(optimizer.inner_optimizer) is inner
    assert optimizer.rule == lossscale.DynamicScale()
    expected = lossscale.LossScaleOptimizer(inner())
    assert [v.name for v in optimizer.variables] == [v.name for v in expected.variables]
    assert not IS_KERAS_3 or any(v is optimizer.iterations for v in optimizer.variables)
    assert type(compiled("adam").optimizer).__module__.partition(".")[0] == KERAS


@pytest.mark.parametrize(
    ("wrap", "policy", "arguments"),
    [
        (lossscale.LossScaleOptimizer, "mixed_float16", {}),
        (lambda sgd: experimental.LossScaleOptimizer(sgd, 8), "mixed_float16", {}),
        (OWN, "mixed_float16", {}),
        (lambda sgd: sgd, "float32", {}),
        (lambda sgd: sgd, "mixed_bfloat16", {}),
        pytest.param(
            lambda sgd: sgd, "mixed_float16", {"auto_scale_loss": False}, marks=of_keras_3
        ),
    ],
    ids=["ours", "older", "keras", "float32", "bfloat16", "auto_scale_loss"],
)
def test_what_compile_leaves_alone(wrap, policy, arguments):
    keras.mixed_precision.set_global_policy(policy)
    for optimizers in FAMILIES:
        optimizer = wrap(optimizers.SGD())
        with lossscale.install():
            assert compiled(optimizer, **arguments).optimizer is optimizer


def test_a_model_that_is_compiled_again_keeps_its_loss_scale(optimizers):
    optimizer = optimizers.SGD() if IS_KERAS_3 else [optimizers.SGD(), optimizers.Adam()]
    with lossscale.install():
        model = compiled(optimizer)
        first = tf.nest.flatten(model.optimizer)
        assert [isinstance(each, CURRENT) for each in first] == [True] * len(first)
        model.compile(optimizer, "mae")
        assert all(map(operator.is_, tf.nest.flatten(model.optimizer), first))


def test_models_go_on_after_it_is_undone_and_their_files_load_under_it(tmp_path):
    path = tmp_path / "model.keras"
    with lossscale.install():
        model = compiled(keras.optimizers.SGD(0.25, momentum=0.5))
        fit(model)
    fit(model)
    model.train_on_batch(X, np.full_like(Y, np.inf))
    model.save(path)
    with lossscale.install():
        models = [model, keras.models.load_model(path)]
        if IS_KERAS_3:
            clone = keras.models.clone_model(model)
            clone.compile_from_config(model.get_compile_config())
            models.append(clone)
    for each in models:
        assert type(each.optimizer) is type(model.optimizer)
        fit(each)
    loaded = models[1].optimizer
    assert (float(loaded.loss_scale), int(loaded.iterations)) == (2.0**14, 7)
    assert_same(*(values([*m.variables, *m.optimizer.variables]) for m in models[:2]))


@of_tf_keras
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("form", ["old.h5", "saved_model", "old.keras"])
def test_what_tf_keras_own_class_wrote_is_read_into_ours(optimizers, form, tmp_path):
    if optimizers is not keras.optimizers and form == "old.keras":
        pytest.skip("tf_keras writes no legacy optimizer there")
    model, path = compiled(optimizers.SGD(0.5, momentum=0.5)), str(tmp_path / form)
    fit(model)
    assert isinstance(model.optimizer, OWN)
    assert not isinstance(model.optimizer, lossscale.LossScaleOptimizer)
    model.save(path)
    with lossscale.install():
        loaded = keras.models.load_model(path)
        assert isinstance(loaded.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    assert isinstance(loaded.optimizer, lossscale.LossScaleOptimizer)
    assert float(loaded.optimizer.loss_scale) == 2.0**15
    if form == "saved_model":
        # Of these tf_keras restores no state of an optimizer.
        model = keras.models.load_model(path)
    for each in (model, loaded):
        fit(each)
    assert_same(model.get_weights(), loaded.get_weights())


# --- The older policy, which had a loss scale -----------------------------------------------------


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
        model = keras.Sequential([keras.layers.Input((2,)), layer])
        model.save(tmp_path / "model.keras")
    # Without lossscale's names: the file says what every Keras knows.
    loaded = keras.models.load_model(tmp_path / "model.keras")
    policy = loaded.layers[-1].dtype_policy
    assert type(policy).__module__.partition(".")[0] == KERAS
    assert policy.name == "mixed_float16"


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
