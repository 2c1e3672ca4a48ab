"""Each documented member of the optimizer: its calls, its results and its errors.

Every test runs on both documented classes, and where a step is taken, on the current one also in a
`tf.function`.
"""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from documents.forms import CURRENT, assert_same, everything, number, sgd
from lossscale import LossScaleWarning

_INF = float("inf")
_LARGE = 2.0**25


def _overflow(optimizer, var):
    """Takes a step whose gradient is not finite."""
    gradients = optimizer.get_unscaled_gradients([tf.fill(var.shape, _INF)])
    optimizer.apply_gradients(zip(gradients, [var], strict=True))


# --- inner_optimizer, dynamic, initial_scale, dynamic_growth_steps, dynamic_counter, loss_scale -


def test_inner_optimizer_is_the_very_object(form):
    inner = sgd()
    assert form.dynamic(inner).inner_optimizer is inner


def test_the_defaults_are_the_documented_ones():
    optimizer = lossscale.LossScaleOptimizer(sgd())
    assert optimizer.dynamic is True
    assert optimizer.initial_scale == 2.0**15
    assert optimizer.dynamic_growth_steps == 2000


def test_the_settings_of_a_dynamic_scale_can_be_read(form):
    optimizer = form.dynamic(sgd(), scale=8, period=3)
    assert optimizer.dynamic is True
    assert (optimizer.initial_scale, type(optimizer.initial_scale)) == (8.0, float)
    assert (optimizer.dynamic_growth_steps, type(optimizer.dynamic_growth_steps)) == (3, int)
    assert optimizer.dynamic_counter == 0
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


def test_loss_scale_is_a_float32_scalar_tensor(form):
    for optimizer in (form.dynamic(sgd(), 8), form.fixed(sgd(), 8)):
        scale = optimizer.loss_scale() if form.takes_objects else optimizer.loss_scale
        assert tf.is_tensor(scale)
        assert (scale.dtype, scale.shape) == (tf.float32, ())


def test_a_loss_scale_that_was_read_does_not_move_with_the_optimizer(form, var):
    optimizer = form.dynamic(sgd(), 8)
    before = optimizer.loss_scale() if form.takes_objects else optimizer.loss_scale
    _overflow(optimizer, var)
    assert form.scale_of(optimizer) == 4.0
    assert before == 8.0


def test_dynamic_counter_counts_the_finite_steps_since_the_scale_moved(form, stepped, var, loss_fn):
    optimizer = form.dynamic(sgd(), 8, period=3)
    step = stepped(lambda: optimizer.minimize(loss_fn, [var]))
    bad_step = stepped(lambda: _overflow(optimizer, var))
    seen = []
    for take in (step, step, step, step, bad_step, step):
        take()
        seen.append((form.scale_of(optimizer), int(optimizer.dynamic_counter)))
    assert seen == [(8, 1), (8, 2), (16, 0), (16, 1), (8, 0), (8, 1)]
    assert optimizer.dynamic_counter.dtype == "int64"


def test_a_first_scale_below_1_is_its_own_floor(form, var):
    optimizer = form.dynamic(sgd(), 0.25)
    _overflow(optimizer, var)
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
            "`dynamic_growth_steps` has no meaning",
        ),
        *[
            ({"initial_scale": value}, ValueError, "initial_scale")
            for value in (0, -1, _INF, float("nan"), 2.0**127, "8", True)
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


def test_wrapping_a_wrapped_optimizer_is_a_type_error(form):
    with pytest.raises(TypeError, match="is a LossScaleOptimizer itself"):
        form.dynamic(form.dynamic(sgd()))


def test_wrapping_one_optimizer_twice_is_a_value_error(form):
    inner = sgd()
    kept = form.dynamic(inner)
    with pytest.raises(ValueError, match="already wrapped"):
        form.dynamic(inner)
    assert kept.inner_optimizer is inner


# --- iterations, learning_rate, lr --------------------------------------------------------------


def test_iterations_grows_by_one_whether_the_step_is_applied_or_skipped(
    form, stepped, var, loss_fn
):
    optimizer = form.dynamic(sgd())
    assert optimizer.iterations == 0
    stepped(lambda: optimizer.minimize(loss_fn, [var]))()
    assert optimizer.iterations == 1
    stepped(lambda: _overflow(optimizer, var))()
    assert optimizer.iterations == 2
    # The one that learning rate schedules and Adam's bias correction follow.
    assert optimizer.inner_optimizer.iterations == 1
    assert optimizer.steps_skipped == 1
    assert bool(optimizer.last_step_skipped)


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
    bad_step = stepped(lambda: _overflow(optimizer, var))
    step = stepped(lambda: optimizer.minimize(lambda: 1.0 * var, [var]))
    for take in (bad_step, bad_step, step, step):
        take()
        rates.append(float(optimizer.lr))
    assert rates == [0.5, 0.5, 0.5, 0.5, 0.25]
    assert optimizer.iterations == 4


# --- minimize -----------------------------------------------------------------------------------


_WAYS = {
    "list": lambda var: [var],
    "tuple": lambda var: (var,),
    "variable": lambda var: var,
    "callable_with_a_list": lambda var: lambda: [var],
    "callable_with_a_tuple": lambda var: lambda: (var,),
    "callable_with_a_variable": lambda var: lambda: var,
    "none": lambda var: None,
}


# Every way eagerly. A `tf.function` traces the same Python, so there one way of each kind will do.
@pytest.mark.parametrize(
    ("stepped", "make", "way"),
    [
        *[("eager", tf.Variable, way) for way in _WAYS],
        *[("eager", keras.Variable, way) for way in ("list", "variable", "none")],
        ("graph", tf.Variable, "callable_with_a_list"),
        ("graph", tf.Variable, "none"),
        ("graph", keras.Variable, "list"),
        ("graph", keras.Variable, "none"),
    ],
    indirect=["stepped"],
)
def test_minimize_takes_variables_in_every_documented_way(form, stepped, make, way):
    var, other = make(1.0), make(1.0)
    variables = _WAYS[way](var)
    optimizer = form.dynamic(sgd())
    loss_fn = (lambda: var**2) if variables is None else (lambda: var**2 + other**2)
    step = stepped(lambda: optimizer.minimize(loss_fn, variables))
    step()
    assert number(var) == 0.5
    step()
    assert number(var) == 0.25
    assert number(other) == 1.0


def test_without_variables_minimize_takes_the_trainable_ones_the_loss_reads(form):
    first, second = tf.Variable(1.0), tf.Variable(2.0)
    frozen = tf.Variable(3.0, trainable=False)
    optimizer = form.dynamic(sgd())
    optimizer.minimize(lambda: first**2 + second**2 + frozen**2)
    assert [v.numpy() for v in (first, second, frozen)] == [0.5, 1.0, 3.0]


def test_a_callable_can_name_variables_that_the_loss_creates(form):
    made = []

    def loss_fn():
        if not made:
            made.append(tf.Variable(1.0))
        return made[0] ** 2

    form.dynamic(sgd()).minimize(loss_fn, lambda: made)
    assert made[0].numpy() == 0.5


@pytest.mark.parametrize(
    ("stepped", "dtype"),
    [
        *(("eager", dtype) for dtype in ("float16", "bfloat16", "float32", "float64")),
        ("graph", "float16"),
    ],
    indirect=["stepped"],
)
def test_minimize_takes_losses_of_every_float_type(form, stepped, dtype, var):
    optimizer = form.dynamic(sgd(0.5))
    step = stepped(lambda: optimizer.minimize(lambda: tf.cast(var, dtype) ** 2 / 2, [var]))
    step()
    assert var.numpy() == 0.5
    assert form.scale_of(optimizer) == 2.0**15


def test_grad_loss_multiplies_the_gradient(form, stepped):
    var = tf.Variable([1.0, 1.0])
    optimizer = form.dynamic(sgd(0.5))
    weights = tf.constant([1.0, 3.0])
    stepped(lambda: optimizer.minimize(lambda: 0.5 * var**2, [var], grad_loss=weights))()
    np.testing.assert_array_equal(var, [0.5, -0.5])


@pytest.mark.parametrize(
    "grad_loss",
    [tf.constant([1, 3], "float16"), np.array([1, 3], "float16"), [1.0, 3.0]],
    ids=["tensor", "numpy", "list"],
)
def test_grad_loss_may_have_the_type_of_a_float16_loss(form, grad_loss):
    var = tf.Variable([1.0, 1.0])
    optimizer = form.dynamic(sgd(0.5), 8)
    optimizer.minimize(lambda: tf.cast(var, "float16"), [var], grad_loss=grad_loss)
    np.testing.assert_array_equal(var, [0.5, -0.5])


def test_minimize_takes_a_tensor_with_the_tape_that_recorded_it(form, stepped, var):
    optimizer = form.dynamic(sgd())

    def step():
        with tf.GradientTape() as tape:
            loss = var**2
        optimizer.minimize(loss, [var], tape=tape)

    step = stepped(step)
    step()
    step()
    assert var.numpy() == 0.25


def test_minimize_takes_a_name(form, stepped, var, loss_fn):
    optimizer = form.dynamic(sgd())
    stepped(lambda: optimizer.minimize(loss_fn, [var], name="a_step"))()
    assert var.numpy() == 0.5


def test_minimize_returns_the_iterations(form, stepped, var, loss_fn):
    optimizer = form.dynamic(sgd())
    step = stepped(lambda: optimizer.minimize(loss_fn, [var]))
    step()
    assert number(step()) == 2


@pytest.mark.parametrize("wrong", [1.0, tf.constant(1.0), "var", [None]])
def test_minimize_of_something_that_is_no_variable_is_a_value_error(form, var, loss_fn, wrong):
    optimizer = form.dynamic(sgd())
    optimizer.minimize(loss_fn, [var])
    before = everything(optimizer, var)
    with pytest.raises(ValueError, match="must hold variables"):
        optimizer.minimize(loss_fn, wrong)
    assert_same(before, everything(optimizer, var))


def test_minimize_of_a_tensor_without_a_tape_is_a_value_error(form, var, loss_fn):
    optimizer = form.dynamic(sgd())
    before = everything(optimizer, var)
    with pytest.raises(ValueError, match="`loss` must be a callable"):
        optimizer.minimize(loss_fn(), [var])
    assert_same(before, everything(optimizer, var))


def test_minimize_of_a_loss_that_does_not_depend_on_the_variables_is_a_value_error(
    form, stepped, var
):
    optimizer = form.dynamic(sgd())
    before = everything(optimizer, var)
    step = stepped(lambda: optimizer.minimize(lambda: tf.constant(1.0), [var]))
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        step()
    assert_same(before, everything(optimizer, var))


def test_a_variable_that_the_loss_does_not_read_stays(form, stepped, var, loss_fn):
    other = tf.Variable(3.0)
    optimizer = form.dynamic(sgd())
    # Keras' own optimizers warn of it.
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        stepped(lambda: optimizer.minimize(loss_fn, [var, other]))()
    assert (var.numpy(), other.numpy()) == (0.5, 3.0)


# --- get_scaled_loss ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        pytest.param(tf.constant(3.0, "float16"), "float32", id="float16"),
        pytest.param(tf.constant(3.0, "bfloat16"), "float32", id="bfloat16"),
        pytest.param(tf.constant(3.0, "float32"), "float32", id="float32"),
        pytest.param(tf.constant(3.0, "float64"), "float64", id="float64"),
        pytest.param(tf.constant(3, "int32"), "float32", id="int32"),
        pytest.param(3, "float32", id="python_int"),
        pytest.param(3.0, "float32", id="python_float"),
        pytest.param(np.float16(3), "float32", id="numpy_float16"),
        pytest.param(np.float32(3), "float32", id="numpy_float32"),
        pytest.param(np.float64(3), "float64", id="numpy_float64"),
        pytest.param(np.array(3), "float32", id="numpy_int"),
        pytest.param(tf.Variable(3.0), "float32", id="variable"),
        pytest.param(keras.Variable(3.0), "float32", id="keras_variable"),
    ],
)
def test_the_scaled_loss_is_the_product_in_float32_or_wider(form, stepped, loss, dtype):
    optimizer = form.dynamic(sgd())
    scaled = stepped(lambda: optimizer.get_scaled_loss(loss))()
    assert scaled.dtype == dtype
    assert scaled.numpy() == 3 * 2.0**15
    assert np.isfinite(scaled.numpy())


@pytest.mark.parametrize("loss", [[1.0, 2.0], np.array([1.0, 2.0], "float32")])
def test_the_loss_can_be_an_array_of_any_shape(form, loss):
    scaled = form.fixed(sgd(), 3).get_scaled_loss(loss)
    np.testing.assert_array_equal(scaled, [3.0, 6.0])


def test_a_callable_loss_gives_a_callable_that_reads_the_scale_when_called(form, var, loss_fn):
    optimizer = form.dynamic(sgd(), 8)
    scaled = optimizer.get_scaled_loss(loss_fn)
    assert scaled() == 8.0
    _overflow(optimizer, var)
    assert scaled() == 4.0


# --- get_unscaled_gradients ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_unscaled_gradients_are_float32_or_wider(form, stepped, dtype, wide):
    optimizer = form.dynamic(sgd(), 8)
    (gradient,) = stepped(
        lambda: optimizer.get_unscaled_gradients([tf.constant([4.0, -2.0], dtype)])
    )()
    assert gradient.dtype == wide
    np.testing.assert_array_equal(gradient, [0.5, -0.25])


def test_tiny_float16_gradients_survive_a_large_scale(form, stepped):
    optimizer = form.dynamic(sgd(), _LARGE)
    smallest = 2.0**-24  # The smallest float16 above zero.
    (gradient,) = stepped(
        lambda: optimizer.get_unscaled_gradients([tf.constant(smallest, "float16")])
    )()
    assert gradient.numpy() == smallest / _LARGE == 2.0**-49


def test_a_scale_that_is_no_power_of_two_divides_exactly(form, stepped):
    optimizer = form.fixed(sgd(), 3)
    (gradient,) = stepped(lambda: optimizer.get_unscaled_gradients([tf.constant(10.0)]))()
    assert gradient.numpy() == np.float32(10) / np.float32(3)
    assert float(gradient) == 3.3333332538604736
    # What multiplying by the rounded reciprocal gives.
    assert np.float32(10) * (np.float32(1) / np.float32(3)) != gradient.numpy()


def test_indexed_slices_stay_indexed_slices(form, stepped):
    optimizer = form.dynamic(sgd(), 8)
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


def test_none_stays_none_and_the_list_is_new(form, stepped):
    optimizer = form.dynamic(sgd(), 8)
    given = [None, tf.constant(8.0), None]
    result = optimizer.get_unscaled_gradients(given)
    assert isinstance(result, list)
    assert result is not given
    assert [None if g is None else float(g) for g in result] == [None, 1.0, None]
    assert given[1] == 8.0


@pytest.mark.parametrize("kind", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_gradients_come_in_any_iterable(form, kind):
    gradients = form.dynamic(sgd(), 8).get_unscaled_gradients(kind([tf.constant(8.0)]))
    assert [float(g) for g in gradients] == [1.0]


def test_gradients_that_are_no_list_are_a_type_error(form):
    with pytest.raises(TypeError, match="must be a list of gradients"):
        form.dynamic(sgd()).get_unscaled_gradients(1.0)


def test_gradients_that_are_not_finite_stay_so(form):
    gradients = form.dynamic(sgd()).get_unscaled_gradients(
        [tf.constant(_INF, "float16"), tf.constant(float("nan"))]
    )
    assert np.isinf(gradients[0])
    assert np.isnan(gradients[1])


# --- The tape example, in words of this project -------------------------------------------------


def test_the_tape_sequence_is_a_step(form, stepped):
    weight = tf.Variable([[1.0], [2.0]])
    bias = tf.Variable([0.0])
    inputs = tf.constant([[1.0, -1.0], [0.5, 1.0]])
    plain_weight, plain_bias = tf.Variable(weight), tf.Variable(bias)
    optimizer, plain = form.dynamic(sgd()), sgd()

    def loss_of(weight, bias):
        return tf.reduce_mean((inputs @ weight + bias) ** 2)

    def step():
        with tf.GradientTape() as tape:
            scaled_loss = optimizer.get_scaled_loss(loss_of(weight, bias))
        scaled = tape.gradient(scaled_loss, [weight, bias])
        gradients = optimizer.get_unscaled_gradients(scaled)
        optimizer.apply_gradients(zip(gradients, [weight, bias], strict=True))

    step = stepped(step)
    for _ in range(3):
        step()
        with tf.GradientTape() as tape:
            loss = loss_of(plain_weight, plain_bias)
        plain.apply(tape.gradient(loss, [plain_weight, plain_bias]), [plain_weight, plain_bias])
    # Powers of two change no bit.
    np.testing.assert_array_equal(weight, plain_weight)
    np.testing.assert_array_equal(bias, plain_bias)


# --- apply_gradients ----------------------------------------------------------------------------


def _unscaled_one(optimizer):
    return optimizer.get_unscaled_gradients([optimizer.get_scaled_loss(tf.constant(2.0))])[0]


@pytest.mark.parametrize("kind", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_apply_gradients_takes_pairs_in_any_iterable(form, var, kind):
    optimizer = form.dynamic(sgd())
    optimizer.apply_gradients(kind([(_unscaled_one(optimizer), var)]))
    assert var.numpy() == 0.5


def test_apply_gradients_takes_lists_as_pairs_and_keras_variables(form, stepped):
    var = keras.Variable(1.0)
    optimizer = form.dynamic(sgd())
    stepped(lambda: optimizer.apply_gradients([[_unscaled_one(optimizer), var]]))()
    assert number(var) == 0.5


def test_apply_gradients_takes_a_name_and_returns_the_iterations(form, stepped, var):
    optimizer = form.dynamic(sgd())
    step = stepped(
        lambda: optimizer.apply_gradients([(_unscaled_one(optimizer), var)], name="a_step")
    )
    assert [number(step()), number(step())] == [1, 2]


@pytest.mark.parametrize("argument", ["experimental_aggregate_gradients", "name"])
def test_the_documented_arguments_of_apply_gradients_change_nothing_on_one_replica(
    form, stepped, var, argument
):
    optimizer = form.dynamic(sgd())
    value = {"experimental_aggregate_gradients": False, "name": None}[argument]
    pairs = [(_unscaled_one(optimizer), var)]
    stepped(lambda: optimizer.apply_gradients(pairs, **{argument: value}))()
    assert var.numpy() == 0.5


def test_apply_gradients_takes_none_beside_gradients(form, stepped, var):
    other = tf.Variable(3.0)
    optimizer = form.dynamic(sgd())
    pairs = [(_unscaled_one(optimizer), var), (None, other)]
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        stepped(lambda: optimizer.apply_gradients(pairs))()
    assert (var.numpy(), other.numpy()) == (0.5, 3.0)


def test_apply_gradients_takes_indexed_slices(form, stepped):
    table = tf.Variable(tf.ones([4, 2]))
    optimizer = form.dynamic(sgd(0.5))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 3]) ** 2)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [table]))
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, [table], strict=True))

    stepped(step)()
    np.testing.assert_array_equal(table, [[1, 1], [0, 0], [1, 1], [0, 0]])


def test_indexed_slices_that_are_not_finite_skip_the_step(form, stepped):
    table = tf.Variable(tf.ones([4, 2]))
    optimizer = form.dynamic(sgd(), 8)
    slices = tf.IndexedSlices(tf.constant([[_INF, 1.0]]), tf.constant([2]), tf.constant([4, 2]))
    step = stepped(
        lambda: optimizer.apply_gradients([(optimizer.get_unscaled_gradients([slices])[0], table)])
    )
    step()
    np.testing.assert_array_equal(table, np.ones([4, 2]))
    assert form.scale_of(optimizer) == 4.0


@pytest.mark.parametrize("bad", [_INF, -_INF, float("nan")])
def test_a_gradient_that_is_not_finite_skips_the_step_and_lowers_the_scale(
    form, stepped, var, loss_fn, bad
):
    optimizer = form.dynamic(keras.optimizers.Adam(), 8)
    other = tf.Variable([1.0, 1.0])
    optimizer.minimize(lambda: loss_fn() + tf.reduce_sum(other), [var, other])
    inner = optimizer.inner_optimizer
    before = [np.array(tf.convert_to_tensor(v)) for v in (*inner.variables, var, other)]

    def step():
        gradients = optimizer.get_unscaled_gradients([tf.constant(1.0), tf.constant([1.0, bad])])
        optimizer.apply_gradients(zip(gradients, [var, other], strict=True))

    stepped(step)()
    after = [np.array(tf.convert_to_tensor(v)) for v in (*inner.variables, var, other)]
    assert_same(before, after)
    assert form.scale_of(optimizer) == 4.0
    assert optimizer.dynamic_counter == 0


def test_a_fixed_scale_does_not_look_at_the_gradients(form, stepped, var):
    optimizer = form.fixed(sgd(), 8)
    stepped(lambda: _overflow(optimizer, var))()
    assert np.isinf(var.numpy())
    assert form.scale_of(optimizer) == 8.0
    assert optimizer.iterations == 1


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        pytest.param(lambda v: None, TypeError, "must hold", id="none"),
        pytest.param(lambda v: 1.0, TypeError, "must hold", id="number"),
        pytest.param(lambda v: [tf.constant(1.0)], TypeError, "must hold", id="no_pairs"),
        pytest.param(lambda v: [(tf.constant(1.0),)], TypeError, "must hold", id="singles"),
        pytest.param(lambda v: [(tf.constant(1.0), v, v)], TypeError, "must hold", id="triples"),
        pytest.param(lambda v: [(v, tf.constant(1.0))], TypeError, "be a variable", id="swapped"),
        pytest.param(lambda v: [], ValueError, "an empty list", id="empty"),
        pytest.param(lambda v: iter([]), ValueError, "an empty list", id="empty_iterator"),
        pytest.param(lambda v: [(None, v)], ValueError, "1 times None", id="only_none"),
    ],
)
def test_apply_gradients_refuses_what_it_cannot_apply_and_changes_nothing(
    form, stepped, var, loss_fn, pairs, error, message
):
    optimizer = form.dynamic(sgd(momentum=0.5), 8, period=1)
    optimizer.minimize(loss_fn, [var])
    before = everything(optimizer, var)
    step = stepped(lambda: optimizer.apply_gradients(pairs(var)))
    with pytest.raises(error, match=message):
        step()
    assert_same(before, everything(optimizer, var))


def test_a_variable_the_optimizer_was_not_built_with_is_a_value_error(form, var, loss_fn):
    optimizer = form.dynamic(sgd())
    optimizer.minimize(loss_fn, [var])
    other = tf.Variable(1.0)
    before = everything(optimizer, var, other)
    with pytest.raises(ValueError, match=r"(?i)unknown variable|was not recognized|not recognize"):
        optimizer.minimize(lambda: other**2, [other])
    assert_same(before, everything(optimizer, var, other))


def test_gradients_of_a_loss_that_was_never_scaled_are_applied_as_they_are_with_a_warning(
    form, stepped, var
):
    optimizer = form.dynamic(sgd())
    step = stepped(lambda: optimizer.apply_gradients([(tf.constant(2.0), var)]))
    with pytest.warns(LossScaleWarning, match="the loss was never scaled"):
        step()
    assert var.numpy() == 0.5
    # Once is enough.
    step()
    assert var.numpy() == 0.0


def test_gradients_that_were_not_unscaled_are_applied_as_they_are_with_a_warning(form, var):
    optimizer = form.dynamic(sgd(), 8)
    scaled = optimizer.get_scaled_loss(tf.constant(2.0))
    with pytest.warns(LossScaleWarning, match=r"get_unscaled_gradients\(\) was not"):
        optimizer.apply_gradients([(scaled, var)])
    assert var.numpy() == 1.0 - 0.25 * 16.0


# --- get_gradients, get_updates -----------------------------------------------------------------


def test_get_gradients_of_a_callable_are_unscaled(form, stepped, var, loss_fn):
    optimizer = form.dynamic(sgd(), 8)
    other = tf.Variable([1.0, 2.0])
    gradients = stepped(
        lambda: optimizer.get_gradients(
            lambda: tf.cast(loss_fn(), "float16") + tf.reduce_sum(tf.cast(other, "float16")),
            [var, other],
        )
    )()
    assert isinstance(gradients, list)
    assert gradients[0] == 2.0
    np.testing.assert_array_equal(gradients[1], [1.0, 1.0])
    assert {g.dtype for g in gradients} == {tf.float32}
    assert (var.numpy(), int(optimizer.iterations)) == (1.0, 0)


def test_get_gradients_of_a_tensor_works_in_a_graph(form, var, loss_fn):
    optimizer = form.dynamic(sgd())
    (gradient,) = tf.function(lambda: optimizer.get_gradients(loss_fn(), [var]))()
    assert gradient == 2.0


def test_gradients_from_get_gradients_can_be_applied(form, stepped, var, loss_fn):
    optimizer = form.dynamic(sgd())

    def step():
        gradients = optimizer.get_gradients(loss_fn, [var])
        optimizer.apply_gradients(zip(gradients, [var], strict=True))

    step = stepped(step)
    step()
    step()
    assert var.numpy() == 0.25


def test_get_gradients_is_a_value_error_where_one_cannot_be_computed(form, stepped, var, loss_fn):
    optimizer = form.dynamic(sgd())
    other = tf.Variable(1.0, name="unrelated")
    before = everything(optimizer, var, other)
    for call in (optimizer.get_gradients, optimizer.get_updates):
        step = stepped(lambda call=call: call(loss_fn, [var, other]))
        with pytest.raises(ValueError, match=r"no gradient with respect to .*unrelated"):
            step()
    assert_same(before, everything(optimizer, var, other))


def test_get_gradients_of_an_eager_tensor_is_a_value_error(form, var, loss_fn):
    optimizer = form.dynamic(sgd())
    for call in (optimizer.get_gradients, optimizer.get_updates):
        with pytest.raises(ValueError, match=r"inside a tf\.function"):
            call(loss_fn(), [var])
    assert var.numpy() == 1.0


def test_get_updates_takes_a_step(form, stepped, var, loss_fn):
    optimizer = form.dynamic(sgd(), 8, period=1)
    step = stepped(lambda: optimizer.get_updates(loss_fn, [var]))
    (update,) = step()
    assert number(update) == 1
    assert var.numpy() == 0.5
    assert form.scale_of(optimizer) == 16.0
    step()
    assert var.numpy() == 0.25
    assert optimizer.iterations == 2


def test_get_updates_of_a_tensor_works_in_a_graph(form, var, loss_fn):
    optimizer = form.dynamic(sgd())
    step = tf.function(lambda: optimizer.get_updates(loss_fn(), [var]))
    step()
    step()
    assert var.numpy() == 0.25


# --- weights, variables, get_weights, set_weights -----------------------------------------------


def _trained(form, inner, steps=1):
    first, second = tf.Variable([1.0, 2.0], name="first"), tf.Variable(3.0, name="second")
    optimizer = form.dynamic(inner, 8)
    for _ in range(steps):
        optimizer.minimize(lambda: tf.reduce_sum(first**2) + second**2, [first, second])
    return optimizer, first, second


def test_weights_are_the_iterations_and_the_state_without_the_loss_scale(form):
    optimizer, *_ = _trained(form, sgd(momentum=0.5))
    iterations, *momenta = optimizer.weights
    assert iterations == 1
    assert [tuple(v.shape) for v in momenta] == [(2,), ()]
    own = {id(v) for v in (optimizer.dynamic_scale, optimizer.dynamic_counter)}
    assert not own & {id(v) for v in optimizer.weights}


def test_variables_is_a_list_and_a_method(form):
    optimizer, *_ = _trained(form, sgd(momentum=0.5))
    assert isinstance(optimizer.variables, list)
    called = optimizer.variables()
    assert [id(v) for v in called] == [id(v) for v in optimizer.variables]
    held = {id(v) for v in optimizer.variables}
    assert {id(v) for v in optimizer.inner_optimizer.variables} <= held
    assert id(optimizer.dynamic_counter) in held
    assert len(held) == len(optimizer.variables)


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
    optimizer, first, second = _trained(form, sgd(momentum=0.5))
    _overflow_both = optimizer.get_unscaled_gradients([tf.fill([2], _INF), tf.constant(1.0)])
    optimizer.apply_gradients(zip(_overflow_both, [first, second], strict=True))
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


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: sgd(), []),
        (lambda: sgd(momentum=0.5), ["momentum"]),
        (lambda: keras.optimizers.Adam(), ["momentum", "velocity"]),
        (lambda: keras.optimizers.RMSprop(), ["velocity"]),
        (lambda: keras.optimizers.RMSprop(momentum=0.5), ["velocity", "momentum"]),
        (lambda: keras.optimizers.Adagrad(), ["accumulator"]),
    ],
    ids=["SGD", "SGD_momentum", "Adam", "RMSprop", "RMSprop_momentum", "Adagrad"],
)
def test_get_slot_names_lists_the_kinds_of_state(form, make, names):
    optimizer, *_ = _trained(form, make())
    assert sorted(optimizer.get_slot_names()) == sorted(names)


@pytest.mark.parametrize(
    ("make", "slot", "expected"),
    [
        # After one step with the gradients (2, 4) and 6.
        pytest.param(
            lambda: sgd(0.5, momentum=0.5), "momentum", ([-1.0, -2.0], -3.0), id="SGD_momentum"
        ),
        *[
            pytest.param(
                lambda: keras.optimizers.Adam(beta_1=0.5, beta_2=0.5),
                slot,
                expected,
                id=f"Adam_{slot}",
            )
            for slot, expected in (
                ("momentum", ([1.0, 2.0], 3.0)),
                ("m", ([1.0, 2.0], 3.0)),
                ("velocity", ([2.0, 8.0], 18.0)),
                ("v", ([2.0, 8.0], 18.0)),
            )
        ],
        *[
            pytest.param(
                lambda: keras.optimizers.RMSprop(rho=0.5),
                slot,
                ([2.0, 8.0], 18.0),
                id=f"RMSprop_{slot}",
            )
            for slot in ("velocity", "rms")
        ],
        pytest.param(
            lambda: keras.optimizers.Adagrad(initial_accumulator_value=1.0),
            "accumulator",
            ([5.0, 17.0], 37.0),
            id="Adagrad",
        ),
    ],
)
def test_get_slot_returns_the_state_of_a_variable(form, make, slot, expected):
    optimizer, *variables = _trained(form, make())
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
def test_a_configuration_makes_the_same_optimizer_again(form, is_dynamic):
    inner = keras.optimizers.SGD(0.25, momentum=0.5, clipnorm=1.0)
    optimizer = form.dynamic(inner, 8, period=3) if is_dynamic else form.fixed(inner, 8)
    config = optimizer.get_config()
    read = json.loads(json.dumps(config))
    assert read == config
    again = form.cls.from_config(read)
    assert read == config
    assert type(again) is type(optimizer)
    assert again.get_config() == config
    assert again.dynamic is is_dynamic
    assert again.initial_scale == 8.0
    assert again.dynamic_growth_steps == (3 if is_dynamic else None)
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
        assert set(config) == {
            "name",
            "inner_optimizer",
            "initial_scale",
            "dynamic_growth_steps",
        }


def test_a_configuration_has_no_saved_state(form, var):
    optimizer = form.dynamic(sgd(), 8)
    _overflow(optimizer, var)
    again = form.cls.from_config(optimizer.get_config())
    assert form.scale_of(again) == 8.0
    assert again.iterations == 0


def test_from_config_takes_classes_of_ones_own(form):
    class Doubled(keras.optimizers.SGD):
        pass

    config = form.dynamic(Doubled(0.25)).get_config()
    again = form.cls.from_config(config, custom_objects={"Doubled": Doubled})
    assert type(again.inner_optimizer) is Doubled


@pytest.mark.parametrize("wrong", [{}, {"name": "sgd", "learning_rate": 0.1}])
def test_from_config_of_something_else_is_a_value_error(form, wrong):
    with pytest.raises(ValueError, match="configuration has a key"):
        form.cls.from_config(wrong)


def test_keras_serializes_and_deserializes_it(form):
    optimizer = form.dynamic(sgd(), 8, period=3)
    described = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    again = keras.optimizers.deserialize(described)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()


def test_the_current_class_reads_both_generations_of_configurations():
    older = {
        "optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.25}},
        "loss_scale": {"class_name": "FixedLossScale", "config": {"loss_scale_value": 8.0}},
    }
    newer = {
        "inner_optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.25}},
        "dynamic": False,
        "initial_scale": 8.0,
        "dynamic_growth_steps": None,
    }
    for config in (older, newer):
        optimizer = CURRENT.cls.from_config(config)
        assert (optimizer.dynamic, optimizer.initial_scale) == (False, 8.0)
        assert optimizer.learning_rate == 0.25
    assert older["optimizer"]["class_name"] == "SGD"


# --- Settings of the inner optimizer ------------------------------------------------------------


def test_settings_of_the_inner_optimizer_are_read_and_written_through_the_wrapper(form):
    inner = sgd(momentum=0.5, clipnorm=1.0)
    optimizer = form.dynamic(inner)
    assert (optimizer.momentum, optimizer.clipnorm) == (0.5, 1.0)
    optimizer.clipnorm = 2.0
    optimizer.momentum = 0.25
    assert (inner.clipnorm, inner.momentum) == (2.0, 0.25)


def test_clipping_sees_unscaled_gradients(form, stepped, var):
    optimizer = form.dynamic(sgd(1.0, clipvalue=1.0))
    stepped(lambda: optimizer.minimize(lambda: 0.25 * var, [var]))()
    assert var.numpy() == 0.75


def test_an_unknown_setting_is_an_attribute_error_and_not_silently_kept(form):
    optimizer = form.dynamic(sgd())
    with pytest.raises(AttributeError, match="Did you mean 'learning_rate'"):
        _ = optimizer.learning_rte
    with pytest.raises(AttributeError, match="has no setting 'beta_1'"):
        optimizer.beta_1 = 0.5


# --- Tracing ------------------------------------------------------------------------------------


def test_a_step_is_traced_once_while_the_scale_moves(form, var, loss_fn):
    optimizer = form.dynamic(sgd(0.0), 1, period=1)
    step = tf.function(lambda: optimizer.minimize(loss_fn, [var]))
    for _ in range(4):
        step()
    assert form.scale_of(optimizer) == 16.0
    assert step.experimental_get_tracing_count() == 1
