"""Each documented member of the optimizer that takes no step: its result and its errors.

Every test runs on both documented classes.
"""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from documents import forms
from documents.forms import INF, assert_same, everything, number, overflow, sgd

# --- inner_optimizer, dynamic, initial_scale, dynamic_growth_steps, dynamic_counter, loss_scale -


def test_the_defaults_are_the_documented_ones():
    optimizer = lossscale.LossScaleOptimizer(sgd())
    assert optimizer.dynamic is True
    assert optimizer.initial_scale == 2.0**15
    assert optimizer.dynamic_growth_steps == 2000


def test_the_settings_of_a_dynamic_scale_can_be_read(form):
    inner = sgd()
    optimizer = form.dynamic(inner, scale=8, period=3)
    assert optimizer.inner_optimizer is inner
    assert optimizer.dynamic is True
    assert (optimizer.initial_scale, type(optimizer.initial_scale)) == (8.0, float)
    assert (optimizer.dynamic_growth_steps, type(optimizer.dynamic_growth_steps)) == (3, int)
    assert (optimizer.dynamic_counter, optimizer.dynamic_counter.dtype) == (0, "int64")
    assert form.scale_of(optimizer) == 8.0


def test_the_settings_of_a_fixed_scale_can_be_read(form):
    optimizer = form.fixed(sgd(), 8)
    assert optimizer.dynamic is False
    assert optimizer.initial_scale == 8.0
    assert optimizer.dynamic_growth_steps is None
    assert optimizer.dynamic_counter is None
    assert form.scale_of(optimizer) == 8.0


@pytest.mark.parametrize(
    "name", ["dynamic", "initial_scale", "dynamic_growth_steps", "dynamic_counter", "loss_scale"]
)
def test_what_describes_the_scale_cannot_be_set(form, name):
    with pytest.raises(AttributeError):
        setattr(form.dynamic(sgd()), name, 1)


def test_loss_scale_is_a_float32_scalar_that_does_not_move_with_the_optimizer(form, var):
    optimizer = form.dynamic(sgd(), 8)
    before = form.tensor_of(optimizer)
    for scale in (before, form.tensor_of(form.fixed(sgd(), 8))):
        assert tf.is_tensor(scale)
        assert (scale.dtype, scale.shape) == (tf.float32, ())
    overflow(optimizer, var)
    assert form.scale_of(optimizer) == 4.0
    assert before == 8.0


def test_a_first_scale_below_1_is_its_own_floor(form, var):
    optimizer = form.dynamic(sgd(), 0.25)
    overflow(optimizer, var)
    assert form.scale_of(optimizer) == 0.25
    assert optimizer.steps_skipped == 1


# --- The constructor's errors -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dynamic": "dynamic"}, TypeError, "`dynamic` must be True or False"),
        ({"dynamic": 8}, TypeError, "dynamic=False, initial_scale=8"),
        ({"dynamic": None}, TypeError, "`dynamic` must be True or False"),
        ({"dynamic": np.bool_(True)}, TypeError, "`dynamic` must be True or False"),
        ({"dynamic": False}, ValueError, "must be given as `initial_scale`"),
        (
            {"dynamic": False, "initial_scale": 8, "dynamic_growth_steps": 2},
            ValueError,
            "`dynamic_growth_steps` needs `dynamic=True`",
        ),
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


@pytest.mark.parametrize("wrong", ["sgd", keras.optimizers.SGD, None, 8, object()])
def test_something_that_is_no_optimizer_is_a_type_error(form, wrong):
    with pytest.raises(TypeError, match="must be an optimizer to wrap"):
        form.dynamic(wrong)


# --- iterations, learning_rate, lr --------------------------------------------------------------


def test_iterations_can_be_set(form, var, loss_fn):
    optimizer = form.dynamic(sgd())
    optimizer.iterations = 7
    assert optimizer.iterations == optimizer.inner_optimizer.iterations == 7
    optimizer.iterations.assign(10)
    optimizer.minimize(loss_fn, [var])
    assert optimizer.iterations == 11
    assert optimizer.get_weights()[0] == 11


def test_learning_rate_and_lr_are_those_of_the_inner_optimizer(form, var, loss_fn):
    inner = sgd(0.25)
    optimizer = form.dynamic(inner)
    assert optimizer.learning_rate == optimizer.lr == 0.25
    optimizer.lr = 0.125
    assert inner.learning_rate == optimizer.learning_rate == 0.125
    optimizer.learning_rate = 0.5
    assert inner.learning_rate == optimizer.lr == 0.5
    optimizer.minimize(loss_fn, [var])
    assert var.numpy() == 0.0


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


def test_weights_are_those_of_the_variables_that_are_not_of_the_loss_scale(form):
    optimizer, *_ = _trained(form, sgd(momentum=0.5))
    iterations, *momenta = optimizer.weights
    assert iterations == 1
    assert [tuple(v.shape) for v in momenta] == [(2,), ()]
    # A list, and a method.
    assert isinstance(optimizer.variables, list)
    held = [id(v) for v in optimizer.variables]
    assert held == [id(v) for v in optimizer.variables()]
    assert len(held) == len(set(held))
    assert {id(v) for v in optimizer.inner_optimizer.variables} <= set(held)
    assert id(optimizer.dynamic_counter) in held
    own = {id(v) for v in (optimizer.dynamic_scale, optimizer.dynamic_counter)}
    assert not own & {id(v) for v in optimizer.weights}


def test_get_weights_are_numpy_copies(form):
    optimizer, *_ = _trained(form, keras.optimizers.RMSprop(rho=0.5))
    weights = optimizer.get_weights()
    assert all(isinstance(weight, np.ndarray) for weight in weights)
    assert weights[0] == 1
    # rho 0.5, gradients 2x.
    np.testing.assert_array_equal(weights[1], [2.0, 8.0])
    np.testing.assert_array_equal(weights[2], 18.0)
    weights[1][:] = 0.0
    np.testing.assert_array_equal(optimizer.get_weights()[1], [2.0, 8.0])


def test_set_weights_sets_what_get_weights_gave(form):
    optimizer, first, second = _trained(form, sgd(momentum=0.5), steps=3)
    saved = optimizer.get_weights()
    other, first2, second2 = _trained(form, sgd(momentum=0.5), steps=1)
    scale = form.scale_of(other)
    assert other.set_weights(saved) is None
    assert_same(saved, other.get_weights())
    assert other.iterations == 3
    assert form.scale_of(other) == scale
    first2.assign(first)
    second2.assign(second)
    for opt, a, b in ((optimizer, first, second), (other, first2, second2)):
        opt.minimize(lambda a=a, b=b: tf.reduce_sum(a**2) + b**2, [a, b])
    np.testing.assert_array_equal(first, first2)


def test_the_documented_three_arrays_set_the_iterations_to_ten(form):
    optimizer = form.dynamic(keras.optimizers.RMSprop())
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    optimizer.build(layer.trainable_variables)
    assert len(optimizer.get_weights()) == 3
    optimizer.set_weights([np.array(10), np.ones([4, 3]), np.zeros([3])])
    assert optimizer.iterations == 10
    assert optimizer.inner_optimizer.iterations == 10
    np.testing.assert_array_equal(optimizer.get_slot(layer.kernel, "rms"), np.ones([4, 3]))


def test_iterations_that_were_set_stay_after_skipped_steps(form):
    optimizer, *variables = _trained(form, sgd(momentum=0.5))
    overflow(optimizer, *variables)
    assert optimizer.iterations == 2
    weights = optimizer.get_weights()
    weights[0] = np.array(10)
    optimizer.set_weights(weights)
    assert optimizer.get_weights()[0] == 10


def test_set_weights_sets_all_variables_with_the_loss_scale_too(form):
    optimizer, *_ = _trained(form, sgd(momentum=0.5), steps=2)
    other, *_ = _trained(form, sgd(momentum=0.5))
    other.set_weights([np.array(tf.convert_to_tensor(v)) for v in optimizer.variables])
    assert_same(everything(optimizer), everything(other))
    assert other.dynamic_counter == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda w: w[:-1], "3 weights.*Received: 2 arrays", id="too_few"),
        pytest.param(lambda w: [*w, w[0]], "3 weights.*Received: 4 arrays", id="too_many"),
        pytest.param(lambda w: [w[0], w[1], np.ones(5)], r"has the shape \(\)", id="shape"),
        pytest.param(lambda w: [], "Received: 0 arrays", id="none"),
    ],
)
def test_set_weights_that_do_not_fit_is_a_value_error_and_changes_nothing(form, change, message):
    optimizer, *_ = _trained(form, sgd(momentum=0.5))
    wrong = change([weight + 1 for weight in optimizer.get_weights()])
    before = everything(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.set_weights(wrong)
    assert_same(before, everything(optimizer))


def test_set_weights_before_the_first_step_says_that_it_is_too_early(form):
    with pytest.raises(ValueError, match="It is not built yet"):
        form.dynamic(sgd(momentum=0.5)).set_weights([np.array(1), np.ones(2)])


# --- get_slot, add_slot, get_slot_names, add_weight ---------------------------------------------

# The state after one step with the gradients (2, 4) and 6, by every name that it has, and first
# by those that get_slot_names lists.
_MOMENTA, _SQUARES = ([1.0, 2.0], 3.0), ([2.0, 8.0], 18.0)
_SLOTS = {
    "SGD": (lambda: sgd(), {}, {}),
    "SGD_momentum": (lambda: sgd(0.5, momentum=0.5), {"momentum": ([-1.0, -2.0], -3.0)}, {}),
    "Adam": (
        lambda: keras.optimizers.Adam(beta_1=0.5, beta_2=0.5),
        {"momentum": _MOMENTA, "velocity": _SQUARES},
        {"m": _MOMENTA, "v": _SQUARES},
    ),
    "RMSprop": (
        lambda: keras.optimizers.RMSprop(rho=0.5),
        {"velocity": _SQUARES},
        {"rms": _SQUARES},
    ),
    "RMSprop_momentum": (
        # Its momentum is the step: the learning rate by the signs, of gradients over their roots.
        lambda: keras.optimizers.RMSprop(0.5, rho=0.0, momentum=0.5),
        {"velocity": ([4.0, 16.0], 36.0), "momentum": ([0.5, 0.5], 0.5)},
        {"rms": ([4.0, 16.0], 36.0)},
    ),
    "Adagrad": (
        lambda: keras.optimizers.Adagrad(initial_accumulator_value=1.0),
        {"accumulator": ([5.0, 17.0], 37.0)},
        {},
    ),
}


@pytest.mark.parametrize("name", _SLOTS)
def test_slots_are_the_state_of_a_variable(form, name):
    make, listed, other_names = _SLOTS[name]
    optimizer, *variables = _trained(form, make())
    assert sorted(optimizer.get_slot_names()) == sorted(listed)
    for slot, expected in {**listed, **other_names}.items():
        for var, values in zip(variables, expected, strict=True):
            found = optimizer.get_slot(var, slot)
            np.testing.assert_allclose(tf.convert_to_tensor(found), values, rtol=1e-6)
            assert any(found is v for v in optimizer.inner_optimizer.variables)


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


def test_an_unknown_slot_is_a_key_error_with_a_readable_message(form):
    optimizer, first, _ = _trained(form, sgd(momentum=0.5))
    with pytest.raises(KeyError) as caught:
        optimizer.get_slot(first, "velocity")
    assert str(caught.value).startswith("SGD has no slot 'velocity' for the variable")
    assert "Its slots are ['momentum']" in str(caught.value)
    with pytest.raises(KeyError, match="SGD has no slot 'momentum' for the variable"):
        optimizer.get_slot(tf.Variable(1.0), "momentum")


def test_add_slot_adds_a_state_variable(form):
    optimizer, first, second = _trained(form, sgd())
    slot = optimizer.add_slot(first, "average")
    np.testing.assert_array_equal(tf.convert_to_tensor(slot), [0.0, 0.0])
    assert optimizer.get_slot(first, "average") is slot
    assert optimizer.add_slot(first, "average") is slot
    assert optimizer.get_slot_names() == ["average"]
    with pytest.raises(KeyError):
        optimizer.get_slot(second, "average")
    assert any(v is slot for v in optimizer.variables)
    assert any(v is slot for v in optimizer.weights)
    ones = optimizer.add_slot(second, "average", initializer="ones")
    assert number(ones) == 1.0
    filled = optimizer.add_slot(second, "peak", keras.initializers.Constant(5.0))
    assert number(filled) == 5.0
    assert optimizer.get_slot_names() == ["average", "peak"]


def test_add_slot_works_before_the_first_step(form, var, loss_fn):
    optimizer = form.dynamic(sgd(momentum=0.5))
    slot = optimizer.add_slot(var, "average")
    optimizer.minimize(loss_fn, [var])
    slot.assign(3.0)
    assert number(optimizer.get_slot(var, "average")) == 3.0
    assert optimizer.get_slot(var, "momentum").numpy() == -0.5


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


def test_add_weight_makes_integers_and_trainable_weights(form):
    optimizer = form.dynamic(sgd())
    counter = optimizer.add_weight(name="counter", shape=[], dtype=tf.int64, initializer="ones")
    assert (counter.dtype, int(counter)) == ("int64", 1)
    assert optimizer.add_weight("w", (), trainable=True).trainable


def test_add_weight_refuses_a_synchronization_that_keras_does_not_have(form):
    optimizer = form.dynamic(sgd())
    before = len(optimizer.variables)
    with pytest.raises(ValueError, match="synchronization"):
        optimizer.add_weight("w", (), synchronization=tf.VariableSynchronization.ON_READ)
    assert len(optimizer.variables) == before


# --- get_config, from_config --------------------------------------------------------------------


@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "fixed"])
def test_a_configuration_makes_the_same_optimizer_again_without_its_state(form, is_dynamic, var):
    inner = keras.optimizers.SGD(0.25, momentum=0.5, clipnorm=1.0)
    optimizer = form.dynamic(inner, 8, period=3) if is_dynamic else form.fixed(inner, 8)
    overflow(optimizer, var)
    config = optimizer.get_config()
    read = json.loads(json.dumps(config))
    assert read == config
    described = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    for again in (form.cls.from_config(read), keras.optimizers.deserialize(described)):
        assert read == config
        assert type(again) is type(optimizer)
        assert again.get_config() == config
        assert again.dynamic is is_dynamic
        assert again.initial_scale == form.scale_of(again) == 8.0
        assert again.dynamic_growth_steps == (3 if is_dynamic else None)
        assert again.iterations == 0
        assert again.inner_optimizer is not inner
        assert again.inner_optimizer.get_config() == inner.get_config()


def test_a_configuration_has_the_documented_keys(form):
    config = form.dynamic(sgd(), 8, period=3).get_config()
    if form.takes_objects:
        assert set(config) == {"name", "optimizer", "loss_scale"}
        assert config["loss_scale"] == {
            "class_name": "DynamicLossScale",
            "config": {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 2.0},
        }
    else:
        settings = {"dynamic": True, "initial_scale": 8.0, "dynamic_growth_steps": 3}
        assert set(config) == {"name", "inner_optimizer", *settings}
        assert settings.items() <= config.items()


def test_from_config_takes_classes_of_ones_own(form):
    class Doubled(keras.optimizers.SGD):
        pass

    config = form.dynamic(Doubled(0.25)).get_config()
    again = form.cls.from_config(config, custom_objects={"Doubled": Doubled})
    assert type(again.inner_optimizer) is Doubled


@pytest.mark.parametrize("wrong", [{}, {"name": "sgd", "learning_rate": 0.1}])
def test_from_config_of_something_else_is_a_value_error(form, wrong):
    with pytest.raises(ValueError, match="optimizer needs the key"):
        form.cls.from_config(wrong)


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
