"""Faults in a block between two linear layers, for every framework, and the right answers.

They were written before they were first run. Three were written again: in one nothing was skipped,
in one the gradient of a power that overflows is NaN at every scale, and TensorFlow's root of 0 has
no gradient where that of its result is 0. A block is written with the operations that NumPy,
JAX, Keras and PyTorch share. It computes in float16, on activations of shape (4, 16).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

INPUT = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
WEIGHTS = {
    "up": (np.random.default_rng(1).normal(size=(8, 16)) * 0.3).astype(np.float32),
    "gain": np.ones(16, np.float32),
    "head": (np.random.default_rng(2).normal(size=(16, 2)) * 0.3).astype(np.float32),
}
BEYOND = 1e6


class Fault(NamedTuple):
    """A block, the causes that are right, and parts of the names of its operation."""

    block: Callable[[Any, Any, Any], Any]
    causes: str
    operations: str = ""
    scale: float = 2.0**15
    size: float = 1.0
    """What the input is multiplied by."""
    is_hidden: bool = False
    """Whether everything is finite at that scale, and wrong."""
    loss: Callable[[Any, Any], Any] | None = None


def mean_square(np, y):
    return np.mean(y * y)


def rms_norm(np, h, gain):
    return h * np.rsqrt(np.mean(h * h, axis=-1, keepdims=True) + 1e-3) * gain


def l2_norm(np, h, gain):
    return h / np.sqrt(np.sum(h * h, axis=-1, keepdims=True)) * gain


def shares(np, h, gain):
    return h / np.sum(np.abs(h), axis=-1, keepdims=True) * gain


def masked_row(np, h, gain):
    rows = np.arange(4)[:, None] == 2
    return np.softmax(np.where(rows, -np.inf, h), axis=-1) * gain


def entropy(np, h, gain):
    p = np.softmax(h * 200, axis=-1)
    return h * gain + np.sum(p * np.log(p), axis=-1, keepdims=True)


def standardized(np, h, gain):
    same = h * 0 + gain
    centered = same - np.mean(same, axis=-1, keepdims=True)
    deviation = np.sqrt(np.mean(centered * centered, axis=-1, keepdims=True))
    return h + deviation


def no_votes(np, h, gain):
    votes = np.maximum(h * 0 - 1, 0)
    return h * gain / np.sum(votes, axis=-1, keepdims=True)


def powers(np, h, gain):
    return np.exp(np.abs(h) * 40 + 5) * gain


def cosine(np, h, gain):
    other = h * 0
    norms = np.sqrt(np.sum(h * h, axis=-1)) * np.sum(np.abs(other), axis=-1)
    return h * gain + (np.sum(h * other, axis=-1) / norms)[:, None]


def idle_expert(np, h, gain):
    chosen = h * 0
    return h + np.sum(chosen * h, axis=0) / np.sum(chosen, axis=0) * gain


def log_of_a_sum(np, h, gain):
    return h * gain + np.log(np.sum(np.exp(np.abs(h) + 11), axis=-1, keepdims=True))


def mean_of_logarithms(np, h, gain):
    return h * gain + np.mean(np.log(np.maximum(h, 0)), axis=-1, keepdims=True)


def cancelled_variance(np, h, gain):
    h = h * 0.01 + 100
    mean = np.mean(h, axis=-1, keepdims=True)
    return (h - mean) / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) - mean * mean - 1)


def product(np, h, gain):
    made = np.abs(h) + 3
    for _ in range(4):
        made = made * made
    return made / (1 + made) * gain


def scores(np, h, gain):
    return np.softmax(np.matmul(h * 40, np.transpose(h * 40)), axis=-1) @ h * gain


def angle(np, h, gain):
    c = gain * gain
    return h + np.sqrt(1 - c * c)


def focal(np, h, gain):
    return h + (1 - gain) ** 0.5


def not_chosen(np, h, gain):
    return h + np.where(h > 1e3, h / (h * 0 * gain), h)


def sigmoid(np, h, gain):
    return h / (1 + np.exp(np.abs(h) * 30)) * gain


def tanh_of_a_cube(np, h, gain):
    return np.tanh(h * h * h * 3e4) * gain + h


def plain(np, h, gain):
    return h * gain


def relu_norm(np, h, gain):
    """Squared ReLU, then divided by its mean."""
    h = np.maximum(h, 0)
    squares = h * h
    return h * gain / np.mean(squares, axis=-1, keepdims=True)


def geometric_mean(np, h, gain):
    return h * gain + np.exp(np.mean(np.log(h), axis=-1, keepdims=True))


def doubling(np, h, gain):
    made = np.abs(h) + 1
    for _ in range(16):
        made = made + made
    return h * gain + made


def reciprocal_of_small(np, h, gain):
    return h + 1 / (gain * 1e-4)


def cold_softmax(np, h, gain):
    return np.softmax(h / (gain * 1e-9), axis=-1) + h


def atanh(np, h, gain):
    x = np.tanh(np.abs(h) * 10 + 10)
    return h * gain + np.log((1 + x) / (1 - x))


def no_tokens(np, y):
    tokens = np.sum(y * 0)
    return np.sum(y * y) / tokens


def weighted_by_zero(np, y):
    weights = np.where(y > 1e6, 1.0, 0.0)
    return np.sum(weights * y) / np.sum(weights)


def kl_of_zero(np, y):
    p = np.softmax(y * 1e3, axis=-1)
    return np.mean(p * (np.log(p) - np.log(p + 0.1)))


FAULTS = {
    "an RMS norm of large activations": Fault(
        rms_norm, "forward overflow", "mul square", scale=1, size=250, is_hidden=True
    ),
    "an L2 norm of large activations": Fault(
        l2_norm, "forward overflow", "sum cast convert", scale=1, size=90, is_hidden=True
    ),
    "a sum that overflows in some rows": Fault(
        shares, "forward overflow", "sum cast convert", scale=1, size=9000, is_hidden=True
    ),
    "a mean of squares of large activations": Fault(
        relu_norm, "forward overflow", "mul square", scale=1, size=250, is_hidden=True
    ),
    "a masked row": Fault(masked_row, "singular", "softmax sub exp max"),
    "the entropy of a sure answer": Fault(entropy, "singular", "log"),
    "the deviation of a constant": Fault(
        standardized, "singular, backward overflow", "sqrt div mul"
    ),
    "a division by a sum of 0": Fault(no_votes, "singular", "div"),
    "a power": Fault(powers, "forward overflow", "exp"),
    "the cosine with a zero vector": Fault(cosine, "singular", "div"),
    "an expert without a token": Fault(idle_expert, "singular", "div"),
    "the logarithm of a sum of powers": Fault(log_of_a_sum, "forward overflow", "exp sum"),
    "a mean of logarithms with a 0": Fault(mean_of_logarithms, "singular", "log"),
    "a variance below 0": Fault(cancelled_variance, "singular", "sqrt"),
    "squares of squares": Fault(product, "forward overflow", "mul square"),
    "scores of large activations": Fault(
        scores, "forward overflow", "matmul mm dot einsum copy", size=20
    ),
    "the sine of an angle of 0": Fault(angle, "singular, backward overflow", "sqrt div"),
    "a root of 1 - 1": Fault(focal, "singular, backward overflow", "pow sqrt div"),
    "a quotient that is not chosen": Fault(not_chosen, "singular, backward overflow", "div"),
    "a sigmoid whose power overflows": Fault(sigmoid, "forward overflow", "exp", size=2),
    "the tanh of an infinite cube": Fault(tanh_of_a_cube, "scale", "", 2.0**30, size=2),
    "an input beyond float16": Fault(plain, "forward overflow", "cast convert copy", size=BEYOND),
    "a geometric mean of negative numbers": Fault(geometric_mean, "singular", "log"),
    "a sum that doubles": Fault(doubling, "forward overflow", "add"),
    "the inverse of a small number": Fault(
        reciprocal_of_small, "backward overflow", "div mul reciprocal"
    ),
    "a temperature that float16 rounds to 0": Fault(cold_softmax, "singular", "div"),
    "an inverse of tanh": Fault(atanh, "singular", "div log"),
    "a mean over 0 tokens": Fault(plain, "loss, singular", "div", loss=no_tokens),
    "labels of weight 0": Fault(plain, "loss, singular", "div", loss=weighted_by_zero),
    "a divergence from a sure answer": Fault(plain, "loss, singular", "log", loss=kl_of_zero),
}


def mistakes(name, found):
    """What of an explanation is wrong; an empty list if nothing is."""
    fault = FAULTS[name]
    words = fault.operations.split()
    checks = {
        "cause": str(found.cause) in fault.causes.split(", "),
        "operation": not words or any(word in found.operation.lower() for word in words),
        "module": fault.size == BEYOND or "block" in found.module,
    }
    if fault.loss or fault.causes == "scale":
        # What overflows is outside of the block.
        del checks["module"]
    return [what for what, is_right in checks.items() if not is_right]


def verdicts(name):
    """The verdicts that are right; what is broken in float32, too, is unknown."""
    if FAULTS[name].causes == "scale":
        return ("needed", "not needed")
    if FAULTS[name].is_hidden:
        return ("cannot help",)
    return ("cannot help", "unknown")
