"""Optax with and without loss scaling, in a process without Keras: pure functions of a state.

A state is parameters, the state of the transformation and that of the scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.frameworks.jax import FRAMEWORK as ON_JAX
from benchmarks.frameworks.jax import Compiled
from benchmarks.methods import SCALE
from benchmarks.rows import Row
from lossscale import optax as ours

INTERVAL = 2000
INNER = {
    "adam": lambda: optax.adam(1e-4),
    "adamw_clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
}
WRAPPED = {
    "lossscale": lambda inner: ours.loss_scaled(inner, initial_scale=SCALE),
    "tracked": lambda inner: ours.loss_scaled(inner, initial_scale=SCALE, track_overflows=True),
    "masters": lambda inner: WRAPPED["lossscale"](ours.master_weights(inner)),
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 5),
}


OURS = ("lossscale", "tracked", "masters")
"""Of these, `masters` has float16 parameters."""


def _update(tx: Any, state: Any, gradients: Any) -> Any:
    params, opt_state, scale = state
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, scale


def _update_with_jmp(tx: Any, state: Any, gradients: Any) -> Any:
    import jmp

    scale = jmp.DynamicLossScale(*state[2])
    gradients = scale.unscale(gradients)
    finite = jmp.all_finite(gradients)
    kept = jmp.select_tree(finite, _update(tx, state, gradients)[:2], state[:2])
    scale = scale.adjust(finite)
    return *kept, (scale.loss_scale, scale.counter)


def _update_with_flax(tx: Any, state: Any, gradients: Any) -> Any:
    # What `DynamicScale.value_and_grad` does after the backward pass, and its example after that.
    number, good = state[2]
    gradients = jax.tree.map(lambda g: g / number, gradients)
    finite = jnp.array(True)
    for gradient in jax.tree.leaves(gradients):
        finite &= jnp.all(jax.lax.is_finite(gradient))
    grows = good == INTERVAL
    grown = jnp.where(grows & finite, jnp.minimum(number * 2.0, 3.4e38), number)
    number = jnp.where(finite, grown, jnp.maximum(number * 0.5, 1.2e-38))
    good = jnp.where(grows | ~finite, 0, good + 1)
    return *_chosen(finite, _update(tx, state, gradients)[:2], state[:2]), (number, good)


def _chosen(finite: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


UPDATES = {"jmp": _update_with_jmp, "flax": _update_with_flax}


def _alone(name: str, tx: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    """A step of the transformation alone; returns the state and what is read."""
    leaves = jax.tree.leaves(gradients)
    read = sum(jnp.sum(gradient) for gradient in leaves) if name == "read" else None
    return UPDATES.get(name, _update)(tx, state, gradients), read


def _whole(name: str, tx: Any, loss: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    """A whole training step; returns the state and the loss."""
    params, opt_state, scale = state

    def scaled(params: Any) -> Any:
        import jmp

        value = loss(params, batch)
        return jmp.DynamicLossScale(*scale).scale(value), value

    if name == "flax":
        scale, finite, value, gradients = scale.value_and_grad(loss)(params, batch)
        return (*_chosen(finite, _update(tx, state, gradients)[:2], state[:2]), scale), value
    if name in OURS:
        value, gradients = ours.value_and_grad(loss)(opt_state, params, batch)
    elif name == "jmp":
        gradients, value = jax.grad(scaled, has_aux=True)(params)
    else:
        value, gradients = jax.value_and_grad(loss)(params, batch)
    return UPDATES.get(name, _update)(tx, state, gradients), value


def mlp(small: bool) -> tuple[Any, ...]:
    """A perceptron with 2.4 million parameters on a batch of 64."""
    width = 16 if small else 1024
    shapes = {f"w{layer}": (width, width) for layer in "23"}
    shapes |= {f"b{layer}": (width,) for layer in "123"}
    shapes |= {"w1": (256, width), "w4": (width, 10)}

    def logits(p: Any, x: Any) -> Any:
        for layer in "123":
            x = jax.nn.relu(x @ p[f"w{layer}"] + p[f"b{layer}"])
        return x @ p["w4"]

    return shapes, logits, (64, 256), (64,)


def cnn(small: bool) -> tuple[Any, ...]:
    """A convolutional network with 1.1 million parameters on a batch of 16."""
    width = 8 if small else 128
    channels = (3, width, width, 2 * width, 2 * width)
    shapes = {f"c{i}": (3, 3, channels[i], channels[i + 1]) for i in range(4)}

    def logits(p: Any, x: Any) -> Any:
        axes = ("NHWC", "HWIO", "NHWC")
        for kernel in (p[f"c{i}"] for i in range(4)):
            x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=axes)
            x = jax.nn.relu(x)
        return jnp.mean(x, axis=(1, 2)) @ p["w"]

    return {**shapes, "w": (2 * width, 10)}, logits, (16, 32, 32, 3), (16,)


def transformer(small: bool) -> tuple[Any, ...]:
    """A transformer block with 1.3 million parameters on 512 tokens."""
    width, heads = 16 if small else 320, 4
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
    shapes |= {"b": (4 * width,), "down": (4 * width, width), "head": (width, 64)}

    def normal(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide -= wide.mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)).astype(x.dtype)

    def logits(p: Any, x: Any) -> Any:
        parts = (normal(x) @ p["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
        q, k, v = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(normal(x) @ p["up"] + p["b"]) @ p["down"]
        return normal(x) @ p["head"]

    return shapes, logits, (4, 128, width), (4, 128)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
"""Each returns the shapes of parameters, what makes logits of them, and the shapes of a batch."""


def _model(name: str, small: bool) -> tuple[Any, Callable[[Any, Any], Any], Any]:
    """Returns parameters in float32, a loss that computes in float16, and a batch."""
    shapes, logits, *batch = MODELS[name](small)
    random = np.random.default_rng(0)
    params = {
        name: jnp.asarray(random.normal(size=shape, scale=shape[-2] ** -0.5), jnp.float32)
        if len(shape) > 1
        else jnp.zeros(shape, jnp.float32)
        for name, shape in shapes.items()
    }

    def loss(params: Any, batch: Any) -> Any:
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
        logs = jax.nn.log_softmax(logits(half, batch[0]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logs, batch[1][..., None], axis=-1))

    inputs = jnp.asarray(random.normal(size=batch[0]), jnp.float16)
    return params, loss, (inputs, jnp.asarray(random.integers(0, 10, batch[1]), jnp.int32))


def _half(leaf: Any) -> Any:
    return leaf.astype(jnp.float16) if leaf.dtype == jnp.float32 else leaf


def _program(row: Row, name: str, small: bool) -> Compiled:
    tx = WRAPPED.get(name, lambda inner: inner)(INNER[row.optimizer]())
    # jmp's object itself cannot be lowered on this JAX, so its numbers.
    scale: Any = (jnp.float32(SCALE), jnp.int32(0)) if name in UPDATES else None
    if row.model:
        params, loss, given = _model(row.model, small)
        step = functools.partial(_whole, name, tx, loss)
        if name == "flax":
            from flax.training.dynamic_scale import DynamicScale

            scale = DynamicScale(scale=jnp.float32(SCALE))
    else:
        params = [jnp.asarray(value) for value in row.workload.values()]
        gradients = row.workload.gradients(SCALE if name in (*OURS, *UPDATES) else 1.0)
        given = [jnp.asarray(gradient) for gradient in gradients]
        step = functools.partial(_alone, name, tx)
    if name == "masters":
        params, given = (jax.tree.map(_half, tree) for tree in (params, given))
    return Compiled(step, (params, tx.init(params), scale), given, jit=row.mode == "jit")


FRAMEWORK = ON_JAX._replace(program=_program)
