"""The tests that Keras ships for sparse gradients, run with our class in place of its own."""

import keras.src.optimizers
import pytest
from keras.src.optimizers import optimizer_sparse_test

from backends.support import BACKEND
from lossscale.keras import KerasLossScaleOptimizer

pytestmark = pytest.mark.usefixtures("compiled_quickly")

CASES = [
    name
    for name in dir(optimizer_sparse_test.OptimizerSparseTest)
    if "loss_scale_optimizer" in name
]


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no sparse gradients on PyTorch")
# They hand in gradients of a loss that they scaled by hand.
@pytest.mark.filterwarnings("ignore::lossscale.LossScaleWarning")
@pytest.mark.parametrize("name", CASES)
def test_sparse_gradients_reach_the_inner_optimizer_sparse(name, monkeypatch):
    monkeypatch.setattr(keras.src.optimizers, "LossScaleOptimizer", KerasLossScaleOptimizer)
    case = optimizer_sparse_test.OptimizerSparseTest(name)
    case.setUp()
    getattr(case, name)()


def test_the_tests_of_keras_are_found():
    assert len(CASES) == 2
