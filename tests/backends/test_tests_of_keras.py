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
# Not by names of this module, by which pytest would run them on Keras' optimizers as well.
CLASSES = {
    "class": loss_scale_optimizer_test.LossScaleOptimizerTest,
    "sparse": optimizer_sparse_test.OptimizerSparseTest,
}
CASES = [
    (kind, name)
    for kind, cls in CLASSES.items()
    for name in dir(cls)
    if (name.startswith("test_") and "stateless" not in name and kind == "class")
    or "loss_scale_optimizer" in name
]

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def test_the_tests_of_keras_are_found():
    found = [kind for kind, _ in CASES]
    assert found.count("class") > 10
    assert found.count("sparse") == 2
    assert DECIDED_OTHERWISE.keys() < {name for _, name in CASES}


# They hand in gradients of a loss that they scaled by hand.
@pytest.mark.filterwarnings("ignore::lossscale.LossScaleWarning")
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_ours_passes_what_keras_demands_of_its_own(kind, name, monkeypatch, request):
    if kind == "sparse" and BACKEND == "torch":
        pytest.skip("Keras has no sparse gradients on PyTorch")
    if name in DECIDED_OTHERWISE:
        request.applymarker(pytest.mark.xfail(reason=DECIDED_OTHERWISE[name], strict=True))
    for module in (loss_scale_optimizer_test, keras.src.optimizers):
        monkeypatch.setattr(module, "LossScaleOptimizer", LossScaleOptimizer)
    case = CLASSES[kind](name)
    case.setUp()
    getattr(case, name)()
