"""Variables of float16 and bfloat16 train as without loss scaling."""

import numpy as np
import pytest
import tensorflow as tf

import lossscale

pytestmark = pytest.mark.filterwarnings("ignore:float16 variables are rounded")


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_narrow_variable_trains_as_without_loss_scaling(dtype, optimizers, sparse, compiled):
    def trained(scaled):
        variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
        optimizer, scale, unscale = optimizers.SGD(0.25, momentum=0.5), tf.identity, list
        if scaled:
            optimizer = lossscale.LossScaleOptimizer(optimizer, initial_scale=8.0)
            scale, unscale = optimizer.get_scaled_loss, optimizer.get_unscaled_gradients

        def step():
            with tf.GradientTape() as tape:
                read = tf.gather(variable, [1]) if sparse else variable
                loss = scale(tf.reduce_sum(read**2))
            gradients = unscale(tape.gradient(loss, [variable]))
            optimizer.apply_gradients(zip(gradients, [variable], strict=True))

        run = tf.function(step) if compiled else step
        for _ in range(3):
            run()
        return variable.numpy()

    expected = trained(scaled=False)
    assert np.all(expected[1] != [3.0, 4.0])
    np.testing.assert_array_equal(trained(scaled=True), expected)


def test_a_gradient_that_overflows_in_the_dtype_of_its_variable_is_skipped(optimizers):
    rule = lossscale.DynamicScale(2.0**-4, min_scale=2.0**-10)
    optimizer = lossscale.LossScaleOptimizer(optimizers.SGD(0.25), rule=rule)
    variable = tf.Variable([1.0], dtype=tf.float16)
    optimizer.minimize(lambda: tf.reduce_sum(tf.cast(variable, tf.float32)) * 1e5, [variable])
    assert (variable.numpy().tolist(), int(optimizer.steps_skipped)) == ([1.0], 1)
