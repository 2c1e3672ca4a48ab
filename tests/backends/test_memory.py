"""What a step of `fit` on JAX needs beyond a bare one that has to know whether it may begin."""

import keras
import pytest

from benchmarks.whole_steps import of_keras

if keras.backend.backend() != "jax":
    pytest.skip("about JAX", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("optimized")


# `python -m benchmarks.whole_steps` has all eighteen.
@pytest.mark.parametrize(
    "row",
    [("mlp", "mixed_float16", "adam, accumulated"), ("mlp", "mixed_float16", "adamw, clipped")],
    ids=" ".join,
)
def test_a_whole_step_needs_no_more_memory_than_one_that_waits_for_a_verdict(row):
    ours, floor = of_keras(*row, "lossscale"), of_keras(*row, "floor")
    assert ours.memory <= floor.memory + 0.1
