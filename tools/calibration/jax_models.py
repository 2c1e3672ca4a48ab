"""Small models in JAX of the kinds that people train in float16, trained four ways."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lossscale
from tools.calibration import data
from tools.calibration.data import Split
from tools.calibration.outcomes import contradiction

_BATCH, _STEPS, _TEST = 64, 200, 400

Forward = Callable[[Any, Any, Any], Any]
"""Given the parameters, inputs in the dtype to compute in and that dtype, returns outputs."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        name: For the table.
        split: Returns the data.
        params: Returns the parameters.
        forward: Computes the outputs.
        loss: Of outputs, in float32, and targets.
        factor: What the loss is multiplied by.
        rate: Of Adam, whose steps do not depend on the factor.
        quality: What is judged instead of the loss; None for that.
    """

    name: str
    split: Callable[[], Split]
    params: Callable[[Any], Any]
    forward: Forward
    loss: Callable[[Any, Any], Any]
    factor: float = 1.0
    rate: float = 3e-3
    quality: Callable[[Any, Any], Any] | None = None

    def of(self, params: Any, batch: Any, dtype: Any) -> Any:
        """The loss of a batch."""
        x, y = batch
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        outputs = self.forward(cast, x.astype(dtype), dtype)
        outputs = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), outputs)
        return self.loss(outputs, y) * self.factor


def run(task: Task) -> dict[str, Any]:
    """Asks for the verdict, then trains in float32 and in float16.

    Args:
        task: What to train.

    Returns:
        A row of the table: the task, the verdict and the rule, the quality (the loss on data that
        was not trained on, less is better) untrained and by way to train.
    """
    params = task.params(jax.random.key(0))
    batches = [batch for batch, _ in zip(_batches(task), range(2), strict=False)]
    report = lossscale.optax.diagnose(task.of, params, batches)
    row: dict[str, Any] = {
        "task": task.name,
        "verdict": report.verdict.value,
        "rule": report.rule,
        "untrained": _quality(task, params),
        "float32": _train(task, jnp.float32, None),
        "unscaled": _train(task, jnp.float16, None),
        "default": _train(task, jnp.float16, lossscale.DynamicScale()),
    }
    if report.rule is not None:
        row["advised"] = _train(task, jnp.float16, report.rule)
    row["wrong"] = contradiction(row)
    return row


def _train(task: Task, dtype: Any, rule: Any) -> float:
    params = task.params(jax.random.key(0))
    tx = optax.adam(task.rate, eps=1e-8 * task.factor)
    if rule is not None:
        tx = lossscale.optax.loss_scaled(tx, rule=rule)

    def loss_fn(params: Any, batch: Any) -> Any:
        return task.of(params, batch, dtype)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        if rule is None:
            gradients = jax.grad(loss_fn)(params, batch)
        else:
            gradients = lossscale.optax.value_and_grad(loss_fn)(state, params, batch)[1]
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state, batches = tx.init(params), _batches(task)
    for _ in range(_STEPS):
        params, state = step(params, state, next(batches))
    return _quality(task, params)


def _batches(task: Task) -> Iterator[Any]:
    split, random = task.split(), np.random.default_rng(0)
    while True:
        rows = random.choice(len(split.x), _BATCH, replace=False)
        yield split.x[rows], split.y[rows]


def _quality(task: Task, params: Any) -> float:
    """In float32, so that it is the training that is judged."""
    split = task.split()
    judged = dataclasses.replace(task, factor=1.0, loss=task.quality or task.loss)
    return float(judged.of(params, (split.test_x[:_TEST], split.test_y[:_TEST]), jnp.float32))


# --- Models ---------------------------------------------------------------------------------------


def _weights(key: Any, *widths: int) -> list[Any]:
    pairs = list(itertools.pairwise(widths))
    keys = jax.random.split(key, len(pairs))
    return [
        {"w": jax.random.normal(k, pair) / np.sqrt(pair[0]), "b": jnp.zeros(pair[1])}
        for k, pair in zip(keys, pairs, strict=True)
    ]


def _dense(activation: Callable[..., Any], factor: float = 1.0) -> Forward:
    def forward(params: Any, x: Any, dtype: Any) -> Any:
        x = x.reshape(len(x), -1) * jnp.asarray(factor, dtype)
        for layer in params[:-1]:
            x = activation(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return forward


def _large(params: Any, x: Any, dtype: Any) -> Any:
    layers, gain = params["layers"], params["gain"]
    x = x.reshape(len(x), -1) * gain
    return _dense(jnp.tanh)(layers, x / gain, dtype)


def _convolutions(params: Any, x: Any, dtype: Any) -> Any:
    x = x.reshape(-1, 8, 8, 1)
    for kernel in params["kernels"]:
        x = jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    return _dense(jax.nn.relu)(params["head"], x, dtype)


def _convolution_params(key: Any) -> Any:
    first, second, head = jax.random.split(key, 3)
    shapes = [(first, (3, 3, 1, 8)), (second, (3, 3, 8, 16))]
    return {
        "kernels": [jax.random.normal(k, s) / np.sqrt(9 * s[2]) for k, s in shapes],
        "head": _weights(head, 64, 10),
    }


def _between(block: Callable[[Any], Any]) -> Forward:
    """Two layers with a block between them that float16 breaks."""

    def forward(params: Any, x: Any, dtype: Any) -> Any:
        x = jax.nn.relu(x.reshape(len(x), -1) @ params[0]["w"] + params[0]["b"])
        return block(x) @ params[1]["w"] + params[1]["b"]

    return forward


def _rms(x: Any, epsilon: float) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon)


def _attend(x: Any) -> Any:
    """Attention from one unit to another, with a row that is masked as a whole by -1e9."""
    rows = x.reshape(len(x), 4, 16)
    scores = rows @ jnp.swapaxes(rows, 1, 2)
    scores = jnp.where(jnp.arange(4)[:, None] == 3, jnp.asarray(-1e9, x.dtype), scores)
    return x + (jax.nn.softmax(scores) @ rows).reshape(x.shape)


_BROKEN = {
    "RMS norm of activations x 1000": lambda x: _rms(x * 1000, 1e-5),
    "RMS norm of some zeros, epsilon of 1e-8": lambda x: _rms(x[:, :, None], 1e-8)[..., 0],
    "attention, a row masked by -1e9": _attend,
    "logarithm of probabilities": lambda x: jnp.log(jax.nn.softmax(x * 20)),
    "sum of units x 1e4": lambda x: x * 1e4 / (1 + jnp.sum(x * 1e4, -1, keepdims=True)),
}


def _normal(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) / jnp.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype)


def _transformer(params: Any, x: Any, dtype: Any) -> Any:
    x = x.reshape(-1, 8, 8) @ params["in"] + params["place"]
    q, k, v = (_normal(x) @ params[name] for name in "qkv")
    weights = jnp.einsum("bik,bjk->bij", q, k) / jnp.asarray(4, dtype)
    x = x + jax.nn.softmax(weights.astype(jnp.float32)).astype(dtype) @ v
    x = x + jax.nn.gelu(_normal(x) @ params["up"]) @ params["down"]
    return x.mean(1) @ params["out"]


def _transformer_params(key: Any) -> Any:
    shapes = {"in": (8, 16), "place": (8, 16), "up": (16, 32), "down": (32, 16), "out": (16, 10)}
    shapes.update(dict.fromkeys("qkv", (16, 16)))
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / np.sqrt(shape[0])
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _recurrent(params: Any, x: Any, dtype: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        return jnp.tanh(state @ params["inner"] + row @ params["in"]), None

    start = jnp.zeros((len(x), 32), dtype)
    state, _ = jax.lax.scan(step, start, x.reshape(-1, 8, 8).swapaxes(0, 1))
    return state @ params["out"]


def _recurrent_params(key: Any) -> Any:
    shapes = {"inner": (32, 32), "in": (8, 32), "out": (32, 10)}
    keys = jax.random.split(key, 3)
    return {
        name: jax.random.normal(k, shape) / np.sqrt(shape[0])
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _two_heads(params: Any, x: Any, dtype: Any) -> Any:
    x = x.reshape(len(x), -1)
    return [_dense(jnp.tanh)(params[name], x, dtype) for name in ("first", "second")]


def _two_head_params(key: Any) -> Any:
    first, second = jax.random.split(key)
    return {"first": _weights(first, 64, 32, 10), "second": _weights(second, 64, 32, 10)}


def _categories(outputs: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def _heads(first: float, second: float) -> Callable[[Any, Any], Any]:
    def loss(outputs: Any, y: Any) -> Any:
        return first * _categories(outputs[0], y) + second * _categories(outputs[1], y)

    return loss


def _square(outputs: Any, y: Any) -> Any:
    return jnp.mean((outputs - y) ** 2)


def _mlp(*widths: int) -> Callable[[Any], Any]:
    return lambda key: _weights(key, *widths)


def _large_params(key: Any) -> Any:
    return {"layers": _weights(key, 64, 32, 10), "gain": jnp.float32(1e5)}


def _digits(
    name: str,
    params: Callable[[Any], Any],
    forward: Forward,
    factor: float = 1.0,
    loss: Callable[[Any, Any], Any] = _categories,
    **settings: Any,
) -> Task:
    return Task(name, data.digits, params, forward, loss, factor, **settings)


def _two(weight: str) -> Task:
    loss, mean = _heads(float(weight), 1e-7), _heads(0.5, 0.5)
    name = f"two heads, {weight} and 1e-7"
    return _digits(name, _two_head_params, _two_heads, loss=loss, quality=mean)


def _regression(name: str, factor: float = 1.0, rate: float = 3e-3) -> Task:
    split, params = functools.partial(data.line, factor), _mlp(8, 32, 1)
    return Task(name, split, params, _dense(jax.nn.relu), _square, rate=rate)


_small, _deep, _perceptron = _mlp(64, 64, 10), _mlp(64, *[48] * 8, 10), _dense(jax.nn.relu)
TASKS = (
    _digits("dense", _small, _perceptron),
    _digits("dense, loss / 2**12", _small, _perceptron, 2.0**-12),
    _digits("dense, loss / 2**18", _small, _perceptron, 2.0**-18),
    _digits("dense, loss x 2**16", _small, _perceptron, 2.0**16),
    _digits(
        "dense, loss + 1e5",
        _small,
        _perceptron,
        loss=lambda outputs, y: _categories(outputs, y) + 1e5,
        quality=_categories,
    ),
    _digits("8 tanh layers", _deep, _dense(jnp.tanh)),
    _digits("8 tanh layers, loss / 2**14", _deep, _dense(jnp.tanh), 2.0**-14),
    _digits("convolutions", _convolution_params, _convolutions),
    _digits("convolutions, loss / 2**16", _convolution_params, _convolutions, 2.0**-16),
    _digits("transformer", _transformer_params, _transformer),
    _digits("transformer, loss / 2**14", _transformer_params, _transformer, 2.0**-14),
    _digits("RNN, scan", _recurrent_params, _recurrent),
    _digits("RNN, scan, loss / 2**16", _recurrent_params, _recurrent, 2.0**-16),
    *map(_two, ("1", "3e3", "3e5")),
    _digits("activations x 1e5", _large_params, _large),
    *(_digits(name, _small, _between(block)) for name, block in _BROKEN.items()),
    _regression("regression"),
    _regression("regression, targets x 1000", 1e3, 0.3),
    _regression("regression, targets x 1e5", 1e5, 1e3),
)
