"""Faults in a vision transformer, a U-Net, a GRU with attention and others, and the right answers.

They were written before they were first run. Of these, those stay whose kind no other case has, and
those that were answered wrongly. The convolutions are 1 x 1, since
PyTorch computes no gradient of wider ones in float16 on a CPU if the channels come last.
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
    scale: float = 2.0**15


def normal(*shape, seed=0, size=1.0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * np.float32(size)


class Function(layers.Layer):
    """A layer that calls a function."""

    def __init__(self, function, name):
        super().__init__(name=name)
        self.function = function

    def call(self, x, **arguments):
        return self.function(x, **arguments)


def alike(x):
    return x


def changed(model, changes):
    """Writes numbers into the weights whose paths end like the keys."""
    for end, function in changes.items():
        (variable,) = (each for each in model.variables if each.path.endswith(end))
        value = np.array(ops.convert_to_numpy(variable))
        variable.assign(function(value))
    return model


# --- The vision transformer -----------------------------------------------------------------------


class RMSNorm(layers.Layer):
    def __init__(self, eps, name):
        super().__init__(name=name)
        self.eps = eps

    def build(self, shape):
        self.gain = self.add_weight(name="gain", shape=shape[-1:], initializer="ones")

    def call(self, x):
        return x * ops.rsqrt(ops.mean(x * x, -1, keepdims=True) + self.eps) * self.gain


class Attention(layers.Layer):
    def __init__(self, factor, name):
        super().__init__(name=name)
        self.factor, self.qkv = factor, layers.Dense(48, name="qkv")

    def build(self, shape):
        self.qkv.build(shape)

    def call(self, x):
        q, k, v = ops.split(self.qkv(x), 3, -1)
        scores = ops.matmul(q * self.factor, ops.transpose(k, (0, 2, 1)))
        return ops.matmul(ops.softmax(scores, -1), v)


class Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(name="table", shape=shape[1:], initializer="normal")

    def call(self, x):
        return x + self.table


class Temperature(layers.Layer):
    def build(self, shape):
        self.value = self.add_weight(name="value", shape=(), initializer="ones")

    def call(self, x):
        return x / self.value


def vit(changes=None, x=None, eps=1e-3, factor=0.25):
    """A program: its model, inputs, targets, weights of the rows, and loss function."""
    i = keras.Input((16, 16, 3))
    h = layers.Conv2D(16, 4, 4, name="patch", use_bias=False)(i)
    h = RMSNorm(eps, "first_norm")(layers.Reshape((16, 16))(h))
    h = Positions(name="positions")(h)
    for n in range(2):
        h = layers.Add()([h, Attention(factor, f"attention_{n}")(h)])
        up = layers.Dense(32, name=f"up_{n}", activation="gelu")(h)
        h = layers.Add()([h, layers.Dense(16, name=f"down_{n}")(up)])
    logits = layers.Dense(4, name="head")(layers.GlobalAveragePooling1D()(h))
    model = keras.Model(i, Temperature(name="temperature")(logits))
    model.compile("sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = normal(4, 16, 16, 3) if x is None else x
    return changed(model, changes or {}), x, np.arange(4), None, None


# --- The U-Net ------------------------------------------------------------------------------------


class InstanceNorm(layers.Layer):
    eps = 1e-3

    def call(self, x):
        centered = x - ops.mean(x, (1, 2), keepdims=True)
        return centered / (
            ops.sqrt(ops.mean(centered * centered, (1, 2), keepdims=True)) + self.eps
        )


def unet(
    changes=None,
    x=None,
    weight=None,
    before=alike,
    gate=alike,
    after=alike,
    eps=1e-3,
    frozen=False,
):
    def conv(width, name, x, **settings):
        return layers.Conv2D(width, 1, name=name, **settings)(x)

    i = keras.Input((16, 16, 3))
    h = Function(before, "before")(i)
    normed = layers.BatchNormalization(name="batch_norm", trainable=not frozen)
    first = conv(8, "down", normed(h), activation="relu")
    small = layers.MaxPooling2D(name="pool")(first)
    middle = conv(8, "middle", small, use_bias=False)
    h = Function(gate, "gate")(middle)
    norm = InstanceNorm(name="instance_norm")
    norm.eps = eps
    h = Function(after, "after")(layers.UpSampling2D(name="up")(norm(h)))
    h = layers.Concatenate()([first, h])
    model = keras.Model(i, conv(1, "out", h))
    model.compile("sgd", loss=keras.losses.BinaryCrossentropy(from_logits=True))
    y = (np.arange(512) % 2).astype(np.float32).reshape(2, 16, 16, 1)
    x = normal(2, 16, 16, 3, seed=4) if x is None else x
    return changed(model, changes or {}), x, y, weight, None


def edges(x):
    dx, dy = x - ops.roll(x, 1, 1), x - ops.roll(x, 1, 2)
    return ops.sqrt(dx * dx + dy * dy) + x


@ops.custom_gradient
def divided(x):
    def grad(*args, upstream=None):
        g = args[0] if upstream is None else upstream
        return g / (g * 0)

    return x * 1, grad


# --- The GRU with attention -----------------------------------------------------------------------


class AttentionPooling(layers.Layer):
    def call(self, states, lengths):
        inside = ops.arange(9) < ops.cast(lengths, "int32")[:, None]
        scores = ops.sum(states * states[:, -1:], -1) * 0.3
        scores = ops.where(inside, scores, ops.cast(-math.inf, scores.dtype))
        return ops.sum(ops.softmax(scores, -1)[..., None] * states, 1)


def gru(changes=None, lengths=(9, 3, 5, 7), finish=alike):
    tokens, given = keras.Input((9,), dtype="int32"), keras.Input((), dtype="float32")
    states = layers.Embedding(50, 16, name="embed")(tokens)
    states = layers.GRU(16, return_sequences=True, name="gru", unroll=True)(states)
    h = AttentionPooling(name="attention")(states, given)
    model = keras.Model(
        [tokens, given], Function(finish, "finish")(layers.Dense(4, name="head")(h))
    )
    model.compile("sgd", loss="mse")
    x = [np.random.default_rng(0).integers(0, 50, (4, 9)), np.array(lengths, np.float32)]
    return changed(model, changes or {}), x, normal(4, 4, seed=3), None, None


def distance(x):
    return ops.sqrt(ops.sum((x - ops.stop_gradient(x)) ** 2, -1, keepdims=True)) + x


# --- Others ---------------------------------------------------------------------------------------


def stacked(*parts, x, loss_fn=None):
    """Layers between two linear ones."""
    i = keras.Input(batch_shape=x.shape)
    model = keras.Sequential([i, layers.Dense(8, name="up"), *parts, layers.Dense(1, name="head")])
    model.compile("sgd", "mae")
    return model, x, np.zeros((len(x), 1)), None, loss_fn


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


def ppo(model, batch):
    """Of ratios that overflow, the objective takes the clipped ones."""
    ratio = ops.exp(20 + model(batch[0], training=True))
    return -ops.mean(ops.cast(ops.minimum(ratio, ops.clip(ratio, 0.8, 1.2)), "float32"))


def to(value):
    return lambda array: np.full_like(array, value)


def at_one(value):
    def change(array):
        array[(0,) * array.ndim] = value
        return array

    return change


NAN, INF = math.nan, math.inf
BLACK = np.zeros((4, 16, 16, 3), np.float32)
EMPTY = (9, 3, 0, 7)
BROKEN = normal(2, 16, 16, 3)
BROKEN[0, 3, 3, 1] = NAN

CASES = {
    "vit: a scale of 2**30": Case(vit, "scale", scale=2.0**30),
    "vit: large attention scores": Case(
        lambda: vit(factor=1e5), "forward overflow", "mul dot mm einsum", "attention_0"
    ),
    "vit: black images and an epsilon of 1e-8": Case(
        lambda: vit(x=BLACK, eps=1e-8), "singular", "rsqrt", "first_norm"
    ),
    "vit: NaN in the positions": Case(
        lambda: vit({"positions/table": at_one(NAN)}), "weights", "", "positions/table"
    ),
    "vit: a gain of 1e6": Case(
        lambda: vit({"first_norm/gain": at_one(1e6)}),
        "forward overflow",
        "cast convert copy",
        "first_norm",
    ),
    "vit: a temperature of 1e-8": Case(
        lambda: vit({"temperature/value": to(1e-8)}), "singular", "div", "temperature"
    ),
    "unet: large weights in the middle": Case(
        lambda: unet({"middle/kernel": lambda w: abs(w) * 5e4}),
        "forward overflow",
        "conv",
        "middle",
    ),
    "unet: nothing in the middle and an epsilon of 1e-9": Case(
        lambda: unet({"middle/kernel": to(0.0)}, eps=1e-9), "singular", "div", "instance_norm"
    ),
    "unet: edges of a constant image": Case(
        lambda: unet(gate=lambda x: edges(x * 0) + x),
        "singular, backward overflow",
        "sqrt",
        "gate",
    ),
    "unet: NaN in a pixel": Case(lambda: unet(x=BROKEN), "batch", "x"),
    "unet: an infinite weight of a row": Case(
        lambda: unet(weight=np.full((2, 16, 16), INF, np.float32)), "batch", "sample_weight"
    ),
    "unet: a variance that is NaN": Case(
        lambda: unet({"batch_norm/moving_variance": to(NAN)}, frozen=True),
        "weights",
        "",
        "moving_variance",
    ),
    "unet: a gradient divided by 0": Case(
        lambda: unet(after=divided), "singular, backward overflow", "", "after"
    ),
    "gru: a scale of 2**26": Case(gru, "scale", scale=2.0**26),
    "gru: an embedding of 1e6": Case(
        lambda: gru({"embed/embeddings": to(1e6)}), "forward overflow", "cast convert copy", "embed"
    ),
    "gru: attention over nothing": Case(
        lambda: gru(lengths=EMPTY), "singular", "softmax sub exp", "attention"
    ),
    "gru: a power that is too large": Case(
        lambda: gru(finish=lambda x: ops.exp(12 + x * x)), "forward overflow", "exp", "finish"
    ),
    "gru: the root of a distance of 0": Case(
        lambda: gru(finish=distance), "singular, backward overflow", "sqrt", "finish"
    ),
    "a recurrence that doubles": Case(
        lambda: stacked(layers.RNN(Cell(name="cell"), name="rnn"), x=normal(2, 24, 8)),
        "forward overflow",
        "mul add",
        "rnn",
    ),
    "a loop that diverges": Case(
        lambda: stacked(Function(newton, "newton"), x=normal(6, 8)),
        "forward overflow",
        "mul",
        "newton",
    ),
    "rotary positions beyond 65,504": Case(
        lambda: stacked(Function(rotary, "rotary"), x=normal(6, 8)),
        "forward overflow",
        "cast convert copy",
        "rotary",
    ),
    "the unit norm of nothing": Case(
        lambda: stacked(layers.UnitNormalization(name="unit"), x=normal(6, 8) * 0),
        "singular",
        "rsqrt",
        "unit",
    ),
    "a ratio that is clipped": Case(
        lambda: stacked(x=normal(6, 8), loss_fn=ppo), "forward overflow", "exp", ""
    ),
}
