"""What float16 does to the gradients of models of Keras 3, on every backend."""

import functools

import keras
import numpy as np
import pytest

import fidelity_cases as cases
import fidelity_claims as claims
from backends.support import BACKEND
from lossscale.callbacks import LossScaleMonitor
from lossscale.diagnostics import Verdict, diagnose
from seeding import seed

LIBRARY = cases.library_of_keras()


pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(autouse=True)
def _float32_policy():
    seed(0)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("claim", claims.EVERYWHERE, ids=lambda claim: claim.__name__)
def test_on_this_backend(claim):
    claim(LIBRARY)


def test_it_is_what_a_step_computes():
    claims.it_is_what_a_step_computes(
        LIBRARY,
        lambda optimizer: [keras.ops.convert_to_numpy(each) for each in optimizer.momentums],
    )


class InALoop(keras.layers.Layer):
    """Calls a layer in a compiled loop."""

    def __init__(self):
        super().__init__(name="loop")
        self.inner = keras.layers.Dense(3, name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        def step(state, _):
            return keras.ops.tanh(self.inner(state)), None

        return keras.ops.scan(step, x, length=2)[0]


class Looping(keras.Model):
    def __init__(self):
        super().__init__(name="looping")
        self.loop = InALoop()
        self.end = keras.layers.Dense(1, name="end")

    def call(self, x):
        return self.end(self.loop(x))


def test_a_layer_in_a_loop_is_measured_and_the_report_says_what_was_not_looked_into():
    x, y = cases.some_inputs()
    model = Looping()
    model(x)
    report = diagnose(cases.compiled(LIBRARY, model, cases.LOST), x, y)
    assert report.verdict is Verdict.REQUIRED
    assert any(each.name.endswith("inner/kernel") for each in report.measured_variables)
    # On TensorFlow a gradient does not leave the loop.
    assert report.untapped == (("looping/loop",) if BACKEND == "tensorflow" else ())
    assert ("Not looked into: " in str(report)) == bool(report.untapped)


def test_a_model_that_does_not_run_in_float16_is_unknown_and_says_why():
    class Picky(keras.layers.Layer):
        def call(self, x):
            if self.compute_dtype == "float16":
                raise TypeError("No float16, please")
            return x

    model = keras.Sequential([keras.Input((3,)), Picky(), keras.layers.Dense(1)])
    x, y = cases.some_inputs()
    report = diagnose(cases.compiled(LIBRARY, model), x, y)
    assert report.verdict is Verdict.UNKNOWN
    assert "does not run in float16 here" in report.reason
    assert "No float16, please" in report.reason
    assert report.prediction.verdict is Verdict.NOT_NEEDED
    assert report.recommended_scale is None


def test_a_forward_overflow_is_unknown_and_says_why():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones"), keras.layers.Dense(1)]
    )
    x, y = cases.some_inputs()
    report = diagnose(cases.compiled(LIBRARY, model), np.abs(x) + 1e5, y)
    assert report.verdict is Verdict.UNKNOWN
    assert "not finite at any scale" in report.reason
    assert "keep the layer in which it does in float32" in report.reason


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16", "float16"])
def test_every_policy_gets_the_same_verdict(policy):
    x, y = cases.some_inputs()
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    keras.config.set_dtype_policy("float32")
    before = [layer.dtype_policy for layer in model._flatten_layers()]
    report = diagnose(cases.compiled(LIBRARY, model, 2.0**-24), x, y)
    assert report.verdict is Verdict.REQUIRED
    assert [layer.dtype_policy for layer in model._flatten_layers()] == before
    # bfloat16 was not asked for.
    bfloat16 = diagnose(cases.compiled(LIBRARY, model, 2.0**-24), x, y, format="bfloat16")
    assert bfloat16.fidelity is None


def test_a_monitor_measures_fidelity(tmp_path):
    monitor = functools.partial(LossScaleMonitor, framework="keras")
    claims.a_monitor_measures_fidelity(LIBRARY, monitor, tmp_path)


def test_a_monitor_says_what_it_cannot_measure():
    monitor = functools.partial(LossScaleMonitor, framework="keras")
    claims.a_monitor_says_what_it_cannot_measure(LIBRARY, monitor)


def test_a_train_step_of_ones_own_is_said():
    class OwnStep(keras.Sequential):
        def train_step(self, *arguments):
            raise AssertionError("It is not run.")

    model = OwnStep([keras.Input((3,)), keras.layers.Dense(1)])
    report = diagnose(cases.compiled(LIBRARY, model), *cases.some_inputs())
    assert report.verdict is Verdict.NOT_NEEDED
    (said,) = report.caveats
    assert said.startswith("OwnStep has a train_step of its own, which was not run")
    assert said in str(report)
