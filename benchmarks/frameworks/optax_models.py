"""Small models in plain JAX, computing in float16 with parameters in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _matrices(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        name: jnp.asarray(random.normal(size=shape, scale=shape[-2] ** -0.5), jnp.float32)
        if len(shape) > 1
        else jnp.zeros(shape, jnp.float32)
        for name, shape in shapes.items()
    }


def _half(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


def mlp(small: bool) -> tuple[Any, Any, Any]:
    """A perceptron with 2.4 million parameters on a batch of 64."""
    width = 16 if small else 1024
    params = _matrices(
        {"w1": (256, width), "b1": (width,), "w2": (width, width), "b2": (width,),
         "w3": (width, width), "b3": (width,), "w4": (width, 10)}
    )  # fmt: skip

    def loss(params: Any, batch: Any) -> Any:
        p, (x, labels) = _half(params), batch
        for layer in "123":
            x = jax.nn.relu(x @ p[f"w{layer}"] + p[f"b{layer}"])
        return _cross_entropy(x @ p["w4"], labels)

    return params, loss, _batch((64, 256))


def cnn(small: bool) -> tuple[Any, Any, Any]:
    """A convolutional network with 1.1 million parameters on a batch of 16."""
    width = 8 if small else 128
    params = _matrices(
        {"c1": (3, 3, 3, width), "c2": (3, 3, width, width), "c3": (3, 3, width, 2 * width),
         "c4": (3, 3, 2 * width, 2 * width), "w": (2 * width, 10)}
    )  # fmt: skip

    def loss(params: Any, batch: Any) -> Any:
        p, (x, labels) = _half(params), batch
        for layer in ("c1", "c2", "c3", "c4"):
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x, p[layer], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return _cross_entropy(jnp.mean(x, axis=(1, 2)) @ p["w"], labels)

    return params, loss, _batch((16, 32, 32, 3))


def transformer(small: bool) -> tuple[Any, Any, Any]:
    """A transformer block with 1.3 million parameters on 512 tokens."""
    width = 16 if small else 320
    heads = 4
    params = _matrices(
        {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width),
         "b": (4 * width,), "down": (4 * width, width), "head": (width, 64)}
    )  # fmt: skip

    def normal(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(
            wide.var(-1, keepdims=True) + 1e-5
        )
        return wide.astype(x.dtype)

    def loss(params: Any, batch: Any) -> Any:
        p, (x, labels) = _half(params), batch
        parts = (normal(x) @ p["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
        q, k, v = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(normal(x) @ p["up"] + p["b"]) @ p["down"]
        return _cross_entropy(normal(x) @ p["head"], labels)

    return params, loss, _batch((4, 128, width), labels=(4, 128))


def _batch(shape: tuple[int, ...], labels: tuple[int, ...] | None = None) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    inputs = jnp.asarray(random.normal(size=shape), jnp.float16)
    return inputs, jnp.asarray(random.integers(0, 10, labels or shape[:1]), jnp.int32)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
"""Each returns parameters, the loss and a batch."""
