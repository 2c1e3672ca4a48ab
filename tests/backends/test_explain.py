"""`lossscale.diagnosis.explain`: the causes of faults in Keras models, and what it leaves alone."""

import math
import types

import numpy as np
import pytest

import broken_blocks
import keras_cases as cases
from backends.explain_cases import CASES
from broken_blocks import FAULTS, SHARED
from keras_cases import BACKEND, keras, layers, ops
from lossscale.diagnosis import diagnose, explain
from lossscale.errors import ArgumentTypeError
from lossscale.monitoring.explanation import Cause

# A cause has no bits.
pytestmark = pytest.mark.usefixtures("compiled_quickly")
# What each backend has of its own; the rest is quick on PyTorch alone.
NAMES = list(CASES)[: {"torch": None, "tensorflow": 8, "jax": 4}[BACKEND]]


@pytest.fixture(autouse=True)
def _float16_policy_and_fixed_seed():
    keras.utils.set_random_seed(0)
    cases.set_policy("mixed_float16")
    yield
    cases.set_policy("float32")


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_named(name):
    program, causes, operations, module = CASES[name]
    model, x, y, weight, loss_fn = program()
    before = [np.array(each) for each in model.get_weights()]
    found = explain(model, x, y, sample_weight=weight, loss_fn=loss_fn)
    assert str(found.cause) in causes.split(", "), found.text
    assert not operations or any(each in found.operation.lower() for each in operations.split())
    assert module in found.module
    pairs = zip(before, model.get_weights(), strict=True)
    assert all(np.array_equal(one, other, equal_nan=True) for one, other in pairs)


NUMPY = types.SimpleNamespace(**{n: getattr(ops, n) for n in SHARED.split()}, inf=math.inf)


class Block(layers.Layer):
    def __init__(self, fault):
        super().__init__(name="block")
        self.function, self.constant = fault.block, fault.gain

    def build(self, shape):
        self.gain = self.add_weight(name="gain", shape=shape[-1:], initializer="ones")
        self.gain.assign(self.gain * self.constant)

    def compute_output_shape(self, shape):
        return shape

    def call(self, h):
        return self.function(NUMPY, h, ops.cast(self.gain, h.dtype))


@pytest.mark.parametrize("name", FAULTS)
def test_a_block_is_named(name):
    fault = FAULTS[name]
    dense = [layers.Dense(size, use_bias=False, name=n) for n, size in (("up", 16), ("head", 2))]
    model = keras.Sequential([keras.Input((8,)), dense[0], Block(fault), dense[1]])
    for layer in dense:
        layer.kernel.assign(fault.weights[layer.name])

    def loss_fn(model, batch):
        y = model(batch[0], training=True)
        return fault.loss(NUMPY, ops.cast(y, "float32"))

    broken_blocks.check(
        name,
        lambda scale: explain(model, fault.batch, loss_fn=loss_fn, scale=scale),
        lambda: diagnose(model, fault.batch, loss_fn=loss_fn),
    )


def test_a_finite_batch_is_unknown_and_mistakes_are_named():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((2, 3)) / 8
    assert explain(model, x, x[:, :1]).cause == Cause.UNKNOWN
    assert explain(model, x, x[:, :1], scale=2.0**40).cause == Cause.SCALE
    with pytest.raises(ArgumentTypeError, match="model of Keras 3"):
        explain("model", x)
