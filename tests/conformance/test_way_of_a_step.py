"""What a wrapper loads, and the files that a step passes through (docs/internals/design.md)."""

import gc
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


def documented(column):
    """The files of a column of the table, from top to bottom."""
    section = PAGE.read_text(encoding="utf-8").split("## The path of a step")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
    number = [cell.strip() for cell in rows[0]].index(column)
    return [name for row in rows[1:] for name in re.findall(r"`([\w/]+\.py)`", row[number])]


def passed_through(run):
    """The files whose functions `run` calls, by when each is entered first."""
    entered, ours = {}, f"{SOURCES.as_posix()}/"

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            entered.setdefault(frame.f_code.co_filename.removeprefix(ours))

    # Optimizers that other tests have left are forgotten now, and not on the way.
    gc.collect()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [name for name in entered if name not in ("__init__.py", "installation.py")]


def fit_on_jax():
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    model.optimizer.build(model.trainable_variables)
    return lambda: model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


def loop_on_tensorflow():
    import keras
    import tensorflow as tf

    weight = keras.Variable([1.0, 2.0])
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value**2))
        optimizer.apply(tape.gradient(loss, [weight.value]), [weight])

    return step


def documented_loop_on_tf_keras():
    import tensorflow as tf
    import tf_keras

    weight = tf.Variable([1.0, 2.0])
    optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.Adam())
    optimizer.inner_optimizer._create_all_weights([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(weight**2))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
        optimizer.apply_gradients(zip(gradients, [weight], strict=True))

    return step


# By the process that runs it: the column of the table, and what makes the step.
STEPS = {
    "jax": ("`fit` on JAX", fit_on_jax),
    "tensorflow": ("a loop on TensorFlow", loop_on_tensorflow),
    "tf_keras": ("tf_keras legacy", documented_loop_on_tf_keras),
}


@pytest.mark.skipif(PROCESS not in STEPS, reason="a compiled step of Keras; PyTorch compiles none")
def test_a_step_passes_through_the_files_that_the_design_names():
    column, make = STEPS[PROCESS]
    assert passed_through(make()) == documented(column)


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
