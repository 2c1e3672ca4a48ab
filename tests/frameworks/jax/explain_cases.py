"""Faults in a vision transformer, a U-Net, a GRU with attention and others, and the right answers.

They were written before they were first run. Two named the wrong place: a gain is cast in its
norm, and nothing is differentiated by the edges of an image. Of the last 22, those stay that were
answered wrongly.
"""

import math
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Case(NamedTuple):
    """A program, the causes that are right, words of the operation, and a part of the module."""

    program: Any
    causes: str
    operations: str = ""
    module: str = ""
    scale: float = 2.0**15


def wide(x):
    return x.astype(jnp.float32)


def normal(*shape, seed=0, size=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * size, jnp.float32)


def changed(tree, path, function):
    """A tree with another leaf at a path."""
    if not path:
        return function(tree)
    return {**tree, path[0]: changed(tree[path[0]], path[1:], function)}


# --- The vision transformer, in linen -------------------------------------------------------------


class RMSNorm(linen.Module):
    eps: float

    @linen.compact
    def __call__(self, x):
        gain = self.param("gain", linen.initializers.ones, (x.shape[-1],))
        return (
            x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps) * gain.astype(x.dtype)
        )


class Attention(linen.Module):
    masked: tuple = ()
    factor: float = 0.25

    @linen.compact
    def __call__(self, x):
        q, k, v = jnp.split(linen.Dense(3 * x.shape[-1], dtype=x.dtype, name="qkv")(x), 3, -1)
        scores = q * self.factor @ jnp.swapaxes(k, -1, -2)
        hidden = np.zeros((x.shape[1], x.shape[1]), bool)
        hidden[list(self.masked)] = True
        scores = jnp.where(hidden, -jnp.inf, scores)
        return jax.nn.softmax(scores) @ v


class ViT(linen.Module):
    dtype: Any
    eps: float = 1e-3
    masked: tuple = ()
    factor: float = 0.25
    gate: Any = jax.nn.gelu

    @linen.compact
    def __call__(self, images):
        x = linen.Conv(16, (4, 4), (4, 4), dtype=self.dtype, name="patch", use_bias=False)(images)
        x = x.reshape(x.shape[0], -1, 16)
        positions = self.param("positions", linen.initializers.normal(0.1), (16, 16))
        x = RMSNorm(self.eps, name="first_norm")(x) + positions.astype(x.dtype)
        for n in range(2):
            x = x + Attention(self.masked, self.factor, name=f"attention_{n}")(x)
            h = linen.Dense(32, dtype=self.dtype, name=f"up_{n}")(x)
            x = x + linen.Dense(16, dtype=self.dtype, name=f"down_{n}")(self.gate(h))
        temperature = self.param("temperature", linen.initializers.ones, ())
        return linen.Dense(4, dtype=self.dtype, name="head")(x.mean(1)) / temperature.astype(
            x.dtype
        )


def vit(change=None, images=None, loss=None, **settings):
    """A program: its loss function, parameters and batch."""
    images = normal(4, 16, 16, 3) if images is None else images
    params = ViT(jnp.float32, **settings).init(jax.random.key(0), normal(4, 16, 16, 3))["params"]
    params = params if change is None else changed(params, *change)

    def mean(logits):
        labels = jnp.arange(4)
        return optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels).mean()

    def loss_fn(params, batch, dtype):
        model = ViT(dtype, **settings)
        return (loss or mean)(model.apply({"params": params}, batch.astype(dtype)))

    return loss_fn, params, images


# --- The U-Net, in functions ----------------------------------------------------------------------


def conv(w, x):
    return jax.lax.conv_general_dilated(
        x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def instance_norm(x, eps):
    with jax.named_scope("instance_norm"):
        centered = x - x.mean((1, 2), keepdims=True)
        return centered / (jnp.sqrt((centered * centered).mean((1, 2), keepdims=True)) + eps)


def unet(change=None, batch=None, loss=None, before=None, gate=None, after=None, eps=1e-3):
    params = {
        "down": normal(3, 3, 3, 8, seed=1, size=0.2),
        "middle": normal(3, 3, 8, 8, seed=2, size=0.1),
        "out": normal(3, 3, 16, 1, seed=3, size=0.1),
        "mean": jnp.zeros(3),
    }
    params = params if change is None else changed(params, *change)
    images = normal(2, 16, 16, 3, seed=4)
    batch = (
        {"image": images, "weight": jnp.ones((2, 16, 16, 1))} if batch is None else batch(images)
    )

    def mean(logits, weight):
        target = (jnp.arange(logits.size) % 2).reshape(logits.shape)
        return (optax.sigmoid_binary_cross_entropy(wide(logits), target) * weight).mean()

    @jax.jit
    def model(params, image):
        x = image if before is None else before(image)
        x = x - params["mean"].astype(x.dtype)
        with jax.named_scope("down"):
            first = jax.nn.relu(conv(params["down"], x))
        with jax.named_scope("middle"):
            small = first.reshape(2, 8, 2, 8, 2, 8).max((2, 4))
            middle = jax.checkpoint(lambda w, x: jax.nn.relu(conv(w, x)))(params["middle"], small)
        middle = middle if gate is None else gate(middle)
        middle = instance_norm(middle, eps)
        up = jnp.repeat(jnp.repeat(middle, 2, 1), 2, 2)
        up = up if after is None else after(up)
        with jax.named_scope("out"):
            return conv(params["out"], jnp.concatenate([first, up], -1))

    def loss_fn(params, batch, dtype):
        return (loss or mean)(model(params, batch["image"].astype(dtype)), batch["weight"])

    return loss_fn, params, batch


def pooled(x):
    """The sum over an image, for a gate."""
    total = (x * 2000).sum((1, 2), keepdims=True)
    return x * (total / (1 + total))


def edges(x):
    dx, dy = x - jnp.roll(x, 1, 1), x - jnp.roll(x, 1, 2)
    return jnp.sqrt(dx * dx + dy * dy) + x


@jax.custom_vjp
def amplified(x):
    return x


amplified.defvjp(lambda x: (x, None), lambda _, g: (g * 60000 * 60,))


@jax.custom_vjp
def divided(x):
    return x


divided.defvjp(lambda x: (x, None), lambda _, g: (g / (g * 0),))


def dice(logits, weight):
    found = wide(logits) * 0
    return 1 - 2 * (found * 0).sum() / (found.sum() + 0 * weight.sum())


# --- The GRU with attention -----------------------------------------------------------------------


def gru(change=None, batch=None, loss=None, finish=None, factor=0.3, uses="attention mean"):
    params = {
        "embed": normal(50, 16, seed=5),
        "gates": normal(32, 32, seed=6, size=0.2),
        "candidate": normal(32, 16, seed=7, size=0.2),
        "head": normal(32, 4, seed=8, size=0.2),
    }
    params = params if change is None else changed(params, *change)
    given = {
        "tokens": np.random.default_rng(0).integers(0, 50, (4, 9)),
        "lengths": np.array([9, 3, 5, 7]),
        "targets": np.arange(4.0, dtype=np.float32),
    }
    given.update(batch or {})

    def states_of(params, x):
        def step(h, x):
            both = jnp.concatenate([x, h], -1)
            r, z = jnp.split(jax.nn.sigmoid(both @ params["gates"].astype(x.dtype)), 2, -1)
            c = jnp.tanh(jnp.concatenate([x, r * h], -1) @ params["candidate"].astype(x.dtype))
            h = (1 - z) * h + z * c
            return h, h

        return jax.lax.scan(step, jnp.zeros((4, 16), x.dtype), jnp.swapaxes(x, 0, 1))[1]

    def attention(states, lengths):
        def one(states, length):
            scores = states @ states[-1] * factor
            scores = jnp.where(jnp.arange(9) < length, scores, -jnp.inf)
            return jax.nn.softmax(scores) @ states

        return jax.vmap(one)(states, lengths)

    def averaged(states, lengths):
        inside = (jnp.arange(9) < lengths[:, None])[..., None].astype(states.dtype)
        return (states * inside).mean(1) / (lengths[:, None] / 9).astype(states.dtype)

    def mean(found, targets):
        return jnp.mean((wide(found).sum(-1) - targets) ** 2)

    def loss_fn(params, batch, dtype):
        with jax.named_scope("embed"):
            x = params["embed"].astype(dtype)[batch["tokens"]]
        states = jnp.swapaxes(states_of(params, x), 0, 1)
        parts = [
            attention(states, batch["lengths"]) if "attention" in uses else states[:, -1],
            averaged(states, batch["lengths"]) if "mean" in uses else states[:, 0],
        ]
        found = jnp.concatenate(parts, -1) @ params["head"].astype(dtype)
        return (loss or mean)(found if finish is None else finish(found), batch["targets"])

    return loss_fn, params, given


def log_probabilities(x):
    powers = jnp.exp((x - x.max(-1, keepdims=True) - 0.1) * 400)
    return jnp.log(powers / (powers.sum(-1, keepdims=True) + 1))


def newton(x):
    """The inverse of 1 + x**2 by a loop with a fixed number of steps, from a bad start."""
    return jax.lax.fori_loop(0, 12, lambda _, y: y * (2 - (1 + x * x) * y), jnp.full_like(x, 9.0))


def branch(x):
    return jax.lax.cond(x.max() > 1e9, jnp.sin, lambda x: jnp.log(jnp.minimum(x, 0)), x)


# --- A function between two linear layers ---------------------------------------------------------


def between(apply):
    params = {"up": normal(8, 16, size=0.3, seed=1), "head": normal(16, 8, size=0.3, seed=2)}

    def loss_fn(params, batch, dtype):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return jnp.mean(wide(apply(batch.astype(dtype) @ params["up"]) @ params["head"]) ** 2)

    return loss_fn, params, normal(6, 8)


def rotary(h):
    with jax.named_scope("rotary"):
        angle = (jnp.arange(6) * 16384).astype(h.dtype)[:, None] * 0.01
    first, second = jnp.split(h, 2, -1)
    return jnp.concatenate([first * jnp.cos(angle) - second, first * jnp.sin(angle) + second], -1)


@jax.custom_vjp
def rounded(x):
    step = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / step) * step


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


def quantizer(h):
    with jax.named_scope("quantized"):
        return rounded(jax.nn.relu(h - 100))


def switched(h):
    def warm(h):
        return jnp.cumsum(h * 0 + 9000, -1)

    return jax.lax.cond(h.max() > 0, warm, jnp.tanh, h) / 9000 * h


def to(value):
    return lambda leaf: jnp.full_like(leaf, value)


def at_one(value):
    return lambda leaf: leaf.at[(0,) * leaf.ndim].set(value)


def times(factor):
    return lambda leaf: leaf * factor


NAN, INF = math.nan, math.inf
BLACK = jnp.zeros((4, 16, 16, 3))
EMPTY = {"lengths": np.array([9, 3, 0, 7])}
ALIKE = {"image": jnp.full((2, 16, 16, 3), 0.5), "weight": jnp.ones((2, 16, 16, 1))}

CASES = {
    "vit: a scale of 2**30": Case(vit, "scale", scale=2.0**30),
    "vit: images of 1e6": Case(
        lambda: vit(images=normal(4, 16, 16, 3) * 1e6), "forward overflow", "convert", ""
    ),
    "vit: large attention scores": Case(
        lambda: vit(factor=1e5), "forward overflow", "dot mul", "attention_0"
    ),
    "vit: black images and an epsilon of 1e-8": Case(
        lambda: vit(images=BLACK, eps=1e-8), "singular", "rsqrt", "first_norm"
    ),
    "vit: black images and an epsilon of 0": Case(
        lambda: vit(images=BLACK, eps=0.0), "singular", "rsqrt", "first_norm"
    ),
    "vit: NaN in the positions": Case(
        lambda: vit(change=(["positions"], at_one(NAN))), "weights", "", "positions"
    ),
    "vit: a gain of 1e6": Case(
        lambda: vit(change=(["first_norm", "gain"], at_one(1e6))), "forward overflow", "", "norm"
    ),
    "vit: a cube in the activation": Case(
        lambda: vit(gate=lambda x: x * ((40 * x) ** 3 / (1 + (40 * x) ** 3))),
        "forward overflow",
        "pow mul",
    ),
    "vit: a temperature of 1e-8": Case(
        lambda: vit(change=(["temperature"], to(1e-8))), "singular", "div", "ViT"
    ),
    "vit: a row that is masked as a whole": Case(
        lambda: vit(masked=(3,)), "singular", "sub exp max", "attention_0"
    ),
    "unet: a scale of 2**28": Case(unet, "scale", scale=2.0**28),
    "unet: large weights in the middle": Case(
        lambda: unet(change=(["middle"], lambda w: abs(w) * 5e4)),
        "forward overflow",
        "conv",
        "middle",
    ),
    "unet: a sum over the image": Case(
        lambda: unet(gate=pooled), "forward overflow", "reduce_sum convert", "pooled"
    ),
    "unet: nothing in the middle and an epsilon of 1e-9": Case(
        lambda: unet(change=(["middle"], to(0.0)), eps=1e-9), "singular", "div", "instance_norm"
    ),
    "unet: edges of a constant image": Case(
        lambda: unet(before=edges, batch=lambda _: ALIKE),
        "singular, backward overflow",
        "sqrt div",
        "instance_norm",
    ),
    "unet: NaN in a pixel": Case(
        lambda: unet(batch=lambda x: {**ALIKE, "image": x.at[0, 3, 3, 1].set(NAN)}),
        "batch",
        "image",
    ),
    "unet: an infinite weight of a pixel": Case(
        lambda: unet(batch=lambda x: {"image": x, "weight": ALIKE["weight"].at[0, 0, 0].set(INF)}),
        "batch",
        "weight",
    ),
    "unet: an infinite mean": Case(
        lambda: unet(change=(["mean"], at_one(-INF))), "weights", "", "mean"
    ),
    "unet: a gradient times 3.6e6": Case(lambda: unet(after=amplified), "scale"),
    "unet: a gradient divided by 0": Case(
        lambda: unet(after=divided), "singular, backward overflow", "div"
    ),
    "unet: a Dice loss of nothing": Case(lambda: unet(loss=dice), "singular, loss", "div", "dice"),
    "gru: a scale of 2**26": Case(gru, "scale", scale=2.0**26),
    "gru: an embedding of 1e6": Case(
        lambda: gru(change=(["embed"], times(1e6))), "forward overflow", "convert", "embed"
    ),
    "gru: attention over nothing": Case(
        lambda: gru(batch=EMPTY, uses="attention"), "singular", "sub exp max", "one"
    ),
    "gru: the mean of nothing": Case(
        lambda: gru(batch=EMPTY, uses="mean"), "singular", "div", "averaged"
    ),
    "gru: the logarithm of a probability of 0": Case(
        lambda: gru(finish=log_probabilities), "singular", "log", "log_probabilities"
    ),
    "gru: a power that is too large": Case(
        lambda: gru(finish=lambda x: jnp.exp(12 + x * x)), "forward overflow", "exp"
    ),
    "gru: a loop that diverges": Case(
        lambda: gru(finish=newton), "forward overflow", "mul", "newton"
    ),
    "gru: a logarithm in a branch": Case(lambda: gru(finish=branch), "singular", "log", "branch"),
    "gru: infinite targets": Case(
        lambda: gru(batch={"targets": np.full(4, INF, np.float32)}), "batch", "targets"
    ),
    "rotary positions beyond 65,504": Case(
        lambda: between(rotary), "forward overflow", "convert", "rotary"
    ),
    "a quantizer of nothing": Case(lambda: between(quantizer), "singular", "div", "quantized"),
    "a sum in a branch": Case(lambda: between(switched), "forward overflow", "cumsum", "warm"),
}
