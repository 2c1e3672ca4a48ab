"""`lossscale.install()`: the documented names, put in place and taken out again."""

import importlib
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from backends.support import sgd
from lossscale import experimental

# The classes of the Keras that is `tf.keras`: old programs inherit from them.
_CURRENT, _OLDER = lossscale.keras.LossScaleOptimizer, experimental.keras.LossScaleOptimizer
_LOSS_SCALES = ["LossScale", "FixedLossScale", "DynamicLossScale"]

# Every documented name and what it leads to.
_NAMES = {
    **{
        f"{root}.{name}": value
        for root in ("tf", "tf.compat.v1", "tf.compat.v2")
        for name, value in {
            "keras.mixed_precision.LossScaleOptimizer": _CURRENT,
            "keras.mixed_precision.experimental.LossScaleOptimizer": _OLDER,
            **{
                f"{parent}.experimental.{name}": getattr(experimental, name)
                for parent in ("mixed_precision", "train")
                for name in _LOSS_SCALES
            },
        }.items()
    }
}

_ABSENT = object()


def _resolve(name):
    found = tf
    for part in name.split(".")[1:]:
        found = getattr(found, part, _ABSENT)
        if found is _ABSENT:
            break
    return found


def _all_names():
    return {name: _resolve(name) for name in _NAMES}


@pytest.fixture(autouse=True)
def _taken_out_again():
    # The first install may import parts of TensorFlow that stay imported.
    lossscale.install().undo()
    before = _all_names()
    modules = {name for name in sys.modules if "mixed_precision" in name}
    yield
    assert _all_names() == before
    assert {name for name in sys.modules if "mixed_precision" in name} == modules


def test_keras_own_optimizer_stays_and_names_that_no_tensorflow_has_any_more_go():
    own = keras.optimizers.LossScaleOptimizer
    with lossscale.install():
        assert keras.optimizers.LossScaleOptimizer is own
        assert tf.keras.optimizers.LossScaleOptimizer is own
        importlib.import_module("tensorflow.keras.mixed_precision.experimental")
    assert tf.keras.mixed_precision.LossScaleOptimizer is own
    assert not hasattr(tf.keras.mixed_precision, "experimental")
    assert not hasattr(tf, "mixed_precision")
    with pytest.raises(ImportError):
        exec("from tensorflow.keras.mixed_precision import experimental", {})
    with pytest.raises(ImportError):
        importlib.import_module("tensorflow.keras.mixed_precision.experimental")


def test_the_first_of_several_installations_removes_all_names_and_the_others_none():
    first, second = lossscale.install(), lossscale.install()
    assert isinstance(first, lossscale.Installation)
    second.undo()
    assert _all_names() == _NAMES
    for _ in range(2):
        first.undo()
        assert not any(_resolve(name) is value for name, value in _NAMES.items())
    with lossscale.install():
        # It is over, and removes nothing of another.
        first.undo()
        assert _all_names() == _NAMES


_OLDER_NAME = "mixed_precision.experimental.LossScaleOptimizer"


@pytest.mark.parametrize(
    ("statement", "name", "value"),
    [
        ("from tensorflow.keras import mixed_precision", _OLDER_NAME, _OLDER),
        (
            "from tensorflow.keras.mixed_precision import experimental",
            "experimental.LossScaleOptimizer",
            _OLDER,
        ),
        ("import tensorflow.compat.v1 as v1", f"v1.keras.{_OLDER_NAME}", _OLDER),
        *(
            (f"from tensorflow.{module} import {value.__name__}", value.__name__, value)
            for module, value in (
                ("keras.mixed_precision", _CURRENT),
                ("keras.mixed_precision.experimental", _OLDER),
                ("mixed_precision.experimental", experimental.DynamicLossScale),
            )
        ),
    ],
)
def test_import_statements_find_the_names(statement, name, value):
    namespace = {}
    with lossscale.install():
        exec(statement, namespace)
        assert eval(name, namespace) is value


def test_everything_that_the_page_for_tensorflow_2_3_has_is_there():
    with lossscale.install():
        assert {n for n in dir(tf.keras.mixed_precision.experimental) if n[0] != "_"} == {
            "LossScaleOptimizer",
            "Policy",
            "get_layer_policy",
            "global_policy",
            "set_policy",
        }


@pytest.mark.parametrize("missing", ["tensorflow", "tensorflow_of_someone_else"])
def test_without_tensorflow_it_says_so_and_changes_nothing(monkeypatch, missing):
    def cannot_import(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    before = _all_names()
    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", cannot_import)
        lossscale.registry.package.cache_clear()
        with pytest.raises(ImportError) as raised:
            lossscale.install()
    ours = isinstance(raised.value, lossscale.LossScaleError)
    # A TensorFlow that is there and broken speaks for itself.
    assert ours is (missing == "tensorflow")
    assert not ours or 'not found: pip install "lossscale[tensorflow]"' in str(raised.value)
    assert _all_names() == before
    with lossscale.install():
        assert _all_names() == _NAMES


def test_a_second_call_does_what_was_imported_since(monkeypatch):
    before = keras.src.trainers.trainer.LossScaleOptimizer
    with lossscale.install():
        assert keras.src.trainers.trainer.LossScaleOptimizer is not before
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "keras")
        first = lossscale.install()
    assert keras.src.trainers.trainer.LossScaleOptimizer is before
    with lossscale.install():
        assert keras.src.trainers.trainer.LossScaleOptimizer is not before
    assert keras.src.trainers.trainer.LossScaleOptimizer is not before
    first.undo()
    assert keras.src.trainers.trainer.LossScaleOptimizer is before
    assert not any(_resolve(name) is value for name, value in _NAMES.items())


_USES_THE_NAMES = """
opt = tf.keras.mixed_precision.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(0.25), 8)
var = tf.Variable(1.)
opt.minimize(lambda: var ** 2, var_list=var)
print("var", var.numpy())
"""

_BEFORE_TENSORFLOW = """
import lossscale
with lossscale.install():
    from tensorflow.keras.mixed_precision import experimental
import tensorflow as tf
assert not hasattr(tf.keras.mixed_precision, "experimental")
assert not hasattr(tf, "mixed_precision")
lossscale.install()
"""


_LOADS_A_FILE = """
import sys, keras
loaded = keras.saving.load_model(sys.argv[1]).optimizer
assert isinstance(loaded, lossscale.LossScaleOptimizer), loaded
print("loaded", float(loaded.loss_scale), int(loaded.iterations))
"""


def test_it_works_in_a_fresh_process_before_tensorflow_and_keras_then_loads_files(tmp_path):
    path = tmp_path / "model.keras"
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(lossscale.LossScaleOptimizer(sgd(momentum=0.5)), "mse", run_eagerly=True)
    for target in (0.0, float("inf"), 0.0):
        model.train_on_batch(np.ones((1, 1)), np.full((1, 1), target))
    model.save(path)
    program = _BEFORE_TENSORFLOW + _USES_THE_NAMES + _LOADS_A_FILE
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program, str(path)],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["var 0.5", f"loaded {2.0**14} 3"]
