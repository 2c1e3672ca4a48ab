"""Programs of strangers train as they do without loss scaling on the batches that are finite.

That is the oracle, bit for bit: their own loop, with the framework's own optimizer. One batch
overflows in the runs with loss scaling; the others never see it.
"""

import importlib
import os

import numpy as np
import pytest
import tensorflow as tf

import lossscale
from strangers.keras_programs import PROGRAMS

KERAS = os.environ.get("LOSSSCALE_TEST_KERAS", "keras")
BAD = 2
FAMILIES = {"new": importlib.import_module(KERAS).optimizers}
if KERAS == "tf_keras":
    FAMILIES["legacy"] = FAMILIES["new"].legacy


def batches_of(step_of_batches):
    """Returns batches of which one is spoiled, and those without the step that it is in."""
    random = np.random.default_rng(0)
    batches = [
        (random.normal(size=(4, 3)).astype("f"), random.normal(size=4).astype("f"))
        for _ in range(8)
    ]
    first = BAD - BAD % step_of_batches
    good = [*batches[:first], *batches[first + step_of_batches :]]
    x, y = batches[BAD]
    batches[BAD] = x, y * np.float32(np.inf)
    return [[tuple(map(tf.constant, batch)) for batch in group] for group in (batches, good)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.isfinite(a).all()
        assert a.tobytes() == b.tobytes(), (a, b)


def of_2_4(optimizer):
    return lossscale.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=3)


def of_2_3(optimizer):
    loss_scale = lossscale.experimental.DynamicLossScale(8.0, 3)
    return lossscale.experimental.LossScaleOptimizer(optimizer, loss_scale)


@pytest.mark.parametrize("wrap", [of_2_4, of_2_3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_of_tensorflow(program, family, wrap):
    batches, good = batches_of(PROGRAMS[program])
    optimizers = FAMILIES[family]
    expected = program(lambda optimizer: optimizer, optimizers, good)
    found = program(wrap, optimizers, batches)
    assert_same(found, expected)
