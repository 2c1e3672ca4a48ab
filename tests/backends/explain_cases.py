"""Faults in what Keras alone has, and the right answers.

They were written before they were first run, thirty in three models and ten others; those stay
whose kind neither another one nor tests/broken_blocks.py has.
"""

import math
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops


class Case(NamedTuple):
    """A program, the causes that are right, words of the operation, and a part of the module."""

    program: Any
    causes: str
    operations: str = ""
    module: str = ""


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Function(layers.Layer):
    """A layer that calls a function."""

    def __init__(self, function):
        super().__init__(name=function.__name__)
        self.function = function

    def call(self, x):
        return self.function(x)


def stacked(*parts, x, weight=None, loss_fn=None):
    """Layers, and a linear one: the model, inputs, targets, weights of rows, loss function."""
    model = keras.Sequential(
        [keras.Input(batch_shape=x.shape), *parts, layers.Dense(1, name="head")]
    )
    model.compile("sgd", "mae")
    return model, x, np.zeros((len(x), 1)), weight, loss_fn


def of_function(function):
    return lambda: stacked(layers.Dense(8, name="up"), Function(function), x=normal(6, 8))


def filled(layer, weight, value, x):
    """A program with a layer of which a number in a weight is another one."""
    program = stacked(layer, layers.Flatten(), x=x)
    numbers = np.array(ops.convert_to_numpy(variable := getattr(layer, weight)))
    numbers[(0,) * numbers.ndim] = value
    variable.assign(numbers)
    return program


class Cell(layers.Layer):
    """A state-space cell whose transition has an eigenvalue of 2."""

    state_size = output_size = 8

    def call(self, x, states):
        state = states[0] * 2 + ops.abs(x) + 1
        return state, [state]


def newton(x):
    """The inverse of 1 + x**2 by a loop with a fixed number of steps, from a bad start."""
    step = lambda _, y: y * (2 - (1 + x * x) * y)  # noqa: E731
    return ops.fori_loop(0, 8, step, ops.ones_like(x) * 9)


def rotary(x):
    angle = ops.cast(ops.arange(6) * 16384, x.dtype)[:, None] * 0.01
    return x * ops.cos(angle)


def edges(x):
    x = x * 0
    dx = x - ops.roll(x, 1, 1)
    return ops.sqrt(dx * dx) + x


def attention(x):
    """Over nothing, in one of the rows."""
    lengths = np.array([9, 3, 0, 7, 8, 8])
    scores = ops.where(np.arange(8) < lengths[:, None], x, ops.cast(-math.inf, x.dtype))
    return ops.softmax(scores, -1)


@ops.custom_gradient
def divided(x):
    def grad(*args, upstream=None):
        g = args[0] if upstream is None else upstream
        return g / (g * 0)

    return x * 1, grad


def by_0(x):
    return divided(x)


def ppo(model, batch):
    """Of ratios that overflow, the objective takes the clipped ones."""
    ratio = ops.exp(20 + model(batch[0], training=True))
    return -ops.mean(ops.cast(ops.minimum(ratio, ops.clip(ratio, 0.8, 1.2)), "float32"))


# PyTorch computes no gradient of a wider convolution in float16 on a CPU if the channels come last.
CASES = {
    "a recurrence that doubles": Case(
        lambda: stacked(layers.RNN(Cell(name="cell"), name="rnn"), x=normal(2, 24, 8)),
        "forward overflow",
        "mul add",
        "rnn",
    ),
    "a loop that diverges": Case(of_function(newton), "forward overflow", "mul", "newton"),
    "positions beyond 65,504": Case(
        of_function(rotary), "forward overflow", "cast convert copy", "rotary"
    ),
    "the unit norm of nothing": Case(
        lambda: stacked(layers.UnitNormalization(name="unit"), x=normal(6, 8) * 0),
        "singular",
        "rsqrt",
        "unit",
    ),
    "a ratio that is clipped": Case(
        lambda: stacked(x=normal(6, 8), loss_fn=ppo), "forward overflow", "exp"
    ),
    "a large weight of a convolution": Case(
        lambda: filled(
            layers.Conv2D(8, 1, name="conv"), "_kernel", 6e4, abs(normal(2, 4, 4, 3)) + 3
        ),
        "forward overflow",
        "conv",
        "conv",
    ),
    "an embedding of 1e6": Case(
        lambda: filled(layers.Embedding(5, 4, name="embed"), "_embeddings", 1e6, np.zeros((2, 3))),
        "forward overflow",
        "cast convert copy",
        "embed",
    ),
    "a variance that is NaN": Case(
        lambda: filled(
            layers.BatchNormalization(trainable=False), "moving_variance", math.nan, normal(6, 8)
        ),
        "weights",
        "",
        "moving_variance",
    ),
    "an infinite weight of a row": Case(
        lambda: stacked(x=normal(6, 8), weight=np.full(6, math.inf, np.float32)),
        "batch",
        "sample_weight",
    ),
    "attention over nothing": Case(
        of_function(attention), "singular", "softmax sub exp max", "attention"
    ),
    "edges of a constant": Case(of_function(edges), "singular, backward overflow", "sqrt", "edges"),
    "a gradient divided by 0": Case(of_function(by_0), "singular, backward overflow", "", "by_0"),
}
