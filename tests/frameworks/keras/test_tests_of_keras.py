"""The tests that Keras ships for its own LossScaleOptimizer, run on ours.

Two of them demand what this library decided otherwise; they are listed with the reason.
"""

import inspect

import pytest
from keras.src.optimizers import loss_scale_optimizer_test as tests_of_keras

import lossscale
from lossscale.keras import KerasLossScaleOptimizer

DECIDED_OTHERWISE = {
    "test_init_dynamic_arg": "a fixed scale exists here, and Keras' class must refuse it",
    "test_finite_step_with_inner_loss_scale_stateful": (
        "an inner optimizer with a loss scale of its own is refused, and not silently changed"
    ),
}

CASES = [
    name
    for name, _ in inspect.getmembers(tests_of_keras.LossScaleOptimizerTest, inspect.isfunction)
    if name.startswith("test_") and "stateless" not in name
]


def test_the_tests_of_keras_are_found():
    assert len(CASES) > 10
    assert set(DECIDED_OTHERWISE) < set(CASES)


# They hand in gradients of a loss that they scaled by hand.
@pytest.mark.filterwarnings("ignore::lossscale.LossScaleWarning")
@pytest.mark.parametrize("name", CASES)
def test_ours_passes_what_keras_demands_of_its_own(name, monkeypatch, request):
    if name in DECIDED_OTHERWISE:
        request.applymarker(pytest.mark.xfail(reason=DECIDED_OTHERWISE[name], strict=True))
    monkeypatch.setattr(tests_of_keras, "LossScaleOptimizer", KerasLossScaleOptimizer)
    case = tests_of_keras.LossScaleOptimizerTest(name)
    case.setUp()
    getattr(case, name)()


def test_the_class_under_test_is_the_one_that_users_get():
    import keras

    made = lossscale.LossScaleOptimizer(keras.optimizers.SGD())
    assert type(made) is KerasLossScaleOptimizer
