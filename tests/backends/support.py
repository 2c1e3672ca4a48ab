"""Models and data that every backend of Keras can use."""

import keras

import lossscale
from forks import Program
from kerases import Status, assert_same, data, number, status
from kerases import values as arrays
from seeding import seed

__all__ = ["Status", "arrays", "assert_same", "data", "number", "status"]
BACKEND = keras.backend.backend()


def model_with(optimizer, **compile_arguments):
    """Returns a compiled model whose first weights are always the same.

    On TensorFlow it steps eagerly, which takes less time than to trace a graph; those who want one,
    or XLA, ask for it.
    """
    seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    )
    usual = {"jit_compile": BACKEND == "jax"}
    if BACKEND == "tensorflow" and "jit_compile" not in compile_arguments:
        usual["run_eagerly"] = True
    model.compile(optimizer, loss="mse", **{**usual, **compile_arguments})
    return model


def wrapped(inner, **arguments):
    """Returns a loss scale optimizer whose scale moves within a few steps."""
    rule = {"initial_scale": 2.0**10, "growth_interval": 3, **arguments}
    return lossscale.LossScaleOptimizer(inner, rule=lossscale.DynamicScale(**rule))


def sgd(rate=0.25, **settings):
    return keras.optimizers.SGD(rate, **settings)


def everything(optimizer, *variables):
    """Returns the values of all variables that a step can change."""
    return arrays([*optimizer.variables, *optimizer.inner_optimizer.variables, *variables])


def run(source, backend, *arguments, **environment):
    """Runs a program in a process of its own, on a backend; returns what it prints."""
    given = {"KERAS_BACKEND": backend, **environment}
    done = Program(source, *arguments, environment=given).finished()
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
