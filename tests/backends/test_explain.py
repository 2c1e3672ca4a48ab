"""`lossscale.diagnosis.explain`: the causes of faults in Keras models, and what it leaves alone."""

import math
import types

import numpy as np
import pytest

import keras_cases as cases
from backends.explain_cases import CASES
from broken_blocks import FAULTS, INPUT, WEIGHTS, mean_square, mistakes, verdicts
from keras_cases import BACKEND, keras, layers, ops
from lossscale.diagnosis import diagnose, explain
from lossscale.errors import ArgumentTypeError
from lossscale.monitoring.explanation import Cause

# A cause has no bits.
pytestmark = pytest.mark.usefixtures("compiled_quickly")
# Each backend has other faults; all of them are quick on PyTorch alone.
NAMES = {
    "torch": list(CASES),
    "tensorflow": [*list(CASES)[2:18:4], *list(CASES)[18:]],
    "jax": [*list(CASES)[2:18:4], *list(CASES)[18:20]],
}[BACKEND]


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


SHARED = "abs arange exp log matmul maximum mean rsqrt softmax sqrt sum tanh transpose where"
NUMPY = types.SimpleNamespace(**{n: getattr(ops, n) for n in SHARED.split()}, inf=math.inf)


class Block(layers.Layer):
    def __init__(self, function):
        super().__init__(name="block")
        self.function = function

    def build(self, shape):
        self.gain = self.add_weight(name="gain", shape=shape[-1:], initializer="ones")

    def compute_output_shape(self, shape):
        return shape

    def call(self, h):
        return self.function(NUMPY, h, ops.cast(self.gain, h.dtype))


@pytest.mark.parametrize("name", FAULTS)
def test_a_block_is_named(name):
    fault = FAULTS[name]
    dense = [layers.Dense(size, use_bias=False, name=n) for n, size in (("up", 16), ("head", 2))]
    model = keras.Sequential([keras.Input((8,)), dense[0], Block(fault.block), dense[1]])
    for layer in dense:
        layer.kernel.assign(WEIGHTS[layer.name])

    def loss_fn(model, batch):
        y = model(batch[0], training=True)
        return (fault.loss or mean_square)(NUMPY, ops.cast(y, "float32"))

    x = INPUT * np.float32(fault.size)
    found = explain(model, x, loss_fn=loss_fn, scale=fault.scale)
    assert not mistakes(name, found), found.text
    if fault.is_hidden:
        skipped = explain(model, x, loss_fn=loss_fn, scale=2.0**30)
        assert skipped.cause == Cause.SCALE
        assert f"Besides, {found.reason}" in skipped.text
        report = diagnose(model, x, loss_fn=loss_fn)
        assert report.verdict in verdicts(name), report


def test_a_finite_batch_is_unknown_and_mistakes_are_named():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((2, 3)) / 8
    assert explain(model, x, x[:, :1]).cause == Cause.UNKNOWN
    assert explain(model, x, x[:, :1], scale=2.0**40).cause == Cause.SCALE
    with pytest.raises(ArgumentTypeError, match="model of Keras 3"):
        explain("model", x)
