"""The tests that Keras ships for its own LossScaleOptimizer, run on ours.

Three of them demand what this library decided otherwise; they are listed with the reason.
"""

import keras
import pytest
from keras.src.optimizers import loss_scale_optimizer_test, optimizer_sparse_test

from backends.support import BACKEND
from lossscale.keras import LossScaleOptimizer

DECIDED_OTHERWISE = {
    "test_serialization": "a configuration has `dynamic` as well, which TensorFlow documents",
    "test_init_dynamic_arg": "a fixed scale exists here, and Keras' class must refuse it",
    "test_finite_step_with_inner_loss_scale_stateful": (
        "an inner optimizer with a loss scale of its own is refused, and not silently changed"
    ),
}
OF_THE_CLASS = loss_scale_optimizer_test.LossScaleOptimizerTest
OF_SPARSE_GRADIENTS = optimizer_sparse_test.OptimizerSparseTest
CASES = [
    *(
        (OF_THE_CLASS, name)
        for name in dir(OF_THE_CLASS)
        if name.startswith("test_") and "stateless" not in name
    ),
    *(
        (OF_SPARSE_GRADIENTS, name)
        for name in dir(OF_SPARSE_GRADIENTS)
        if "loss_scale_optimizer" in name
    ),
]

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def test_the_tests_of_keras_are_found():
    found = [cls for cls, _ in CASES]
    assert found.count(OF_THE_CLASS) > 10
    assert found.count(OF_SPARSE_GRADIENTS) == 2
    assert DECIDED_OTHERWISE.keys() < {name for _, name in CASES}


# They hand in gradients of a loss that they scaled by hand.
@pytest.mark.filterwarnings("ignore::lossscale.LossScaleWarning")
@pytest.mark.parametrize(("cls", "name"), CASES)
def test_ours_passes_what_keras_demands_of_its_own(cls, name, monkeypatch, request):
    if cls is OF_SPARSE_GRADIENTS and BACKEND == "torch":
        pytest.skip("Keras has no sparse gradients on PyTorch")
    if name in DECIDED_OTHERWISE:
        request.applymarker(pytest.mark.xfail(reason=DECIDED_OTHERWISE[name], strict=True))
    for module in (loss_scale_optimizer_test, keras.src.optimizers):
        monkeypatch.setattr(module, "LossScaleOptimizer", LossScaleOptimizer)
    case = cls(name)
    case.setUp()
    getattr(case, name)()
