"""Faults in a vision transformer, a U-Net, a GRU with attention and others, and the right answers.

They were written before they were first run. Of these, those stay whose kind no other case has, and
those that were answered wrongly.
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
    factor: float

    @linen.compact
    def __call__(self, x):
        q, k, v = jnp.split(linen.Dense(3 * x.shape[-1], dtype=x.dtype, name="qkv")(x), 3, -1)
        scores = q * self.factor @ jnp.swapaxes(k, -1, -2)
        return jax.nn.softmax(scores) @ v


class ViT(linen.Module):
    dtype: Any
    factor: float = 0.25

    @linen.compact
    def __call__(self, images):
        x = linen.Conv(16, (4, 4), (4, 4), dtype=self.dtype, name="patch", use_bias=False)(images)
        x = x.reshape(x.shape[0], -1, 16)
        positions = self.param("positions", linen.initializers.normal(0.1), (16, 16))
        x = RMSNorm(1e-3, name="first_norm")(x) + positions.astype(x.dtype)
        for n in range(2):
            x = x + Attention(self.factor, name=f"attention_{n}")(x)
            h = linen.Dense(32, dtype=self.dtype, name=f"up_{n}")(x)
            x = x + linen.Dense(16, dtype=self.dtype, name=f"down_{n}")(jax.nn.gelu(h))
        temperature = self.param("temperature", linen.initializers.ones, ())
        return linen.Dense(4, dtype=self.dtype, name="head")(x.mean(1)) / temperature.astype(
            x.dtype
        )


def vit(change=None, **settings):
    """A program: its loss function, parameters and batch."""
    images = normal(4, 16, 16, 3)
    params = ViT(jnp.float32, **settings).init(jax.random.key(0), images)["params"]
    params = params if change is None else changed(params, *change)

    def loss_fn(params, batch, dtype):
        logits = wide(ViT(dtype, **settings).apply({"params": params}, batch.astype(dtype)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(4)).mean()

    return loss_fn, params, images


# --- The U-Net, in functions ----------------------------------------------------------------------


def conv(w, x):
    return jax.lax.conv_general_dilated(
        x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def instance_norm(x):
    with jax.named_scope("instance_norm"):
        centered = x - x.mean((1, 2), keepdims=True)
        return centered / (jnp.sqrt((centered * centered).mean((1, 2), keepdims=True)) + 1e-3)


def unet(change=None, batch=None, before=None, after=None):
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
        middle = instance_norm(middle)
        up = jnp.repeat(jnp.repeat(middle, 2, 1), 2, 2)
        up = up if after is None else after(up)
        with jax.named_scope("out"):
            return conv(params["out"], jnp.concatenate([first, up], -1))

    def loss_fn(params, batch, dtype):
        return mean(model(params, batch["image"].astype(dtype)), batch["weight"])

    return loss_fn, params, batch


def edges(x):
    dx, dy = x - jnp.roll(x, 1, 1), x - jnp.roll(x, 1, 2)
    return jnp.sqrt(dx * dx + dy * dy) + x


@jax.custom_vjp
def divided(x):
    return x


divided.defvjp(lambda x: (x, None), lambda _, g: (g / (g * 0),))


# --- The GRU with attention -----------------------------------------------------------------------


def gru(batch=None, finish=None):
    params = {
        "embed": normal(50, 16, seed=5),
        "gates": normal(32, 32, seed=6, size=0.2),
        "candidate": normal(32, 16, seed=7, size=0.2),
        "head": normal(16, 4, seed=8, size=0.2),
    }
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
            scores = states @ states[-1] * 0.3
            scores = jnp.where(jnp.arange(9) < length, scores, -jnp.inf)
            return jax.nn.softmax(scores) @ states

        return jax.vmap(one)(states, lengths)

    def mean(found, targets):
        return jnp.mean((wide(found).sum(-1) - targets) ** 2)

    def loss_fn(params, batch, dtype):
        with jax.named_scope("embed"):
            x = params["embed"].astype(dtype)[batch["tokens"]]
        states = jnp.swapaxes(states_of(params, x), 0, 1)
        found = attention(states, batch["lengths"]) @ params["head"].astype(dtype)
        return mean(found if finish is None else finish(found), batch["targets"])

    return loss_fn, params, given


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


EMPTY = {"lengths": np.array([9, 3, 0, 7])}
ALIKE = {"image": jnp.full((2, 16, 16, 3), 0.5), "weight": jnp.ones((2, 16, 16, 1))}

CASES = {
    "vit: large attention scores": Case(
        lambda: vit(factor=1e5), "forward overflow", "dot mul", "attention_0"
    ),
    "vit: NaN in the positions": Case(
        lambda: vit(change=(["positions"], at_one(math.nan))), "weights", "", "positions"
    ),
    "vit: a temperature of 1e-8": Case(
        lambda: vit(change=(["temperature"], to(1e-8))), "singular", "div", "ViT"
    ),
    "unet: large weights in the middle": Case(
        lambda: unet(change=(["middle"], lambda w: abs(w) * 5e4)),
        "forward overflow",
        "conv",
        "middle",
    ),
    "unet: edges of a constant image": Case(
        lambda: unet(before=edges, batch=lambda _: ALIKE),
        "singular, backward overflow",
        "sqrt div",
        "instance_norm",
    ),
    "unet: an infinite mean": Case(
        lambda: unet(change=(["mean"], at_one(-math.inf))), "weights", "", "mean"
    ),
    "unet: a gradient divided by 0": Case(
        lambda: unet(after=divided), "singular, backward overflow", "div"
    ),
    "gru: attention over nothing": Case(lambda: gru(batch=EMPTY), "singular", "sub exp max", "one"),
    "gru: a power that is too large": Case(
        lambda: gru(finish=lambda x: jnp.exp(12 + x * x)), "forward overflow", "exp"
    ),
    "gru: a loop that diverges": Case(
        lambda: gru(finish=newton), "forward overflow", "mul", "newton"
    ),
    "gru: a logarithm in a branch": Case(lambda: gru(finish=branch), "singular", "log", "branch"),
    "rotary positions beyond 65,504": Case(
        lambda: between(rotary), "forward overflow", "convert", "rotary"
    ),
    "a quantizer of nothing": Case(lambda: between(quantizer), "singular", "div", "quantized"),
    "a sum in a branch": Case(lambda: between(switched), "forward overflow", "cumsum", "warm"),
}
