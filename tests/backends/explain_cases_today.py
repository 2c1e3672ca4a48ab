"""Faults in architectures of today, and the right answers, written before they first ran."""

import math

import keras
import numpy as np
from keras import layers, ops

from backends.explain_cases import Case, Function, changed, normal, to

X = normal(6, 8)


def parted(function, x=X, changes=None, name="part", loss_fn=None, y=None):
    """A functional model: a function between two linear layers."""
    i = keras.Input(x.shape[1:])
    h = Function(function, name)(layers.Dense(16, name="up", use_bias=False)(i))
    model = keras.Model(i, layers.Dense(8, name="head", use_bias=False)(h))
    kernels = {"up/kernel": 1, "head/kernel": 2}
    changed(
        model, {n: lambda w, s=s: normal(*w.shape, seed=s, size=0.3) for n, s in kernels.items()}
    )
    model.compile("sgd", "mse")
    y = np.zeros((len(x), 8), np.float32) if y is None else y
    return changed(model, changes or {}), x, y, None, loss_fn


# --- Functions ------------------------------------------------------------------------------------


def rotary(h):
    positions = ops.cast(ops.arange(6) * 16384, h.dtype)
    angle = positions[:, None] * 0.01
    first, second = ops.split(h, 2, -1)
    return ops.concatenate([first * ops.cos(angle) - second, first * ops.sin(angle) + second], -1)


def neighbours(h):
    edges = np.eye(6, dtype=bool) & (np.arange(6) != 4)
    scores = ops.leaky_relu(ops.matmul(h, ops.transpose(h)))
    scores = ops.where(edges, scores, ops.cast(-math.inf, h.dtype))
    powers = ops.exp(scores - ops.max(scores, -1, keepdims=True))
    return ops.matmul(powers / ops.sum(powers, -1, keepdims=True), h)


def group_norm(h):
    groups = ops.reshape(h * 0, (-1, 4, 4))
    centered = groups - ops.mean(groups, -1, keepdims=True)
    variance = ops.mean(centered * centered, -1, keepdims=True)
    return ops.reshape(centered * ops.rsqrt(variance + 1e-8), (-1, 16)) + h


def divergence(h):
    p, q = ops.softmax(h, -1), ops.softmax(h[::-1] * 40, -1)
    return h + ops.sum(p * (ops.log(p) - ops.log(q)), -1, keepdims=True)


def focal(h):
    p = ops.sigmoid(h * 30)
    return -((1 - p) ** 2) * ops.log(p)


def ssim(h):
    mean = ops.mean(h * 0, -1, keepdims=True)
    return h * ((2 * mean * mean + 1e-9) / (mean * mean + mean * mean + 1e-9))


def cosine(h):
    silent = h * ops.cast(np.arange(6)[:, None] != 2, h.dtype)
    norms = ops.sqrt(ops.sum(h * h, -1)) * ops.sqrt(ops.sum(silent * silent, -1))
    return h * (ops.sum(h * silent, -1) / norms)[:, None]


def triplet(h):
    positive = h + ops.cast(np.arange(6)[:, None] == 0, h.dtype)
    return ops.relu(ops.sqrt(ops.sum((h - positive) ** 2, -1, keepdims=True)) - 0.1) + h


def swish_of_powers(h):
    """A hand-written softplus, of inputs up to 40."""
    return ops.log(1 + ops.exp(ops.abs(h) * 20))


def quantized(h):
    h = ops.relu(h - 100)
    step = ops.max(h, -1, keepdims=True) / 127
    return h / step


def switched(h):
    return ops.cond(
        ops.max(h) > 0, lambda: ops.sum(ops.abs(h), -1, keepdims=True) * 9000 * h, lambda: h * 2
    )


def repeated(h):
    """The iterations of Newton's method for an inverse, from a bad start."""
    start = ops.ones_like(h) * 9
    return ops.fori_loop(0, 8, lambda _, y: y * (2 - (1 + h * h) * y), start)


# --- Layers ---------------------------------------------------------------------------------------


class Experts(layers.Layer):
    def build(self, shape):
        self.router = layers.Dense(5, name="router")
        self.router.build(shape)
        self.experts = self.add_weight(name="experts", shape=(5, shape[-1], shape[-1]))

    def call(self, h):
        logits = self.router(h)
        powers = ops.exp(logits)
        share = powers / ops.sum(powers, -1, keepdims=True)
        return ops.einsum("tb,btd->td", share, ops.silu(ops.einsum("td,bde->bte", h, self.experts)))


class Clip(keras.Model):
    """A subclassed model of two towers, whose learned temperature has grown."""

    def __init__(self):
        super().__init__()
        self.towers = [layers.Dense(16, name="images"), layers.Dense(16, name="texts")]
        self.temperature = self.add_weight(
            name="temperature", shape=(), initializer=lambda s, dtype: ops.full(s, 12.0, dtype)
        )

    def call(self, x):
        images, texts = (
            each / (ops.norm(each, axis=-1, keepdims=True) + 1e-3)
            for each in (tower(x) for tower in self.towers)
        )
        factor = ops.exp(ops.cast(self.temperature, images.dtype))
        return ops.matmul(images, ops.transpose(texts)) * factor


def clip():
    model = Clip()
    model(X)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, X, np.arange(6), None, None


class Vae(keras.Model):
    """With a `train_step` of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(8, name="encoder")
        self.sample = Function(self.sampled, "sample")
        self.decoder = layers.Dense(8, name="decoder")

    def sampled(self, code):
        mean, logarithm = ops.split(code, 2, -1)
        return mean + ops.exp(0.5 * (logarithm + 30))

    def call(self, x):
        return self.decoder(self.sample(self.encoder(x)))

    def train_step(self, *args):
        raise NotImplementedError


def vae():
    model = Vae()
    model(X)

    def loss_fn(model, batch):
        return ops.mean(ops.square(ops.cast(model(batch[0]), "float32") - batch[0]))

    return model, X, None, None, loss_fn


class Cell(layers.Layer):
    """A state-space cell whose transition has an eigenvalue of 2."""

    state_size = output_size = 8

    def call(self, x, states):
        state = states[0] * 2 + ops.abs(x) + 1
        return state, [state]


def recurrent():
    model = keras.Sequential(
        [
            keras.Input((24, 8)),
            layers.RNN(Cell(name="cell"), name="rnn"),
            layers.Dense(1, name="head"),
        ]
    )
    model.compile("sgd", "mae")
    return model, normal(2, 24, 8), np.zeros((2, 1)), None, None


class Coupling(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1], shape[-1]), initializer="orthogonal")

    def call(self, x):
        moved = ops.tanh(ops.matmul(x, self.w) * 20)
        return x + ops.log(1 - moved * moved)


def stacked(*parts, x=X, changes=None, loss="mse"):
    """A Sequential model of layers, between two linear ones."""
    model = keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            layers.Dense(16, name="up"),
            *parts,
            layers.Dense(8, name="head"),
        ]
    )
    model.compile("sgd", loss)
    return changed(model, changes or {}), x, np.zeros((len(x), 8)), None, None


# --- Losses ---------------------------------------------------------------------------------------


def ppo(model, batch):
    """Of ratios that overflow, the objective takes the clipped ones."""
    ratio = ops.exp(model(batch[0], training=True) * 12)
    chosen = ops.minimum(ratio, ops.clip(ratio, 0.8, 1.2))
    return -ops.mean(ops.cast(chosen, "float32"))


def binary(targets, outputs):
    p = ops.sigmoid(outputs * 300)
    return -ops.mean(targets * ops.log(p) + (1 - targets) * ops.log(1 - p))


def binary_of_its_own():
    model, x, y, *_ = stacked()
    model.compile("sgd", binary)
    return model, x, (y + np.arange(8)) % 2, None, None


CASES = {
    "experts whose router overflows": Case(
        lambda: stacked(Experts(name="mixture"), x=X * 60),
        "forward overflow",
        "exp",
        "mixture",
    ),
    "rotary positions beyond 65,504": Case(
        lambda: parted(rotary), "forward overflow", "cast convert copy", "part"
    ),
    "a node without neighbours": Case(lambda: parted(neighbours), "singular", "sub exp", "part"),
    "a group of constants": Case(lambda: parted(group_norm), "singular", "rsqrt", "part"),
    "a learned temperature": Case(clip, "forward overflow", "exp", "clip"),
    "the cosine with silence": Case(lambda: parted(cosine), "singular", "div", "part"),
    "a divergence from a probability of 0": Case(
        lambda: parted(divergence), "singular", "log", "part"
    ),
    "a focal loss of a probability of 0": Case(lambda: parted(focal), "singular", "log", "part"),
    "a ratio that is clipped": Case(
        lambda: parted(lambda h: h, loss_fn=ppo), "forward overflow", "exp"
    ),
    "a triplet with itself": Case(
        lambda: parted(triplet), "singular, backward overflow", "sqrt div", "part"
    ),
    "the similarity of black images": Case(lambda: parted(ssim), "singular", "div", "part"),
    "a softplus of its own": Case(
        lambda: parted(swish_of_powers), "forward overflow", "exp", "part"
    ),
    "a quantizer of nothing": Case(lambda: parted(quantized), "singular", "div", "part"),
    "a sum in a branch": Case(lambda: parted(switched, x=X * 9), "forward overflow", "mul", "part"),
    "a loop that diverges": Case(lambda: parted(repeated), "forward overflow", "mul", "part"),
    "a variance of e**30": Case(vae, "forward overflow", "exp", "sample"),
    "a recurrence that doubles": Case(recurrent, "forward overflow", "mul add", "rnn"),
    "a flow that saturates": Case(
        lambda: stacked(Coupling(name="coupling")), "singular", "log", "coupling"
    ),
    "the unit norm of nothing": Case(
        lambda: stacked(layers.ReLU(), layers.UnitNormalization(name="unit"), x=X * 0),
        "singular",
        "rsqrt div sqrt mul",
        "unit",
    ),
    "a kernel beyond 65,504": Case(
        lambda: stacked(changes={"head/kernel": to(1e5)}),
        "forward overflow",
        "cast convert copy",
        "head",
    ),
    "a loss of sure answers": Case(binary_of_its_own, "loss, singular", "log mul"),
    "a scale that is too high": Case(
        lambda: stacked(layers.LayerNormalization()), "scale", scale=2.0**34
    ),
}
