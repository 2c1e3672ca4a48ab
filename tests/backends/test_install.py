"""`lossscale.install()` on each backend of Keras 3."""

import keras
import pytest

import lossscale
from backends.support import data, model_with

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(autouse=True)
def _mixed_float16():
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


def test_compile_makes_the_documented_class_which_trains_and_goes_on_when_it_is_undone():
    x, y = data()
    with lossscale.install():
        model = model_with(keras.optimizers.SGD(0.1))
        before = model.evaluate(x, y, verbose=0)
        model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert isinstance(model.optimizer, lossscale.LossScaleOptimizer)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert model.evaluate(x, y, verbose=0) < 0.5 * before
    assert int(model.optimizer.iterations) == 16
    assert not isinstance(model_with("sgd").optimizer, lossscale.LossScaleOptimizer)
