"""Models and data that every backend of Keras can use."""

from typing import NamedTuple

import keras
import numpy as np

import lossscale
from forks import Program
from seeding import seed

BACKEND = keras.backend.backend()


def data(rows=64, seed=0):
    """Returns inputs of shape (rows, 4) and targets of shape (rows, 1), float32."""
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype("float32")
    return x, x[:, :1] - x[:, 1:2]


def model_with(optimizer, **compile_arguments):
    """Returns a compiled model whose first weights are always the same.

    On TensorFlow XLA takes twice as long as a graph; those who want it ask for it.
    """
    seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, loss="mse", **{"jit_compile": BACKEND == "jax", **compile_arguments})
    return model


def wrapped(inner, **arguments):
    """Returns a loss scale optimizer whose scale moves within a few steps."""
    rule = {"initial_scale": 2.0**10, "growth_interval": 3, **arguments}
    return lossscale.LossScaleOptimizer(inner, rule=lossscale.DynamicScale(**rule))


def number(value):
    """A scalar of any backend, or a variable, on replicas or not, as a Python number."""
    return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)).item()


def arrays(variables):
    """The values of variables, as NumPy arrays."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assert_same(left, right):
    """Asserts that two lists of arrays are the same bit for bit."""
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


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


def run(source, backend, *arguments, **environment):
    """Runs a program in a process of its own, on a backend; returns what it prints."""
    given = {"KERAS_BACKEND": backend, **environment}
    done = Program(source, *arguments, environment=given).finished()
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
