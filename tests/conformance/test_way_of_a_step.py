"""What a wrapper loads, and the files that lead to the inner optimizer (internals/design.md)."""

import functools
import os
import pathlib
import re
import sys

import numpy as np
import pytest

import lossscale
from forks import Program

SOURCES = pathlib.Path(lossscale.__file__).parent
PAGE = pathlib.Path(__file__).parents[2] / "docs/internals/design.md"
PROCESS = os.environ.get("LOSSSCALE_TEST_KERAS") or os.environ["KERAS_BACKEND"]
# What `import lossscale` loads in any case.
OUTSIDE = ("__init__.py", "installation.py")


def documented(heading):
    """The cells of a table of the page, by the names of its columns, as lists of files."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
    names, *rows = [[cell.strip() for cell in row] for row in rows]
    columns = zip(names, *rows, strict=True)
    return {
        each: re.findall(r"`([\w/]+\.py)`", " ".join(cells))
        for name, *cells in columns
        for each in name.split(", ")
    }


def ours(file):
    """The name of a source file of ours, or None."""
    name = file.removeprefix(f"{SOURCES.as_posix()}/")
    return None if name in (file, *OUTSIDE) else name


class Way:
    """The files of ours in which the calls are that led to the inner optimizer."""

    def __init__(self):
        self.files = None

    def __call__(self):
        frame, found = sys._getframe(1), []
        while frame:
            found.append(ours(frame.f_code.co_filename))
            frame = frame.f_back
        self.files = [name for name in dict.fromkeys(reversed(found)) if name]


def noting(optimizer, verb, way):
    """An optimizer that notes the way to one of its methods."""
    method = getattr(optimizer, verb)

    def noted(*args, **kwargs):
        way()
        return method(*args, **kwargs)

    optimizer.__dict__[verb] = noted
    return optimizer


def fit(way):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    inner = noting(keras.optimizers.Adam(), "apply", way)
    model.compile(lossscale.LossScaleOptimizer(inner), "mse")
    model.optimizer.build(model.trainable_variables)
    return lambda: model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


def loop_on_tensorflow(way, verb="apply_gradients"):
    import keras
    import tensorflow as tf

    weight = keras.Variable([1.0, 2.0])
    optimizer = lossscale.LossScaleOptimizer(noting(keras.optimizers.Adam(), "apply", way))
    optimizer.build([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value**2))
        gradient = tape.gradient(loss, weight.value)
        if verb == "apply":
            optimizer.apply([gradient], [weight])
        else:
            optimizer.apply_gradients([(gradient, weight)])

    return step


def documented_loop_on_tf_keras(way, family="legacy"):
    import tensorflow as tf
    import tf_keras

    weight = tf.Variable([1.0, 2.0])
    adam = tf_keras.optimizers.legacy.Adam if family == "legacy" else tf_keras.optimizers.Adam
    optimizer = lossscale.LossScaleOptimizer(noting(adam(), "apply_gradients", way))
    optimizer.build([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(weight**2))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
        optimizer.apply_gradients(zip(gradients, [weight], strict=True))

    return step


def update_of_optax(way):
    import jax
    import jax.numpy as jnp
    import optax

    import lossscale.optax

    inner = optax.sgd(0.5)

    def update(*args):
        way()
        return inner.update(*args)

    tx = lossscale.optax.loss_scaled(optax.GradientTransformation(inner.init, update))
    state = tx.init(jnp.ones(2))
    return lambda: jax.jit(tx.update)(jnp.ones(2), state)


# By the process that runs it: the columns of the table, and what makes the step.
STEPS = {
    "jax": {"`fit` on JAX": fit, "Optax": update_of_optax},
    "torch": {"`fit` on PyTorch": fit},
    "tensorflow": {
        "a loop on TensorFlow": loop_on_tensorflow,
        "`apply` on TensorFlow": functools.partial(loop_on_tensorflow, verb="apply"),
    },
    "tf_keras": {
        "tf_keras legacy": documented_loop_on_tf_keras,
        "tf_keras": functools.partial(documented_loop_on_tf_keras, family="current"),
    },
}.get(PROCESS, {})


@pytest.mark.skipif(not STEPS, reason="a step of Keras")
@pytest.mark.parametrize("column", STEPS)
def test_three_files_lead_from_a_call_to_the_inner_optimizer(column):
    way = Way()
    STEPS[column](way)()
    assert way.files == documented("The way of a step")[column]
    assert 1 < len(way.files) <= 3


# How many of ours are loaded by a program that makes an optimizer. Of TensorFlow's arrays a wrapper
# needs more than of the others': graphs, replicas and tapes.
LOADED = {"jax": 38, "torch": 41, "tensorflow": 43, "tf_keras": 41}


@pytest.mark.skipif(PROCESS == "none", reason="about the wrappers of a Keras")
def test_a_wrapper_loads_little_and_nothing_of_diagnosis():
    keras = "tf_keras" if PROCESS == "tf_keras" else "keras"
    program = f"""
import sys
import {keras}, lossscale
lossscale.LossScaleOptimizer({keras}.optimizers.Adam())
print(*(name for name in sys.modules if name.partition(".")[0] == "lossscale"))
"""
    done = Program(program, module=keras).finished()
    assert done.returncode == 0, done.stderr
    ours = done.stdout.split()
    assert 10 < len(ours) <= LOADED[PROCESS]
    measuring = ("diagn", "monitor", "overflow_track", "own_step")
    assert not [module for module in ours if any(word in module for word in measuring)]
