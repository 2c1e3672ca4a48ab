"""Gradients that the inner optimizer adds up before it applies them."""

import keras
import numpy as np
import pytest

import lossscale

pytestmark = pytest.mark.usefixtures("compiled_quickly")

STEPS = [np.array([0.5, -1.0, 2.0]), np.array([1.5, 1.0, -4.0])]


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_variables_of_every_dtype_take_the_mean_of_a_window(dtype):
    variable = keras.Variable(np.array([1.0, 2.0, -3.0]), dtype=dtype)
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer = lossscale.LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build([variable])
    for gradient in (STEPS[0], STEPS[0] * np.inf, STEPS[1]):
        scaled = optimizer.scale_loss(keras.ops.convert_to_tensor(gradient, dtype="float32"))
        # The skipped step halved the scale; what comes of a loss has its variable's dtype.
        optimizer.apply([keras.ops.cast(scaled, dtype)], [variable])
    found = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
    np.testing.assert_array_equal(found, [1.0 - 0.5, 2.0 - 0.0, -3.0 + 0.5])
    assert int(optimizer.steps_skipped) == 1


def test_a_float16_policy_fits():
    keras.config.set_dtype_policy("float16")
    try:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    finally:
        keras.config.set_dtype_policy("float32")
    model.set_weights([np.zeros((2, 1))])
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    model.compile(lossscale.LossScaleOptimizer(inner, initial_scale=8.0), "mse")
    model.fit(np.eye(2), np.ones((2, 1)), batch_size=1, shuffle=False, verbose=0)
    # Each batch has the gradient -2 for one weight: the mean of the window is -1.
    np.testing.assert_array_equal(model.get_weights()[0], [[0.5], [0.5]])
