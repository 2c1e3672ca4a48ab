"""The documented members that take no step: what they do besides what the pages say.

What the pages say is asked of every wrapper by `conformance/test_page_matrix.py`. Every test runs
on both documented classes.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from documents import forms
from documents.forms import INF, assert_same, everything, overflow, sgd

# --- inner_optimizer, dynamic, initial_scale, dynamic_growth_steps, dynamic_counter, loss_scale -


@pytest.mark.parametrize(
    "name", ["dynamic", "initial_scale", "dynamic_growth_steps", "dynamic_counter", "loss_scale"]
)
def test_what_describes_the_scale_cannot_be_set(form, name):
    with pytest.raises(AttributeError):
        setattr(form.dynamic(sgd()), name, 1)


def test_a_first_scale_below_1_is_its_own_floor(form, var):
    optimizer = form.dynamic(sgd(), 0.25)
    overflow(optimizer, var)
    assert form.scale_of(optimizer) == 0.25
    assert optimizer.steps_skipped == 1


# --- The constructor's errors -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dynamic": 8}, TypeError, "dynamic=False, initial_scale=8"),
        *[
            ({"initial_scale": value}, ValueError, "initial_scale")
            for value in (0, -1, INF, float("nan"), 2.0**127, "8", True)
        ],
        ({"dynamic": False, "initial_scale": 0}, ValueError, "initial_scale"),
        *[
            ({"dynamic_growth_steps": value}, ValueError, "dynamic_growth_steps")
            for value in (0, -1, 2.7, "3")
        ],
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments, error, message):
    inner = sgd()
    with pytest.raises(error, match=message):
        lossscale.LossScaleOptimizer(inner, **arguments)
    # The optimizer inside was not taken.
    lossscale.LossScaleOptimizer(inner)


# --- iterations, learning_rate, lr --------------------------------------------------------------


def test_a_schedule_follows_the_applied_steps(form, stepped, var):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.25])
    optimizer = form.dynamic(keras.optimizers.SGD(schedule))
    rates = [float(optimizer.learning_rate)]
    bad_step = stepped(lambda: overflow(optimizer, var))
    step = stepped(lambda: optimizer.minimize(lambda: 1.0 * var, [var]))
    for take in (bad_step, bad_step, step, step):
        take()
        rates.append(float(optimizer.lr))
    assert rates == [0.5, 0.5, 0.5, 0.5, 0.25]
    assert optimizer.iterations == 4


def test_other_settings_of_the_inner_optimizer_are_read_and_written_too(form):
    inner = sgd(momentum=0.5, clipnorm=1.0)
    optimizer = form.dynamic(inner)
    assert (optimizer.momentum, optimizer.clipnorm) == (0.5, 1.0)
    optimizer.clipnorm = 2.0
    optimizer.momentum = 0.25
    assert (inner.clipnorm, inner.momentum) == (2.0, 0.25)
    # What it has not is an error, and not silently kept.
    with pytest.raises(AttributeError, match="SGD, has an attribute 'learning_rte'"):
        _ = optimizer.learning_rte
    with pytest.raises(AttributeError, match="has no setting 'beta_1'"):
        optimizer.beta_1 = 0.5


# --- weights, variables, get_weights, set_weights -----------------------------------------------


def _trained(form, inner, steps=1):
    first, second = tf.Variable([1.0, 2.0], name="first"), tf.Variable(3.0, name="second")
    optimizer = form.dynamic(inner, 8)
    for _ in range(steps):
        optimizer.minimize(lambda: tf.reduce_sum(first**2) + second**2, [first, second])
    return optimizer, first, second


def test_set_weights_sets_all_variables_with_the_loss_scale_too(form):
    optimizer, *_ = _trained(form, sgd(momentum=0.5), steps=2)
    other, *_ = _trained(form, sgd(momentum=0.5))
    other.set_weights([np.array(tf.convert_to_tensor(v)) for v in optimizer.variables])
    assert_same(everything(optimizer), everything(other))
    assert other.dynamic_counter == 2


def test_set_weights_before_the_first_step_says_that_it_is_too_early(form):
    with pytest.raises(ValueError, match="It is not built yet"):
        form.dynamic(sgd(momentum=0.5)).set_weights([np.array(1), np.ones(2)])


# --- get_slot, add_slot, get_slot_names, add_weight ---------------------------------------------


def test_get_slot_finds_the_state_of_every_optimizer_of_a_multi_optimizer(form):
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    inner = keras.optimizers.MultiOptimizer(
        lambda variable: (
            sgd(momentum=0.5) if variable.path.endswith("kernel") else keras.optimizers.RMSprop()
        )
    )
    optimizer = form.dynamic(inner)
    optimizer.minimize(lambda: tf.reduce_sum(layer(tf.ones([1, 3]))), layer.trainable_variables)
    assert set(optimizer.get_slot_names()) == {"momentum", "velocity"}
    assert optimizer.get_slot(layer.kernel, "momentum").shape == (3, 2)
    assert optimizer.get_slot(layer.bias, "velocity").shape == (2,)
    with pytest.raises(KeyError):
        optimizer.get_slot(layer.bias, "momentum")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {
            "dtype": None,
            "initializer": "zeros",
            "trainable": None,
            "synchronization": tf.VariableSynchronization.AUTO,
            "aggregation": tf.compat.v1.VariableAggregation.NONE,
        },
        {"dtype": tf.float32, "trainable": False, "aggregation": tf.VariableAggregation.MEAN},
        {"dtype": "float32", "initializer": keras.initializers.Zeros()},
    ],
    ids=["short", "documented_defaults", "tensorflow_types", "names"],
)
def test_add_weight_takes_the_documented_arguments(form, arguments):
    optimizer = form.dynamic(sgd())
    weight = optimizer.add_weight("extra", (2, 3), **arguments)
    assert tuple(weight.shape) == (2, 3)
    assert weight.dtype == "float32"
    np.testing.assert_array_equal(tf.convert_to_tensor(weight), np.zeros((2, 3)))
    assert any(v is weight for v in optimizer.variables)
    assert not weight.trainable


def test_add_weight_refuses_a_synchronization_that_keras_does_not_have(form):
    optimizer = form.dynamic(sgd())
    before = len(optimizer.variables)
    with pytest.raises(ValueError, match="synchronization"):
        optimizer.add_weight("w", (), synchronization=tf.VariableSynchronization.ON_READ)
    assert len(optimizer.variables) == before


def test_what_programs_read_that_is_on_no_page(form):
    inner = sgd()
    optimizer = form.dynamic(inner, 8)
    assert optimizer._optimizer is inner
    assert not hasattr(optimizer._optimizer, "_optimizer")
    assert float(optimizer._loss_scale()) == 8.0
    if form is forms.EXPERIMENTAL:
        loss_scale = optimizer.loss_scale
        assert float(loss_scale._current_loss_scale) == 8.0
        assert int(loss_scale._num_good_steps) == 0
