"""The documented members on both classes: what no page says (conformance/test_page_matrix.py)."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from backends.support import assert_same, everything, number, sgd
from conformance.page_matrix import EXPERIMENTAL


def test_a_first_scale_below_1_is_its_own_floor(form, var):
    optimizer = form.new(sgd(), 0.25)
    optimizer.minimize(lambda: var * np.inf, [var])
    assert form.loss_scale(optimizer) == 0.25
    assert optimizer.steps_skipped == 1


def test_set_weights_before_the_first_step_says_that_it_is_too_early(form):
    with pytest.raises(ValueError, match="not built has no state yet"):
        form.new(sgd(momentum=0.5)).set_weights([np.array(1), np.ones(2)])


OF_TENSORFLOW = {
    "synchronization": tf.VariableSynchronization.AUTO,
    "aggregation": tf.compat.v1.VariableAggregation.NONE,
}


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": None, "initializer": "zeros", "trainable": None, **OF_TENSORFLOW},
        {"dtype": tf.float32, "trainable": False, "aggregation": tf.VariableAggregation.MEAN},
        {"dtype": "float32", "initializer": keras.initializers.Zeros()},
    ],
    ids=["documented_defaults", "tensorflow_types", "names"],
)
def test_add_weight_takes_the_documented_arguments(form, arguments):
    optimizer = form.new(sgd())
    weight = optimizer.add_weight("extra", (2, 3), **arguments)
    assert (tuple(weight.shape), weight.dtype, weight.trainable) == ((2, 3), "float32", False)
    np.testing.assert_array_equal(tf.convert_to_tensor(weight), np.zeros((2, 3)))
    assert any(v is weight for v in optimizer.variables)


def test_add_weight_refuses_a_synchronization_that_keras_does_not_have(form):
    optimizer = form.new(sgd())
    before = len(optimizer.variables)
    with pytest.raises(ValueError, match="synchronization"):
        optimizer.add_weight("w", (), synchronization=tf.VariableSynchronization.ON_READ)
    assert len(optimizer.variables) == before


def test_what_programs_read_that_is_on_no_page(form):
    inner = sgd()
    optimizer = form.new(inner, 8)
    assert optimizer._optimizer is inner
    assert not hasattr(optimizer._optimizer, "_optimizer")
    assert float(optimizer._loss_scale()) == 8.0
    if form.form == EXPERIMENTAL:
        loss_scale = optimizer.loss_scale
        assert float(loss_scale._current_loss_scale) == 8.0
        assert int(loss_scale._num_good_steps) == 0


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_minimize_takes_a_tensor_with_the_tape_that_recorded_it(form, stepped, make):
    var, optimizer = make(1.0), form.new(sgd())

    def step():
        with tf.GradientTape() as tape:
            loss = var**2
        optimizer.minimize(loss, [var], tape=tape)

    stepped(step)()
    assert number(var) == 0.5


def test_minimize_refuses_what_it_cannot_use_and_changes_nothing(form, stepped, var):
    optimizer = form.new(sgd())
    optimizer.minimize(lambda: var**2, [var])
    before = everything(optimizer, var)
    for loss, message in (
        # A tensor and no tape; and no gradient.
        (lambda: var**2, "`loss` must be a callable"),
        (lambda: lambda: tf.constant(1.0), "No gradients provided for any"),
    ):
        with pytest.raises(ValueError, match=message):
            stepped(lambda loss=loss: optimizer.minimize(loss(), [var]))()
        assert_same(before, everything(optimizer, var))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_unscaled_gradients_are_float32_or_wider(form, stepped, dtype):
    # The second one is the smallest float16, of which float16 would make zero.
    given = tf.constant([4.0, -(2.0**-24)], dtype)
    optimizer = form.new(sgd(), 2.0**25)
    (gradient,) = stepped(lambda: optimizer.get_unscaled_gradients([given]))()
    assert gradient.dtype == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_array_equal(gradient, [2.0**-23, -(2.0**-49)])


def test_indexed_slices_stay_indexed_slices(form, stepped):
    optimizer = form.new(sgd(), 8)
    for dense_shape in (tf.constant([4, 1]), None):
        scaled = tf.IndexedSlices(
            tf.constant([[8.0], [16.0]], "float16"), tf.constant([2, 0]), dense_shape
        )
        (gradient,) = stepped(lambda given: optimizer.get_unscaled_gradients([given]))(scaled)
        assert isinstance(gradient, tf.IndexedSlices)
        assert gradient.dtype == "float32"
        np.testing.assert_array_equal(gradient.values, [[1.0], [2.0]])
        np.testing.assert_array_equal(gradient.indices, [2, 0])
        assert (gradient.dense_shape is None) == (dense_shape is None)


def test_gradients_that_are_no_list_are_a_type_error(form):
    with pytest.raises(TypeError, match="must be a list of gradients"):
        form.new(sgd()).get_unscaled_gradients(1.0)


@pytest.mark.parametrize("third", [True, False])
def test_a_third_argument_of_apply_gradients_is_what_it_was_or_refused(form, var, third):
    optimizer = form.new(sgd(1.0), 8)
    (gradient,) = optimizer.get_unscaled_gradients([optimizer.get_scaled_loss(tf.ones_like(var))])
    if form.form == EXPERIMENTAL:
        optimizer.apply_gradients([(gradient, var)], None, third)
        assert var.numpy() == 0.0
        return
    before = everything(optimizer, var)
    with pytest.raises(TypeError, match=f"experimental_aggregate_gradients={third}"):
        optimizer.apply_gradients([(gradient, var)], None, third)
    assert_same(before, everything(optimizer, var))
