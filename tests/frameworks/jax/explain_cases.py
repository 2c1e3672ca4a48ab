"""Faults in what JAX alone has, between two linear layers, and the right answers.

They were written before they were first run, thirty in three models and ten others; those stay
whose kind neither another one nor tests/broken_blocks.py has.
"""

import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0, size=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * size, jnp.float32)


PARAMS = {"up": normal(8, 16, size=0.3, seed=1), "head": normal(16, 8, size=0.3, seed=2)}
BATCH = normal(6, 8)


def loss_of(apply, params, batch, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    predicted = apply(batch.astype(dtype) @ params["up"]) @ params["head"]
    return jnp.mean(predicted.astype(jnp.float32) ** 2)


CASES = {}


def case(causes, operations, module=""):
    def add(apply):
        loss_fn = functools.partial(loss_of, apply)
        CASES[getattr(apply, "__name__", module)] = loss_fn, causes, operations, module
        return apply

    return add


class Attention(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jax.nn.softmax(x * 1e5 @ x.T) @ x


@case("forward overflow", "dot mul", "attention_0")
def modules(h):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Attention(name="attention_0")(x)

    return Model().apply({}, h)


@case("forward overflow", "conv", "middle")
def convolution(h):
    @jax.checkpoint
    def large(x):
        with jax.named_scope("middle"):
            kernel = jnp.full((3, 1, 1), 6e4, x.dtype)
            return jax.lax.conv_general_dilated(
                abs(x) + 1, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )

    return jax.jit(large)(h[:, :, None])[..., 0]


@case("forward overflow", "mul add", "step")
def recurrence(h):
    def step(state, x):
        state = state * 2 + abs(x) + 1
        return state, state

    return jax.lax.scan(step, h[0], jnp.concatenate([h] * 4))[1][-6:]


@case("singular", "sub exp max", "one")
def attention_over_nothing(h):
    def one(row, length):
        return jax.nn.softmax(jnp.where(jnp.arange(16) < length, row, -jnp.inf))

    return jax.vmap(one)(h, jnp.arange(6))


@case("forward overflow", "mul", "newton")
def newton(x):
    """The inverse of 1 + x**2 by a loop with a fixed number of steps, from a bad start."""
    return jax.lax.fori_loop(0, 12, lambda _, y: y * (2 - (1 + x * x) * y), jnp.full_like(x, 9.0))


@case("singular", "log", "branch")
def branch(x):
    return jax.lax.cond(x.max() > 1e9, jnp.sin, lambda x: jnp.log(jnp.minimum(x, 0)), x)


@case("forward overflow", "convert", "rotary")
def rotary(h):
    with jax.named_scope("rotary"):
        angle = (jnp.arange(6) * 16384).astype(h.dtype)[:, None] * 0.01
    return h * jnp.cos(angle)


@jax.custom_vjp
def rounded(x):
    step = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / step) * step


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


@case("singular", "div", "quantized")
def quantizer_of_nothing(h):
    with jax.named_scope("quantized"):
        return rounded(jax.nn.relu(h - 100))


@jax.custom_vjp
def divided(x):
    return x


divided.defvjp(lambda x: (x, None), lambda _, g: (g / (g * 0),))


@case("singular, backward overflow", "div")
def gradient_divided_by_0(h):
    return divided(h)


@case("forward overflow", "cumsum", "warm")
def sum_in_a_branch(h):
    def warm(h):
        return jnp.cumsum(h * 0 + 9000, -1)

    return jax.lax.cond(h.max() > 0, warm, jnp.tanh, h) / 9000 * h
