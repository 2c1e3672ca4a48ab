"""`lossscale.diagnosis.explain`: the causes of faults in Keras models, and what it leaves alone."""

import numpy as np
import pytest

import keras_cases as cases
from backends.explain_cases import CASES
from keras_cases import BACKEND, keras, layers
from lossscale.diagnosis import explain
from lossscale.errors import ArgumentTypeError
from lossscale.monitoring.explanation import Cause

# Each backend has other faults; all of them are quick on PyTorch alone.
START = {"torch": 0, "tensorflow": 1, "jax": 3}[BACKEND]
NAMES = list(CASES)[START :: 1 if BACKEND == "torch" else 5]


@pytest.fixture(autouse=True)
def _float16_policy_and_fixed_seed():
    keras.utils.set_random_seed(0)
    cases.set_policy("mixed_float16")
    yield
    cases.set_policy("float32")


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_named(name):
    program, causes, operations, module, scale = CASES[name]
    model, x, y, weight, loss_fn = program()
    before = [np.array(each) for each in model.get_weights()]
    found = explain(model, x, y, sample_weight=weight, loss_fn=loss_fn, scale=scale)
    assert str(found.cause) in causes.split(", "), found.text
    assert not operations or any(each in found.operation.lower() for each in operations.split())
    assert module in found.module
    pairs = zip(before, model.get_weights(), strict=True)
    assert all(np.array_equal(one, other, equal_nan=True) for one, other in pairs)


def test_a_finite_batch_is_unknown_and_mistakes_are_named():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((2, 3)) / 8
    assert explain(model, x, x[:, :1]).cause == Cause.UNKNOWN
    assert explain(model, x, x[:, :1], scale=2.0**40).cause == Cause.SCALE
    with pytest.raises(ArgumentTypeError, match="model of Keras 3"):
        explain("model", x)
