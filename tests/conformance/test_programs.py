"""Old programs run unedited on both Kerases; what AutoGraph translates; examples in docstrings."""

import importlib
import logging
import pathlib
import pkgutil
import runpy
import traceback

import pytest

import lossscale
from conformance.wrappers import BACKEND, KERAS
from pages import examples_tried

if KERAS == "none" or BACKEND in ("jax", "torch"):
    pytest.skip("about TensorFlow", allow_module_level=True)

import tensorflow as tf

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "old_programs"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py"))
assert len(PROGRAMS) >= 6
FRAMEWORK = importlib.import_module(KERAS)
PACKAGE = importlib.import_module(f"lossscale.{KERAS}")

_LOGGED_BY_OTHERS = (
    "mixed_float16 may run slowly",
    # That the function of `fit` is traced often: TensorFlow counts those of other tests with it.
    "TensorFlowTrainer._make_function",
    "Model.make_train_function",
)


@pytest.fixture
def on_two_replicas(monkeypatch, two_replicas):
    """Makes every MirroredStrategy this one: a second one in a process would disturb the first."""
    cls = tf.distribute.MirroredStrategy
    if "__new__" not in vars(cls):
        # One that is deleted leaves a class that takes no arguments; this one stays.
        cls.__new__ = lambda cls, *_, **__: object.__new__(cls)
    monkeypatch.setattr(cls, "__new__", lambda cls: two_replicas)
    monkeypatch.setattr(cls, "__init__", lambda self: None)


# What Keras says about the way that models were written then.
@pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`")
@pytest.mark.usefixtures("on_two_replicas")
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_old_program_learns_and_says_nothing_else(name, caplog, capsys):
    with caplog.at_level(logging.WARNING, logger="tensorflow"), lossscale.install():
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    FRAMEWORK.mixed_precision.set_global_policy("float32")
    # AutoGraph speaks to the log of what it cannot read.
    logged = [record.getMessage() for record in caplog.records]
    assert [m for m in logged if not any(other in m for other in _LOGGED_BY_OTHERS)] == []
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{name.removesuffix('.py')}: ")


@tf.autograph.experimental.do_not_convert
def translated_functions():
    """Names of the functions on the stack that AutoGraph has translated."""
    names = [frame.name for frame in traceback.extract_stack()]
    return [name.removeprefix("tf__") for name in names if name.startswith("tf__")]


@pytest.mark.parametrize("verbs", ["minimize", "by hand"])
def test_only_the_users_functions_are_translated(optimizers, verbs):
    """The user's loss and update are; of ours at most `minimize`, which calls what users write."""
    stacks, weight = [], tf.Variable(1.0)

    class Own(optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **kwargs):
            stacks.append(translated_functions())
            [(gradient, variable)] = grads_and_vars
            factor = 1.0
            if gradient > 100.0:
                factor = 2.0
            return super().apply_gradients([(gradient * factor, variable)], **kwargs)

    def loss():
        stacks.append(translated_functions())
        result = weight * 5.0
        if weight > 0.0:
            result = weight * 3.0
        return result

    optimizer = lossscale.LossScaleOptimizer(Own(1.0), initial_scale=8.0)
    optimizer.build([weight])

    @tf.function
    def step():
        if verbs == "minimize":
            optimizer.minimize(loss, [weight])
            return
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(loss())
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
        optimizer.apply_gradients(zip(gradients, [weight], strict=True))

    for expected in (-2.0, -7.0):
        step()
        assert weight.numpy() == expected
    assert {stack[-1] for stack in stacks} == {"loss", "apply_gradients"}
    for first, *between, _ in stacks:
        assert first == "step"
        assert verbs == "minimize" or not between


NAMES = {KERAS: FRAMEWORK, "tf": tf, "lossscale": lossscale}
MODULES = [PACKAGE.__name__] + [
    found.name
    for found in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")
    # A backend needs its own backend.
    if ".backends." not in found.name
]
WITH_EXAMPLES = {
    "keras": {"lossscale.keras": 10, "lossscale.keras.arguments": 1},
    "tf_keras": {"lossscale.tf_keras": 10, "lossscale.tf_keras.state": 5},
}[KERAS]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), **NAMES}
    tried = examples_tried(module, names)
    assert tried >= WITH_EXAMPLES.get(name, 0)
    assert (tried > 0) == (name in WITH_EXAMPLES)
