"""What the tests of both Kerases read of an optimizer and of variables."""

import contextlib
import warnings
from typing import NamedTuple

import numpy as np

import lossscale
from conformance.harness import array

INF, NAN = float("inf"), float("nan")


def number(value):
    """A scalar of any backend, or a variable, on replicas or not, as a Python number."""
    return array(value).item()


def values(variables):
    """The values of variables, as NumPy arrays."""
    return [array(variable) for variable in variables]


def assert_same(left, right):
    """Asserts that two lists of arrays are the same bit for bit."""
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def data(rows=64, seed=1):
    """Returns inputs and targets of a learnable regression."""
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype("float32")
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype("float32")


class Status(NamedTuple):
    """What an optimizer says about its loss scale, as Python numbers."""

    scale: float
    counter: int | None
    skipped: int
    last: bool
    iterations: int
    applied: int


def status(optimizer):
    """Returns what the optimizer says."""
    return Status(
        scale=number(optimizer.loss_scale),
        counter=number(optimizer.dynamic_counter) if optimizer.dynamic else None,
        skipped=number(optimizer.steps_skipped),
        last=number(optimizer.last_step_skipped),
        iterations=number(optimizer.iterations),
        applied=number(optimizer.inner_optimizer.iterations),
    )


@contextlib.contextmanager
def loss_scale_warnings():
    """Collects the messages of our warnings in a list, and lets no warning stop the test."""
    messages = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield messages
    for warning in caught:
        if issubclass(warning.category, lossscale.LossScaleWarning):
            messages.append(str(warning.message))
