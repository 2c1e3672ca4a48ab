"""Twenty faults in architectures of today, and the right answers, written before they first ran."""

import math

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from frameworks.jax.explain_cases import Case, normal, wide


def program(apply, x, change=None, loss=None, **sizes):
    """A loss of a function of parameters and an input, between two linear layers."""
    params = {"up": normal(8, 16, size=0.3, seed=1), "head": normal(16, 8, size=0.3, seed=2)}
    params |= {name: normal(*size, size=0.3, seed=3) for name, size in sizes.items()}
    params |= change or {}

    def loss_fn(params, batch, dtype):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        h = apply(params, batch.astype(dtype) @ params["up"])
        out = wide(h @ params["head"])
        return jnp.mean(out * out) if loss is None else loss(out)

    return loss_fn, params, x


X = normal(6, 8)


# --- A mixture of experts -------------------------------------------------------------------------


def experts(params, h):
    with jax.named_scope("router"):
        logits = h @ params["router"]
        normalizer = jnp.log(jnp.sum(jnp.exp(logits), -1, keepdims=True))
    outputs = jax.vmap(lambda w: jax.nn.silu(h @ w))(params["experts"])
    return jnp.einsum("tb,btd->td", jnp.exp(logits - normalizer), outputs)


def shares(params, h):
    """Each token's share of its best two experts, with probabilities that float16 rounds to 0."""
    probabilities = jax.nn.softmax(h @ params["router"] * 300, -1)
    with jax.named_scope("second_best"):
        values, places = jax.lax.top_k(probabilities, 3)
        rest = values[:, 1:] / values[:, 1:].sum(-1, keepdims=True)
    return h * rest.sum(-1, keepdims=True)


# --- Rotary embeddings, attention -----------------------------------------------------------------


def rotary(params, h):
    with jax.named_scope("rotary"):
        positions = (jnp.arange(h.shape[0]) * 16384).astype(h.dtype)
        angle = positions[:, None] * 0.01
    first, second = jnp.split(h, 2, -1)
    return jnp.concatenate([first * jnp.cos(angle) - second, first * jnp.sin(angle) + second], -1)


def graph_attention(params, h):
    edges = jnp.asarray(np.eye(6, dtype=bool) & (np.arange(6) != 4))

    def head(query):
        scores = jax.nn.leaky_relu((h * query) @ h.T)
        with jax.named_scope("neighbours"):
            scores = jnp.where(edges, scores, -jnp.inf)
            powers = jnp.exp(scores - scores.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True) @ h

    return jax.vmap(head)(params["queries"]).mean(0)


# --- Norms ----------------------------------------------------------------------------------------


@jax.checkpoint
def group_norm(h):
    groups = h.reshape(6, 4, 4)
    centered = groups - groups.mean(-1, keepdims=True)
    with jax.named_scope("group_norm"):
        variance = (centered * centered).mean(-1, keepdims=True)
        return (centered * jax.lax.rsqrt(variance + 1e-8)).reshape(h.shape)


class Block(linen.Module):
    """An RMS norm and a gated layer; the norm sees activations times a factor."""

    factor: float

    @linen.compact
    def __call__(self, x):
        gain = self.param("gain", linen.initializers.ones, (x.shape[-1],)).astype(x.dtype)
        x = x * self.factor
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3) * gain
        return linen.Dense(x.shape[-1], dtype=x.dtype)(jax.nn.silu(x))


class Model(linen.Module):
    factor: float

    @linen.compact
    def __call__(self, x):
        for n in range(2):
            x = x + Block(self.factor if n else 1.0, name=f"block_{n}")(x)
        return x


def gated(factor):
    params = {"model": Model(1.0).init(jax.random.key(0), jnp.ones((1, 16)))["params"]}
    return program(
        lambda params, h: Model(factor).apply({"params": params["model"]}, h), X, change=params
    )


# --- Losses ---------------------------------------------------------------------------------------


def contrastive(params, h):
    """As of CLIP, with a learned temperature that has grown."""
    with jax.named_scope("temperature"):
        factor = jnp.exp(params["temperature"])
    normed = h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-3)
    return jax.nn.log_softmax(normed @ normed.T * factor) @ h


def cosine(params, h):
    def similarity(one, other):
        return one @ other / (jnp.sqrt(one @ one) * jnp.sqrt(other @ other))

    silent = h.at[2].set(0)
    return h * jax.vmap(similarity)(h, silent)[:, None]


def divergence(params, h):
    p, q = jax.nn.softmax(h), jax.nn.softmax(h[::-1] * 40)
    with jax.named_scope("divergence"):
        return h + jnp.sum(p * (jnp.log(p) - jnp.log(q)), -1, keepdims=True)


def focal(params, h):
    p = jax.nn.sigmoid(h * 30)
    with jax.named_scope("focal"):
        return -((1 - p) ** 2) * jnp.log(p)


def ppo(params, h):
    """Of ratios that overflow, the objective takes the clipped ones."""
    with jax.named_scope("ratio"):
        ratio = jnp.exp(h * 12)
    return jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2))


def triplet(params, h):
    positive = h.at[0].add(0.5)
    with jax.named_scope("distance"):
        apart = jnp.sqrt(((h - positive) ** 2).sum(-1, keepdims=True))
    return jax.nn.relu(apart - 0.1) + h


def ssim(params, h):
    black = h * 0
    mean, variance = black.mean(-1, keepdims=True), black.var(-1, keepdims=True)
    with jax.named_scope("luminance"):
        found = (2 * mean * mean + 1e-9) / (mean**2 + mean**2 + 1e-9)
    return h * found + variance


# --- Generative models ----------------------------------------------------------------------------


def vae(params, h):
    mean, logarithm = jnp.split(h, 2, -1)
    with jax.named_scope("sampled"):
        deviation = jnp.exp(0.5 * (logarithm + params["shift"]))
    noise = normal(6, 8, seed=7).astype(h.dtype)
    return jnp.concatenate([mean + deviation * noise, mean], -1)


def flow(params, h):
    def layer(carry, w):
        x, log_det = carry
        x = x + jnp.tanh(x @ w * 20)
        with jax.named_scope("log_det"):
            log_det = log_det + jnp.log(1 - jnp.tanh(x @ w * 20) ** 2).sum(-1)
        return (x, log_det), None

    (x, log_det), _ = jax.lax.scan(layer, (h, h[:, 0]), params["layers"])
    return x + log_det[:, None]


# --- Control flow ---------------------------------------------------------------------------------


def state_space(params, h):
    """A recurrence whose transition has an eigenvalue of 2."""

    def step(state, x):
        with jax.named_scope("transition"):
            state = state * 2 + x
        return state, state

    tokens = jnp.tile(jnp.abs(h) + 1, (4, 1))
    return jax.lax.scan(step, jnp.zeros_like(h[0]), tokens)[1]


def spectral(params, h):
    """Power iteration on a matrix of zeros, until 5 iterations are done."""
    w = jax.lax.stop_gradient(params["matrix"])

    def iteration(state):
        n, v = state
        with jax.named_scope("power_iteration"):
            v = w @ v
            v = v / jnp.sqrt(v @ v)
        return n + 1, v

    _, v = jax.lax.while_loop(lambda state: state[0] < 5, iteration, (0, jnp.ones_like(w[0])))
    return h @ params["matrix"] * (v @ (w @ v))


@jax.custom_vjp
def quantized(x):
    step = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / step) * step


quantized.defvjp(lambda x: (quantized(x), None), lambda _, g: (g,))


def quantizer(params, h):
    with jax.named_scope("quantized"):
        return quantized(jax.nn.relu(h - 100))


def switched(params, h):
    def warm(h):
        return jnp.cumsum(h * 0 + 9000, -1)

    return jax.lax.cond(h.max() > 0, warm, jnp.tanh, h) / 9000 * h


class Mixer(nnx.Module):
    def __init__(self, size):
        self.norm = nnx.RMSNorm(8, rngs=nnx.Rngs(0))
        self.mix = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.mix.kernel[...] = self.mix.kernel[...].at[0, 0].set(size)


def mixer(size):
    def loss_fn(model, batch, dtype):
        graph, state = nnx.split(model)
        model = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(dtype), state))
        out = wide(model.mix(model.norm(batch.astype(dtype))))
        return optax.squared_error(out).mean()

    return loss_fn, Mixer(size), X


ROUTER = {"router": (16, 5), "experts": (5, 16, 16)}
CASES = {
    "experts whose router overflows": Case(
        lambda: program(experts, X * 30, **ROUTER), "forward overflow", "exp", "router"
    ),
    "shares of the second best of nothing": Case(
        lambda: program(shares, X * 9, **ROUTER), "singular", "div", "second_best"
    ),
    "rotary positions beyond 65,504": Case(
        lambda: program(rotary, X), "forward overflow", "convert", "rotary"
    ),
    "a node without neighbours": Case(
        lambda: program(graph_attention, X, queries=(3, 16)), "singular", "sub exp", "neighbours"
    ),
    "a group of constants": Case(
        lambda: program(lambda params, h: h + group_norm(h * 0), X),
        "singular",
        "rsqrt",
        "group_norm",
    ),
    "a norm of squares that overflow": Case(
        lambda: gated(3e2), "forward overflow", "pow mul square", "block_1", 1.0
    ),
    "a learned temperature": Case(
        lambda: program(contrastive, X, {"temperature": jnp.float32(12)}),
        "forward overflow",
        "exp",
        "temperature",
    ),
    "the cosine with silence": Case(lambda: program(cosine, X), "singular", "div", "similarity"),
    "a divergence from a probability of 0": Case(
        lambda: program(divergence, X), "singular", "log", "divergence"
    ),
    "a focal loss of a probability of 0": Case(
        lambda: program(focal, X), "singular", "log", "focal"
    ),
    "a ratio that is clipped": Case(lambda: program(ppo, X), "forward overflow", "exp", "ratio"),
    "a triplet with itself": Case(
        lambda: program(triplet, X), "singular, backward overflow", "sqrt div", "distance"
    ),
    "the similarity of black images": Case(
        lambda: program(ssim, X), "singular", "div", "luminance"
    ),
    "a variance of e**30": Case(
        lambda: program(vae, X, {"shift": jnp.float32(30)}), "forward overflow", "exp", "sampled"
    ),
    "a flow that saturates": Case(
        lambda: program(flow, X, layers=(3, 16, 16)), "singular", "log", "log_det"
    ),
    "a recurrence that doubles": Case(
        lambda: program(state_space, X, loss=lambda out: jnp.mean(jnp.abs(out))),
        "forward overflow",
        "mul",
        "transition",
    ),
    "power iteration of zeros": Case(
        lambda: program(spectral, X, {"matrix": jnp.zeros((16, 16))}),
        "singular",
        "div",
        "power_iteration",
    ),
    "a quantizer of nothing": Case(lambda: program(quantizer, X), "singular", "div", "quantized"),
    "a sum in a branch": Case(
        lambda: program(switched, X), "forward overflow", "cumsum add", "warm"
    ),
    "a kernel of NNX beyond 65,504": Case(lambda: mixer(1e5), "forward overflow", "convert", "mix"),
    "a broken kernel of NNX": Case(lambda: mixer(math.nan), "weights", "", "mix/kernel"),
    "a scale that is too high": Case(
        lambda: program(lambda params, h: group_norm(h), X), "scale", scale=2.0**30
    ),
}
