"""`lossscale.diagnosis.explain`: the causes of faults in Keras models, and what it leaves alone."""

import math
import re
import types

import numpy as np
import pytest

import float16_faults
import keras_cases as cases
from float16_faults import FAULTS, NOTHING, OVERFLOW, SHARED, Fault
from keras_cases import keras, layers, ops
from kerases import assert_same
from lossscale.diagnosis import diagnose, explain
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.monitoring import Cause

# A cause has no bits.
pytestmark = pytest.mark.usefixtures("compiled_quickly")
NUMPY = types.SimpleNamespace(**{n: getattr(ops, n) for n in SHARED.split()}, inf=math.inf)


@pytest.fixture(autouse=True)
def _float16_policy_and_fixed_seed():
    keras.utils.set_random_seed(0)
    cases.set_policy("mixed_float16")
    yield
    cases.set_policy("float32")


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


class Cell(layers.Layer):
    """A state-space cell whose transition has an eigenvalue of 2."""

    state_size = output_size = 16

    def call(self, x, states):
        state = states[0] * 2 + ops.abs(x) + 1
        return state, [state]


def doubling(np, h, gain):
    """A graph of TensorFlow keeps what a recurrence returns in a list of tensors."""
    return layers.RNN(Cell())(ops.repeat(h[:, None], 24, axis=1))


def normed(np, h, gain):
    """0 in float16, before a recurrence, which on TensorFlow takes its input from a list."""
    h = h * 0 + 1000
    normed = h / ops.sqrt(ops.sum(h * h, axis=-1, keepdims=True))
    states = layers.SimpleRNN(16)(ops.repeat(normed[:, None], 3, axis=1))
    return ops.cast(states, h.dtype) + gain / 4096


OWN = {
    "a norm before a recurrence": Fault(
        normed, "unknown", "mul square", scale=1.0, words="a later operation makes it finite again"
    ),
    "a recurrence that doubles": Fault(doubling, OVERFLOW, "mul add"),
}


@pytest.mark.parametrize("name", [*FAULTS, *OWN])
def test_a_block_is_named(name):
    fault = {**FAULTS, **OWN}[name]
    dense = [layers.Dense(size, use_bias=False, name=n) for n, size in (("up", 16), ("head", 2))]
    model = keras.Sequential([keras.Input((8,)), dense[0], Block(fault), dense[1]])
    for layer in dense:
        layer.kernel.assign(fault.weights[layer.name])
    before = model.get_weights()

    def loss_fn(model, batch):
        y = model(batch[0], training=True)
        return fault.loss(NUMPY, ops.cast(y, "float32"))

    float16_faults.check(
        fault,
        lambda scale: explain(model, fault.batch, loss_fn=loss_fn, scale=scale),
        lambda: diagnose(model, fault.batch, loss_fn=loss_fn),
    )
    assert_same(before, model.get_weights())


ADVICE = {**float16_faults.ADVICE, "no numbers": (NOTHING, lambda _, x: ops.mean(x[:0]))}


@pytest.mark.skipif(cases.BACKEND != "tensorflow", reason="the tests of JAX and PyTorch have it")
@pytest.mark.parametrize("name", ADVICE)
def test_what_is_advised_fits_the_operation(name):
    import tensorflow as tf

    advice, function = ADVICE[name]
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3, use_bias=False)])

    def loss_fn(model, batch):
        return tf.reduce_sum(tf.cast(function(NUMPY, model(batch[0]) * 0), "float32"))

    float16_faults.check_advice(advice, explain(model, np.ones((2, 3)), loss_fn=loss_fn))


@pytest.mark.skipif(cases.BACKEND == "torch", reason="it is infinite, and named")
def test_a_ctc_loss_of_a_long_label_is_finite():
    """TensorFlow's, which has loops of TensorFlow 1, and that of Keras on JAX."""
    model = keras.Sequential([keras.Input((2, 3)), layers.Dense(4)])
    model.compile("sgd", keras.losses.CTC())
    found = explain(model, np.ones((1, 2, 3)), np.ones((1, 3), np.int32), scale=1.0)
    assert found.cause == Cause.UNKNOWN, found.text


class Logarithm(layers.Layer):
    def call(self, x):
        return ops.log(ops.relu(-ops.abs(x)))


class Large(layers.Layer):
    def call(self, x):
        return ops.cast(x, "float32") * 1e7


class Nested(layers.Layer):
    """Layers in a layer, and in one that calls them without their scope."""

    def __init__(self, *inner, **settings):
        super().__init__(**settings)
        self.inner = [keras.Sequential(inner, name="chain")]

    def build(self, shape):
        self.inner[0].build(shape)

    def call(self, x):
        return self.inner[0].call(x)


def dense(name):
    return layers.Dense(8, name=name)


NESTED = {
    "nested/chain/log (": lambda: [
        dense("first"),
        Nested(dense("inner"), Logarithm(name="log"), name="nested"),
    ],
    "seq/log (": lambda: [
        dense("first"),
        layers.TimeDistributed(
            keras.Sequential([dense("inner"), Logarithm(name="log")], name="seq"), name="td"
        ),
    ],
    "esult of large (": lambda: [dense("layer-0"), Large(name="large"), dense("layer-1-last")],
    "casts it to float16": lambda: [Nested(Large(name="large"), dense("last"), name="nested")],
}


@pytest.mark.parametrize("words", NESTED)
def test_the_innermost_layer_is_named(words):
    x = np.ones((2, 3, 8), np.float32)
    model = keras.Sequential([keras.Input((3, 8)), *NESTED[words]()])
    found = explain(model, x, x, loss_fn=lambda m, batch: ops.mean(m(batch[0])))
    assert words in found.text
    assert found.module.endswith(("log", "last"))
    assert "sequential" not in found.text


def test_an_operation_of_a_loss_of_keras_is_at_no_line_of_the_program():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(1, dtype="float32")])
    model.compile("sgd", "mse")
    model.layers[0].kernel.assign(model.layers[0].kernel * 1e30)
    found = explain(model, np.ones((2, 8), np.float32), np.ones((2, 1), np.float32))
    assert found.cause == Cause.FORWARD_OVERFLOW
    assert "line" not in found.module
    assert "loss" in found.module


def test_what_the_model_is_given_is_named_and_so_are_mistakes():
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((2, 3)) / 8
    assert explain(model, x, x[:, :1]).cause == Cause.UNKNOWN
    assert explain(model, x, x[:, :1], scale=2.0**40).cause == Cause.SCALE
    found = explain(model, x, x[:, :1], sample_weight=np.full(2, math.inf, np.float32))
    assert (found.cause, found.operation) == (Cause.BATCH, "sample_weight")
    model.layers[0].moving_variance.assign([1, math.nan, 1])
    model.layers[0].trainable = False
    found = explain(model, x, x[:, :1])
    assert found.cause == Cause.WEIGHTS
    assert "moving_variance" in found.module
    with pytest.raises(ArgumentTypeError, match="model of Keras 3"):
        explain("model", x)
    with pytest.raises(ArgumentError, match="the same number of rows"):
        explain(model, x, np.ones((3, 1)))
    for owned in ([], [keras.Variable(1.0)]):
        with pytest.raises(ArgumentError, match="trainable parameters of the model"):
            explain(model, x, x[:, :1], parameters=owned)


def test_a_loss_function_that_writes_to_its_batch_leaves_the_arrays_as_they_were():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    x, weights = np.ones((2, 3), np.float32), np.full((2,), 3.0, np.float32)

    def doubled(weights):
        return weights.mul_(2) if cases.BACKEND == "torch" else weights * 2

    def loss_fn(model, batch):
        y, weights = ops.cast(model(batch[0]), "float32"), doubled(batch[2])
        return ops.mean(ops.square(y)[:, 0] * weights)

    given = {"sample_weight": weights, "loss_fn": loss_fn}
    found = explain(model, x, scale=2.0**20, **given)
    assert found.cause == Cause.SCALE
    assert explain(model, x, scale=2.0**20, **given).text == found.text
    assert_same([weights], [np.full((2,), 3.0, np.float32)])
    diagnose(model, x, **given)
    assert_same([weights], [np.full((2,), 3.0, np.float32)])


class Called(layers.Layer):
    """Calls a function, with a shape that is known beforehand."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def as_numpy(h):
    """Checks of the program, in NumPy, of what a graph computes."""

    def checked(h):
        if not np.isfinite(np.asarray(h, np.float32)).all():
            raise FloatingPointError
        return h

    if cases.BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.ensure_shape(tf.numpy_function(checked, [h], h.dtype), h.shape)
    if cases.BACKEND == "jax":
        import jax

        like = jax.ShapeDtypeStruct(h.shape, h.dtype)
        function = jax.custom_vjp(lambda h: jax.pure_callback(checked, like, h))
        function.defvjp(lambda h: (function(h), None), lambda _, by: (by,))
        return function(h)
    return ops.reshape(ops.cast(checked(h.detach().cpu()), h.dtype), h.shape) * 0 + h


def only_in_float32(h):
    if "float16" in str(h.dtype):
        raise NotImplementedError("no kernel for float16")
    return h


def after_a_large_layer(*functions, last=()):
    large = layers.Dense(4, kernel_initializer="ones", name="large")
    given = [keras.Input((8,)), large, *map(Called, functions), layers.Dense(1), *map(Called, last)]
    model = keras.Sequential(given)
    model.compile("sgd", "mse")
    return model


def test_an_overflow_before_a_check_of_the_program_is_named():
    model = after_a_large_layer(as_numpy)
    x, y = np.full((4, 8), 3e4, np.float32), np.ones((4, 1), np.float32)
    found = explain(model, x, y)
    assert (found.cause, found.module) == (Cause.FORWARD_OVERFLOW, "large")
    assert explain(model, x / 3e4, y, scale=1.0).cause == Cause.UNKNOWN
    if cases.BACKEND == "jax":
        import jax

        with jax.debug_nans(True):
            found = explain(after_a_large_layer(lambda h: h - h), x, y)
        assert (found.cause, found.module) == (Cause.FORWARD_OVERFLOW, "large")


def test_what_only_float16_raises_is_a_reason_and_a_mistake_is_raised():
    x, y = np.ones((4, 8), np.float32), np.ones((4, 1), np.float32)
    found = explain(after_a_large_layer(only_in_float32), x, y)
    assert found.cause == Cause.UNKNOWN
    assert "does not run in float16 here: " in found.text
    model = after_a_large_layer()
    with pytest.raises((ValueError, TypeError, RuntimeError), match="99"):
        explain(model, x, y, loss_fn=lambda m, batch: ops.mean(ops.reshape(m(batch[0]), (99,))))


@pytest.mark.skipif(cases.BACKEND != "tensorflow", reason="other graphs have shapes")
def test_shapes_that_a_graph_does_not_know_beforehand():
    import tensorflow as tf

    functions = {
        "rows": lambda h: tf.boolean_mask(h, tf.ones(tf.shape(h)[0], tf.bool)),
        "sums": lambda h: tf.math.segment_sum(h, tf.range(tf.shape(h)[0])),
        "check": lambda h: tf.debugging.check_numerics(h, "found"),
    }
    x, y = np.full((4, 8), 3e4, np.float32), np.ones((4, 1), np.float32)
    for name, function in functions.items():
        model = after_a_large_layer(function, last=(function,))
        found = explain(model, x, y)
        assert (found.cause, found.module) == (Cause.FORWARD_OVERFLOW, "large"), name
        assert explain(model, x / 3e4, y, scale=1.0).cause == Cause.UNKNOWN


@pytest.mark.skipif(cases.BACKEND != "tensorflow", reason="other graphs have names for it")
def test_a_lambda_that_is_traced_as_a_function_is_known_by_its_line():
    import tensorflow as tf

    many = tf.function(lambda h: h * 6e4)
    x, y = np.ones((4, 8), np.float32), np.ones((4, 1), np.float32)
    found = explain(after_a_large_layer(many), x, y)
    assert (found.cause, found.operation) == (Cause.FORWARD_OVERFLOW, "Mul")
    assert re.fullmatch(r"line \d+ of test_explain.py", found.module)
