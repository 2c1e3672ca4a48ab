"""Defects of Keras' own LossScaleOptimizer that this one must not have.

A test whose name begins with `test_peer` shows the defect in Keras' class. When one of these
fails, Keras has mended it, and the comparison in the documents has to be changed. That this class
does not have it is shown here, or where such things are promised: in tests/conformance for all
wrappers, in tests/backends for `fit` and files, in tests/documents for arguments and verbs.
"""

import math

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from frameworks.keras.support import (
    INF,
    NAN,
    assert_same,
    data,
    loss_scale_warnings,
    small_model,
    status,
    step_by_scale_loss,
    values,
    variables,
    wrapped,
)
from lossscale.errors import AlreadyWrappedError

KerasOwn = keras.optimizers.LossScaleOptimizer


def own(inner=None, **arguments):
    """Keras' class around `inner`, or around an SGD whose update is the gradient."""
    return KerasOwn(inner or keras.optimizers.SGD(1.0), **arguments)


def compiled(optimizer, model=None, **arguments):
    """A model that steps eagerly unless told otherwise: most defects are none of a trace."""
    model = model or small_model()
    model.compile(optimizer, "mse", **(arguments or {"run_eagerly": True}))
    return model


def trained(optimizer):
    model = compiled(optimizer)
    model.fit(*data(24), batch_size=8, shuffle=False, verbose=0)
    return model


def built(optimizer):
    model = compiled(optimizer)
    optimizer.build(model.trainable_variables)
    return model


# --- D1: no floor ---------------------------------------------------------------------------------


def test_peer_d1_scale_reaches_zero_and_destroys_the_weights():
    optimizer, targets = own(), variables([1.0])
    optimizer.build(targets)
    for _ in range(200):
        optimizer.apply([tf.constant([INF])], targets)
    assert float(optimizer.dynamic_scale) == 0
    step_by_scale_loss(optimizer, targets, [np.array([0.5])])
    assert not np.isfinite(targets[0].numpy()).any()


def test_peer_d1_first_good_batch_after_200_nan_batches_destroys_the_weights():
    model = compiled(own(keras.optimizers.Adam()), jit_compile=False)
    x, y = data(203)
    x[:200] = NAN
    model.fit(x, y, batch_size=1, shuffle=False, verbose=0)
    assert not all(np.isfinite(w).all() for w in values(model.trainable_variables))


def test_peer_d2_scale_becomes_infinite_and_stays():
    optimizer, targets = own(initial_scale=2.0**120, dynamic_growth_steps=1), variables([1.0])
    optimizer.build(targets)
    for _ in range(10):
        step_by_scale_loss(optimizer, targets, [np.array([0.0])])
    assert float(optimizer.dynamic_scale) == INF
    for _ in range(10):
        step_by_scale_loss(optimizer, targets, [np.array([1.0])])
    assert float(optimizer.dynamic_scale) == INF
    assert targets[0].numpy().tolist() == [1.0]


def test_peer_d3_overflow_on_replica_1_is_applied(two_replicas):
    with two_replicas.scope():
        weight, optimizer = keras.Variable([1.0]), own()
        optimizer.build([weight])

    def step(gradient):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value * gradient))
        optimizer.apply_gradients([(tape.gradient(loss, weight.value), weight)])

    gradient = two_replicas.experimental_distribute_values_from_function(
        lambda context: tf.constant([INF if context.replica_id_in_sync_group else 0.25])
    )
    two_replicas.run(step, args=(gradient,))
    weights = two_replicas.experimental_local_results(weight.value)
    assert [each.numpy().tolist() for each in weights] == [[-INF], [-INF]]
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**15


# --- D7: a train_step that forgets scale_loss -----------------------------------------------------


class Forgetful(keras.Sequential):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def forgetful_training(optimizer, **arguments):
    model = compiled(optimizer, Forgetful(small_model().layers), jit_compile=False, **arguments)
    before = values(model.trainable_variables)
    model.fit(*data(24), batch_size=8, shuffle=False, verbose=0)
    return before, values(model.trainable_variables)


@pytest.mark.usefixtures("mixed_float16")
def test_peer_d7_update_is_32768_times_too_small():
    right = forgetful_training(keras.optimizers.SGD(0.1), auto_scale_loss=False)
    small = forgetful_training(own(keras.optimizers.SGD(0.1)))
    sizes = [np.abs(after[0] - before[0]).max() for before, after in (right, small)]
    assert sizes[0] / sizes[1] > 10000


@pytest.mark.usefixtures("mixed_float16")
def test_forgotten_scale_loss_gives_the_update_of_no_scaling_and_one_warning():
    _, right = forgetful_training(keras.optimizers.SGD(0.1), auto_scale_loss=False)
    with loss_scale_warnings() as messages:
        _, ours = forgetful_training(wrapped(keras.optimizers.SGD(0.1)))
    assert_same(ours, right)
    assert len(messages) == 1
    assert "never scaled" in messages[0]


# --- D8: two layers -------------------------------------------------------------------------------


def test_peer_d8_double_wrap_divides_twice():
    optimizer, targets = own(own(initial_scale=1024.0), initial_scale=1024.0), variables([1.0])
    optimizer.build(targets)
    step_by_scale_loss(optimizer, targets, [np.array([0.5])])
    assert 1.0 - targets[0].numpy()[0] == pytest.approx(0.5 / 1024, rel=1e-3)


def test_keras_own_class_around_ours_is_refused():
    optimizer = wrapped()
    with pytest.raises(
        AlreadyWrappedError, match="Use this LossScaleOptimizer without Keras' class"
    ):
        own(optimizer)
    targets = variables([1.0])
    optimizer.build(targets)
    step_by_scale_loss(optimizer, targets, [np.array([0.5])])
    assert targets[0].numpy()[0] == 0.5


# --- D9: mixed_float16 model, loaded where the policy is float32 ----------------------------------


def saved_under_mixed_float16_loaded_under_float32(optimizer, path):
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = trained(optimizer)
    model.save(path)
    keras.mixed_precision.set_global_policy("float32")
    return model.optimizer, keras.saving.load_model(path).optimizer


def test_peer_d9_optimizer_comes_back_as_plain_adam_without_state(tmp_path):
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        saved, loaded = saved_under_mixed_float16_loaded_under_float32(
            keras.optimizers.Adam(), tmp_path / "model.keras"
        )
    assert type(saved) is KerasOwn
    assert type(loaded) is keras.optimizers.Adam
    assert int(loaded.iterations) == 0


def test_explicit_optimizer_comes_back_with_its_state_under_any_policy(tmp_path):
    saved, loaded = saved_under_mixed_float16_loaded_under_float32(
        wrapped(keras.optimizers.Adam(), initial_scale=64.0), tmp_path / "model.keras"
    )
    assert isinstance(loaded, lossscale.LossScaleOptimizer)
    assert status(loaded) == status(saved)
    assert status(loaded).applied == 3
    assert_same(values(loaded.variables), values(saved.variables))


# --- D10: weights of an optimizer without loss scaling --------------------------------------------


def test_peer_d10_plain_adam_weights_are_dropped(tmp_path):
    path = tmp_path / "plain.weights.h5"
    trained(keras.optimizers.Adam()).save_weights(path)
    model = built(own(keras.optimizers.Adam()))
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model.load_weights(path)
    assert int(model.optimizer.iterations) == 0


def test_the_inner_variables_stand_in_the_file_once_where_a_plain_optimizer_has_them(tmp_path):
    def names_in_a_file(optimizer):
        trained(optimizer).save_weights(tmp_path / "a.weights.h5")
        items = {}
        with h5py.File(tmp_path / "a.weights.h5") as file:
            file["optimizer"].visititems(lambda name, item: items.update({name: item}))
            return {name for name, item in items.items() if isinstance(item, h5py.Dataset)}

    plain = names_in_a_file(keras.optimizers.Adam())
    ours = names_in_a_file(wrapped(keras.optimizers.Adam()))
    assert plain < ours
    assert [name.startswith("loss_scale_state/") for name in ours - plain] == [True] * 5


def test_peer_d11_set_weights_leaves_the_inner_state():
    source = trained(own(keras.optimizers.Adam())).optimizer
    target = built(own(keras.optimizers.Adam())).optimizer
    target.set_weights(values(source.variables))
    assert int(target.inner_optimizer.iterations) == 0


def test_peer_d12_second_build_adds_variables():
    optimizer, targets = own(), variables([1.0], [2.0])
    optimizer.build(targets)
    count = len(optimizer.variables)
    optimizer.build(targets)
    assert len(optimizer.variables) == count + 2


def test_peer_d13_counter_above_the_interval_never_grows():
    optimizer, targets = own(dynamic_growth_steps=10), variables([1.0])
    optimizer.build(targets)
    optimizer.step_counter.assign(20)
    for _ in range(15):
        step_by_scale_loss(optimizer, targets, [np.array([0.0])])
    assert float(optimizer.dynamic_scale) == 2.0**15


def test_peer_d14_apply_gradients_returns_zero():
    optimizer, targets = own(), variables([1.0])
    returned = [int(optimizer.apply_gradients([(tf.constant([1.0]), targets[0])])) for _ in "abc"]
    assert returned == [0, 0, 0]


# --- D15: validation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        *({"initial_scale": wrong} for wrong in (-1.0, 0.0, NAN, INF, "8")),
        *({"dynamic_growth_steps": wrong} for wrong in (0, -5, 2.5)),
    ],
    ids=str,
)
def test_peer_d15_bad_arguments_are_accepted(arguments):
    assert own(**arguments) is not None


def test_peer_d15_a_string_is_an_attribute_error():
    with pytest.raises(AttributeError):
        own("adam")


@pytest.mark.parametrize("arguments", [{"dynamic": False, "initial_scale": 8.0}, {"rule": None}])
def test_peer_d16_fixed_scale_and_rules_are_refused(arguments):
    with pytest.raises(ValueError):
        own(**arguments)


# --- D19: sparse gradients ------------------------------------------------------------------------


class SparseSpy(keras.optimizers.SGD):
    """Notes in which form each gradient arrived."""

    def __init__(self):
        super().__init__(0.5)
        self.__dict__["seen"] = []

    def update_step(self, gradient, variable, learning_rate):
        self.seen.append(type(gradient))
        super().update_step(gradient, variable, learning_rate)


def test_peer_d19_finite_check_makes_sparse_gradients_dense():
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 4]), tf.constant([1000, 3]))
    assert keras.ops.isfinite(slices).shape == (1000, 3)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_sparse_gradients_reach_the_inner_optimizer_sparse(traced):
    (table,) = variables(np.ones([6, 2]))
    optimizer = wrapped(SparseSpy())
    optimizer.build([table])

    def step(multiplier):
        with tf.GradientTape() as tape:
            rows = tf.gather(table.value, [1, 4, 1])
            loss = optimizer.scale_loss(tf.reduce_sum(rows * multiplier))
        optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])

    step = tf.function(step) if traced else step
    for multiplier in (0.25, INF, 0.25):
        step(tf.constant(multiplier))
    assert set(optimizer.inner_optimizer.seen) == {tf.IndexedSlices}
    expected = np.ones([6, 2], "float32")
    expected[[1, 4]] -= [[2 * 0.5 * 0.5], [2 * 0.5 * 0.25]]
    np.testing.assert_array_equal(table.numpy(), expected)
    assert int(optimizer.steps_skipped) == 1


def test_peer_d20_learning_rate_scheduler_fails_on_several_optimizers():
    parts = keras.optimizers.OptimizerMap(keras.optimizers.SGD(), {".*b": keras.optimizers.Adam()})
    model = compiled(own(keras.optimizers.MultiOptimizer(parts)))
    halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    with pytest.raises(ValueError, match="learning_rate"):
        model.fit(*data(16), verbose=0, callbacks=[halving])


# --- D21: complex gradients -----------------------------------------------------------------------


def complex_step(optimizer, gradient):
    variable = tf.Variable(tf.constant([1 + 1j], tf.complex64))
    optimizer.build([variable])
    gradient = tf.constant([gradient], tf.complex64)
    optimizer.apply([gradient * tf.cast(optimizer.scale_loss(1.0), tf.complex64)], [variable])
    return variable.numpy()


def test_peer_d21_complex_gradients_are_an_error():
    with pytest.raises(tf.errors.InvalidArgumentError):
        complex_step(own(), 0.5 + 0.25j)


def test_complex_gradients_are_unscaled_and_applied():
    assert complex_step(wrapped(), 0.5 + 0.25j).tolist() == [0.5 + 0.75j]


@pytest.mark.parametrize("bad", [complex(0.5, INF), complex(INF, 0.5), complex(0.5, NAN)])
def test_complex_gradient_with_a_bad_part_is_skipped(bad):
    optimizer = wrapped()
    assert complex_step(optimizer, bad).tolist() == [1 + 1j]
    assert int(optimizer.steps_skipped) == 1


def test_peer_d22_empty_list_counts_as_a_finite_step():
    optimizer, targets = own(), variables([1.0])
    optimizer.build(targets)
    optimizer.apply([], targets)
    assert int(optimizer.step_counter) == 1


# --- A fixed loss scale on the inner optimizer ----------------------------------------------------


def test_peer_loss_scale_factor_of_the_inner_optimizer_is_lost_silently():
    inner = keras.optimizers.SGD(loss_scale_factor=64.0)
    own(inner)
    assert inner.loss_scale_factor is None


def test_loss_scale_factor_of_the_inner_optimizer_is_an_error_that_keeps_it():
    inner = keras.optimizers.SGD(loss_scale_factor=64.0)
    with pytest.raises(ValueError, match=r"initial_scale=64\.0"):
        wrapped(inner)
    assert inner.loss_scale_factor == 64.0


def test_peer_float16_loss_overflows_before_build():
    assert not math.isfinite(float(own().scale_loss(tf.constant(3.0, tf.float16))))
