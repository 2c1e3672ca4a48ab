"""Faults in a block between two linear layers, for every framework, and the right answers.

They were written before they were first run; those stay whose kind no other has. A block is written
with the operations that NumPy, JAX, Keras and PyTorch share. It computes in float16, on activations
of shape (4, 16).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lossscale.monitoring import Cause

INPUT = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
WEIGHTS = {
    "up": (np.random.default_rng(1).normal(size=(8, 16)) * 0.3).astype(np.float32),
    "gain": np.ones(16, np.float32),
    "head": (np.random.default_rng(2).normal(size=(16, 2)) * 0.3).astype(np.float32),
}
SHARED = "abs arange arccos arctanh exp log log1p matmul maximum mean rsqrt softmax sqrt sum tanh "
SHARED += "transpose where"
OVERFLOW, BROKEN_GRADIENT = "forward overflow", "singular, backward overflow"
CASTS = "cast convert copy"


AWAY, RANGE = "keep its input away from 0, with an epsilon of 0.004", "check the range of its input"
SMALLER, NOTHING = "make its input smaller", "its input is empty"
# By what is advised for the operation that fails: a function of NumPy's namespace and of zeros.
ADVICE = {
    "log of 0": (AWAY, lambda np, x: np.log(x)),
    "log of -1": (RANGE, lambda np, x: np.log(x - 1)),
    "log of 0 and of -1": (RANGE, lambda np, x: np.log(np.where(np.arange(3) > 1, x - 1, x))),
    "log1p of -1": (RANGE, lambda np, x: np.log1p(x - 1)),
    "0 / 0": (AWAY, lambda np, x: x / x),
    "1 / 0": (AWAY, lambda np, x: (x + 1) / x),
    "a small divisor": (AWAY, lambda np, x: (x + 100) / (x + 1e-3)),
    "a large quotient": (SMALLER, lambda np, x: (x + 6e4) / (x + 0.5)),
    "a large product": (SMALLER, lambda np, x: (x + 6e4) * (x + 2)),
    "root of a number below 0": (AWAY, lambda np, x: np.sqrt(x - 1e-3)),
    "root of -1": (RANGE, lambda np, x: np.sqrt(x - 1)),
    "derivative of the root of 0": (AWAY, lambda np, x: np.sqrt(x)),
    "derivative of a small root": (AWAY, lambda np, x: (x + 3e-3) ** -1.5 / 1e4),
    "inverse root of 0": (AWAY, lambda np, x: np.rsqrt(x)),
    "negative power of 0": (AWAY, lambda np, x: x**-1.5),
    "root of -1 as a power": (RANGE, lambda np, x: (x - 1) ** 0.5),
    "arccos of 2": (RANGE, lambda np, x: np.arccos(x + 2)),
    "arctanh of 1": (RANGE, lambda np, x: np.arctanh(x + 1)),
}


class Fault(NamedTuple):
    """A block, the causes that are right, and parts of the names of its operation.

    Attributes:
        block: The function of NumPy's namespace, the activations and a parameter.
        causes: The causes that are right.
        operations: Words of the operation.
        scale: The loss scale.
        size: The factor of the input.
        gain: The parameter.
        is_hidden: Whether everything is finite at that scale, and wrong, because a later operation
            makes the result of an overflow finite.
        loss: The loss function, if it is not the mean of the squares.
        words: Words of the text.
    """

    block: Callable[[Any, Any, Any], Any]
    causes: str
    operations: str = ""
    scale: float = 2.0**15
    size: float = 1.0
    gain: float = 1.0
    is_hidden: bool = False
    loss: Callable[[Any, Any], Any] = lambda np, y: np.mean(y * y)
    words: str = ""

    @property
    def is_anywhere(self):
        """Whether no module is right alone."""
        return self.causes in ("scale", "unknown") and not self.is_hidden

    @property
    def weights(self):
        return {**WEIGHTS, "gain": WEIGHTS["gain"] * np.float32(self.gain)}

    @property
    def batch(self):
        return INPUT * np.float32(self.size)


def total(np, x):
    return np.sum(x, axis=-1, keepdims=True)


def mean(np, x):
    return np.mean(x, axis=-1, keepdims=True)


def masked_row(np, h, gain):
    rows = np.arange(4)[:, None] == 2
    return np.softmax(np.where(rows, -np.inf, h), axis=-1) * gain


def entropy(np, h, gain):
    p = np.softmax(h * 200, axis=-1)
    return h * gain + total(np, p * np.log(p))


def variance_below_0(np, h, gain):
    h = h * 0.01 + 100
    return (h - mean(np, h)) / np.sqrt(mean(np, h * h) - mean(np, h) ** 2 - 1)


def scores(np, h, gain):
    return np.softmax(np.matmul(h * 40, np.transpose(h * 40)), axis=-1) @ h * gain


def deviation(np, x, epsilon):
    return np.sqrt(mean(np, x * x)) + epsilon


def plain(np, h, gain):
    return h * gain


def hidden(block, operations, size):
    return Fault(block, "unknown", operations, scale=1, size=size, is_hidden=True)


FAULTS = {
    "an RMS norm of large activations": hidden(
        lambda np, h, gain: h * np.rsqrt(mean(np, h * h) + 1e-3) * gain, "mul square", 250
    ),
    "a sum that overflows in some rows": hidden(
        lambda np, h, gain: h / total(np, np.abs(h)) * gain, "sum cast convert", 9000
    ),
    "a norm of which several squares overflow": hidden(
        lambda np, h, gain: h / np.sqrt(total(np, h * h)) * gain + h / 4096, "mul square", 1500
    ),
    "a mean of which the sum overflows": hidden(
        lambda np, h, gain: np.tanh(total(np, np.abs(h)) / 32768) * gain + h / 32768,
        "sum cast convert",
        9000,
    ),
    "a masked row": Fault(masked_row, "singular", "softmax sub exp max"),
    "a mask beyond float16": Fault(
        lambda np, h, gain: np.softmax(np.where(np.arange(4)[:, None] == 2, -1e9, h), -1) * gain,
        OVERFLOW,
        words="number that the program sets is above the largest float16 number",
    ),
    "the entropy of a sure answer": Fault(entropy, "singular", "log"),
    "the deviation of a constant": Fault(
        lambda np, h, gain: h + deviation(np, h * 0 + gain - 1, 0), BROKEN_GRADIENT, "sqrt div mul"
    ),
    "an epsilon that float16 rounds to 0": Fault(
        lambda np, h, gain: h * 0 / deviation(np, h * 0, 1e-8) * gain,
        "singular",
        "div",
        words="he epsilon 1e-08 is 0 in float16",
    ),
    "a small number that is computed": Fault(
        lambda np, h, gain: h * 0 / deviation(np, h * 0, np.mean(gain) * 1e-9) * gain,
        "singular",
        "div",
        words="away from 0",
    ),
    "a NaN of the program": Fault(
        lambda np, h, gain: np.where(np.arange(16) == 3, math.nan, h) * gain,
        "loss",
        words="An infinity or NaN that the program sets in ",
    ),
    "a power": Fault(lambda np, h, gain: np.exp(np.abs(h) * 40 + 5) * gain, OVERFLOW, "exp"),
    "an exponential beyond float64": Fault(
        lambda np, h, gain: np.exp(h * 0 + 800) * gain,
        OVERFLOW,
        "exp",
        words="helps: make its input smaller",
    ),
    "a variance below 0": Fault(variance_below_0, "singular", "sqrt"),
    "scores of large activations": Fault(scores, OVERFLOW, "matmul mm dot einsum copy", size=20),
    "a quotient that is not chosen": Fault(
        lambda np, h, gain: h + np.where(h > 1e3, h / (h * 0 * gain), h), BROKEN_GRADIENT, "div"
    ),
    "a sigmoid whose power overflows": Fault(
        lambda np, h, gain: h / (1 + np.exp(np.abs(h) * 30)) * gain, OVERFLOW, "exp", size=2
    ),
    "the tanh of an infinite cube": Fault(
        lambda np, h, gain: np.tanh(h * h * h * 3e4) * gain + h, "scale", "", 2.0**30, size=2
    ),
    "the inverse of a small number": Fault(
        lambda np, h, gain: h + 1 / (gain * 1e-4), "backward overflow", "div mul reciprocal"
    ),
    "a temperature that float16 rounds to 0": Fault(
        lambda np, h, gain: np.softmax(h / (gain * 1e-9), axis=-1) + h, "singular", "div"
    ),
    "an input beyond float16": Fault(plain, OVERFLOW, CASTS, size=1e6),
    "a parameter beyond float16": Fault(
        plain, OVERFLOW, CASTS, gain=1e6, words="gain reaches 1e+06"
    ),
    "an input that is not finite": Fault(plain, "batch", size=math.nan),
    "a parameter that is not finite": Fault(plain, "weights", gain=math.inf),
    "a mean over 0 tokens": Fault(
        plain, "loss, singular", "div", loss=lambda np, y: np.sum(y * y) / np.sum(y * 0)
    ),
}


def mistakes(fault, found):
    """What of an explanation is wrong; an empty list if nothing is."""
    words = fault.operations.split()
    checks = {
        "cause": str(found.cause) in fault.causes.split(", "),
        "operation": not words or any(word in found.operation.lower() for word in words),
        "module": fault.block is plain or fault.is_anywhere or "block" in found.module,
        "text": fault.words in found.text,
    }
    return [what for what, is_right in checks.items() if not is_right]


def check_advice(advice, found):
    """Checks that an explanation has this advice, and no other one."""
    others = {AWAY, RANGE, SMALLER, NOTHING} - {advice}
    has = advice in found.advice, any(other in found.advice for other in others)
    assert has == (True, False), found.text


def check(fault, explain, diagnose):
    """Checks the explanation, and for a hidden overflow that of a skipped step, and the verdict.

    An overflow that is hidden is named, and is never called harmless.

    Args:
        fault: The fault.
        explain: Called with a loss scale, returns the explanation.
        diagnose: Returns the report.
    """
    found = explain(fault.scale)
    assert not mistakes(fault, found), found.text
    if fault.is_hidden:
        skipped = explain(2.0**30)
        assert skipped.cause == Cause.SCALE
        reason = (
            f"{found.module} ({found.operation}) overflows, and a later operation makes it finite"
        )
        assert reason in found.text
        assert f"Before it, {reason}" in skipped.text
        report = diagnose()
        assert (report.verdict, reason in " ".join(str(report).split())) == ("unknown", True)
