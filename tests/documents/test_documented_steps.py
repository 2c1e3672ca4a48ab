"""The documented members that take a step: what they take, what they return, what they refuse.

Every test runs on both documented classes, and where a step is taken, on the current one also in a
`tf.function`.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from documents import forms
from documents.forms import INF, assert_same, everything, number, overflow, sgd

# --- Every way to take a step -------------------------------------------------------------------


def _minimize(variables):
    return lambda optimizer, var: optimizer.minimize(lambda: var**2, variables(var), name="a_step")


def _minimize_of_a_tensor(optimizer, var):
    with tf.GradientTape() as tape:
        loss = var**2
    return optimizer.minimize(loss, [var], tape=tape)


def _unscaled(optimizer, var):
    """The gradient of the square, from that of the scaled loss."""
    return optimizer.get_unscaled_gradients([optimizer.get_scaled_loss(2.0 * var)])[0]


def _apply(pairs, **arguments):
    return lambda optimizer, var: optimizer.apply_gradients(
        pairs(_unscaled(optimizer, var), var), **arguments
    )


_WAYS = {
    "list": _minimize(lambda var: [var]),
    "tuple": _minimize(lambda var: (var,)),
    "variable": _minimize(lambda var: var),
    "callable_with_a_list": _minimize(lambda var: lambda: [var]),
    "callable_with_a_tuple": _minimize(lambda var: lambda: (var,)),
    "callable_with_a_variable": _minimize(lambda var: lambda: var),
    "none": _minimize(lambda var: None),
    "tensor_with_the_tape_that_recorded_it": _minimize_of_a_tensor,
    "pairs_in_a_list": _apply(lambda gradient, var: [(gradient, var)]),
    "pairs_in_a_tuple": _apply(lambda gradient, var: ((gradient, var),)),
    "pairs_in_an_iterator": _apply(lambda gradient, var: iter([(gradient, var)])),
    "pairs_as_lists": _apply(lambda gradient, var: [[gradient, var]]),
    "name": _apply(lambda gradient, var: [(gradient, var)], name="a_step"),
    "no_name": _apply(lambda gradient, var: [(gradient, var)], name=None),
    "not_aggregated": _apply(
        lambda gradient, var: [(gradient, var)], experimental_aggregate_gradients=False
    ),
    "get_gradients": lambda optimizer, var: optimizer.apply_gradients(
        zip(optimizer.get_gradients(lambda: var**2, [var]), [var], strict=True)
    ),
    "get_updates": lambda optimizer, var: optimizer.get_updates(lambda: var**2, [var])[0],
}


@pytest.mark.parametrize(
    ("make", "way"),
    [
        *[(tf.Variable, way) for way in _WAYS],
        *[(keras.Variable, way) for way in ("list", "variable", "none", "pairs_as_lists")],
    ],
)
def test_every_documented_way_is_a_step_and_returns_the_iterations(form, stepped, make, way):
    var, optimizer = make(1.0), form.dynamic(sgd(), 8, period=2)
    step = stepped(lambda: _WAYS[way](optimizer, var))
    assert [(number(step()), number(var)) for _ in range(2)] == [(1, 0.5), (2, 0.25)]
    assert optimizer.iterations == 2
    assert form.scale_of(optimizer) == 16.0


# --- minimize -----------------------------------------------------------------------------------


def test_minimize_takes_the_variables_that_it_is_given_or_all_trainable_ones_of_the_loss(form):
    first, second = tf.Variable(1.0), tf.Variable(2.0)
    frozen = tf.Variable(3.0, trainable=False)
    optimizer = form.dynamic(sgd())
    for variables, expected in ((None, [0.5, 1.0, 3.0]), ([first], [0.25, 1.0, 3.0])):
        optimizer.minimize(lambda: first**2 + second**2 + frozen**2, variables)
        assert [v.numpy() for v in (first, second, frozen)] == expected


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


@pytest.mark.parametrize(
    ("dtype", "grad_loss"),
    [
        pytest.param("float32", tf.constant([1.0, 3.0]), id="float32"),
        pytest.param("float16", tf.constant([1, 3], "float16"), id="float16_tensor"),
        pytest.param("float16", np.array([1, 3], "float16"), id="float16_numpy"),
        pytest.param("float16", [1.0, 3.0], id="float16_list"),
    ],
)
def test_grad_loss_multiplies_the_gradient(form, stepped, dtype, grad_loss):
    var = tf.Variable([1.0, 1.0])
    optimizer = form.dynamic(sgd(0.5), 8)
    loss_fn = lambda: tf.cast(0.5 * var**2, dtype)  # noqa: E731
    stepped(lambda: optimizer.minimize(loss_fn, [var], grad_loss=grad_loss))()
    np.testing.assert_array_equal(var, [0.5, -0.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            pytest.param(lambda v, wrong=wrong: (lambda: v**2, wrong), "must hold variables", id=id)
            for id, wrong in (
                ("number", 1.0),
                ("tensor", tf.constant(1.0)),
                ("name", "var"),
                ("list_of_none", [None]),
            )
        ],
        pytest.param(lambda v: (v**2, [v]), "`loss` must be a callable", id="tensor_and_no_tape"),
        pytest.param(
            lambda v: (lambda: tf.constant(1.0), [v]),
            "No gradients provided for any variable",
            id="no_gradient",
        ),
    ],
)
def test_minimize_refuses_what_it_cannot_use_and_changes_nothing(
    form, stepped, var, loss_fn, arguments, message
):
    optimizer = form.dynamic(sgd())
    optimizer.minimize(loss_fn, [var])
    before = everything(optimizer, var)
    loss, variables = arguments(var)
    with pytest.raises(ValueError, match=message):
        stepped(lambda: optimizer.minimize(loss, variables))()
    assert_same(before, everything(optimizer, var))


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
        pytest.param([3.0, 3.0], "float32", id="list"),
        pytest.param(np.array([3.0, 3.0], "float32"), "float32", id="array"),
    ],
)
def test_the_scaled_loss_is_the_product_in_float32_or_wider(form, stepped, loss, dtype):
    optimizer = form.dynamic(sgd())
    scaled = stepped(lambda: optimizer.get_scaled_loss(loss))()
    assert scaled.dtype == dtype
    assert scaled.shape == np.shape(loss)
    assert (scaled.numpy() == 3 * 2.0**15).all()


def test_a_callable_loss_gives_a_callable_that_reads_the_scale_when_called(form, var, loss_fn):
    optimizer = form.dynamic(sgd(), 8)
    scaled = optimizer.get_scaled_loss(loss_fn)
    assert scaled() == 8.0
    overflow(optimizer, var)
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
    # The second one is the smallest float16, of which float16 would make zero.
    given = tf.constant([4.0, -(2.0**-24)], dtype)
    optimizer = form.dynamic(sgd(), 2.0**25)
    (gradient,) = stepped(lambda: optimizer.get_unscaled_gradients([given]))()
    assert gradient.dtype == wide
    np.testing.assert_array_equal(gradient, [2.0**-23, -(2.0**-49)])


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


@pytest.mark.parametrize("kind", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_gradients_come_in_any_iterable_and_go_in_a_new_list(form, kind):
    optimizer = form.dynamic(sgd(), 8)
    given = [None, tf.constant(8.0), tf.constant(INF, "float16"), tf.constant(float("nan"))]
    result = optimizer.get_unscaled_gradients(kind(given))
    assert isinstance(result, list)
    assert result is not given
    assert (result[0], float(result[1]), float(result[2])) == (None, 1.0, INF)
    assert np.isnan(result[3])
    assert given[1] == 8.0


def test_gradients_that_are_no_list_are_a_type_error(form):
    with pytest.raises(TypeError, match="must be a list of gradients"):
        form.dynamic(sgd()).get_unscaled_gradients(1.0)


# --- apply_gradients ----------------------------------------------------------------------------


def test_indexed_slices_of_a_tape_are_applied_if_they_are_finite(form, stepped):
    table = tf.Variable(tf.ones([4, 2]))
    optimizer = form.dynamic(sgd(0.5))

    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(factor * tf.gather(table, [1, 3]) ** 2)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [table]))
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, [table], strict=True))

    step = stepped(step)
    for factor, scale in ((1.0, 2.0**15), (INF, 2.0**14)):
        step(tf.constant(factor))
        np.testing.assert_array_equal(table, [[1, 1], [0, 0], [1, 1], [0, 0]])
        assert form.scale_of(optimizer) == scale


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


@pytest.mark.parametrize("third", [True, False])
def test_a_third_argument_of_apply_gradients_is_what_it_was_or_refused(form, var, third):
    optimizer = form.dynamic(sgd(1.0), 8)
    var.assign(tf.ones_like(var))
    (gradient,) = optimizer.get_unscaled_gradients([optimizer.get_scaled_loss(tf.ones_like(var))])
    before = everything(optimizer, var)
    if form is forms.EXPERIMENTAL:
        optimizer.apply_gradients([(gradient, var)], None, third)
        np.testing.assert_array_equal(var, tf.zeros_like(var))
        return
    said = f"experimental_aggregate_gradients={third}"
    with pytest.raises(TypeError, match=said):
        optimizer.apply_gradients([(gradient, var)], None, third)
    assert_same(before, everything(optimizer, var))


def test_a_variable_the_optimizer_was_not_built_with_is_a_value_error(form, var, loss_fn):
    optimizer = form.dynamic(sgd())
    optimizer.minimize(loss_fn, [var])
    other = tf.Variable(1.0)
    before = everything(optimizer, var, other)
    with pytest.raises(ValueError, match=r"(?i)unknown variable|was not recognized|not recognize"):
        optimizer.minimize(lambda: other**2, [other])
    assert_same(before, everything(optimizer, var, other))


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


def test_a_tensor_works_in_a_graph(form, var, loss_fn):
    optimizer = form.dynamic(sgd())
    (gradient,) = tf.function(lambda: optimizer.get_gradients(loss_fn(), [var]))()
    assert gradient == 2.0
    step = tf.function(lambda: optimizer.get_updates(loss_fn(), [var]))
    step()
    step()
    assert var.numpy() == 0.25


@pytest.mark.parametrize("verb", ["get_gradients", "get_updates"])
def test_gradients_that_cannot_be_computed_are_value_errors(form, stepped, var, loss_fn, verb):
    optimizer = form.dynamic(sgd())
    call = getattr(optimizer, verb)
    other = tf.Variable(1.0, name="unrelated")
    before = everything(optimizer, var, other)
    with pytest.raises(ValueError, match=r"no gradient with respect to .*unrelated"):
        stepped(lambda: call(loss_fn, [var, other]))()
    with pytest.raises(ValueError, match=r"inside a tf\.function"):
        call(loss_fn(), [var])
    assert_same(before, everything(optimizer, var, other))
