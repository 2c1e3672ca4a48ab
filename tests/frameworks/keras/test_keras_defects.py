"""Defects of Keras' own LossScaleOptimizer that this one must not have.

A test whose name begins with `test_peer` shows the defect in Keras' class. When one of these
fails, Keras has mended it, and the comparison in the documents has to be changed.
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
    gradients_for,
    loss_scale_warnings,
    small_model,
    status,
    step_by_documented_calls,
    step_by_scale_loss,
    values,
    variables,
    wrapped,
)
from lossscale import DynamicScale, LossScaleWarning

KerasOwn = keras.optimizers.LossScaleOptimizer


def own(inner=None, **arguments):
    """Keras' class around `inner`, or around an SGD whose update is the gradient."""
    return KerasOwn(inner or keras.optimizers.SGD(1.0), **arguments)


def fit_nan_then_good(model, nan_batches, good_batches):
    x, y = data(rows=nan_batches + good_batches)
    x[:nan_batches] = NAN
    model.fit(x, y, batch_size=1, shuffle=False, verbose=0)
    return values(model.trainable_variables)


def compiled(optimizer, model=None, **arguments):
    """A model that steps eagerly unless told otherwise: most defects are none of a trace."""
    model = model or small_model()
    model.compile(optimizer, "mse", **(arguments or {"run_eagerly": True}))
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
    assert not all(np.isfinite(w).all() for w in fit_nan_then_good(model, 200, 3))


def test_300_overflows_stop_at_the_floor_and_the_next_step_is_right():
    optimizer, targets = wrapped(), variables([1.0])
    for _ in range(300):
        step_by_scale_loss(optimizer, targets, [np.array([INF])])
    assert status(optimizer)["scale"] == 1.0
    assert int(optimizer.steps_skipped) == 300
    step_by_scale_loss(optimizer, targets, [np.array([0.25])])
    assert targets[0].numpy().tolist() == [0.75]


def test_fit_trains_on_after_nan_batches_at_the_floor():
    model = compiled(wrapped(keras.optimizers.Adam()))
    before = values(model.trainable_variables)
    # The floor is 15 skips away.
    after = fit_nan_then_good(model, 20, 5)
    assert all(np.isfinite(w).all() for w in after)
    assert all((a != b).any() for a, b in zip(after, before, strict=True))
    assert status(model.optimizer) == {
        "scale": 1.0,
        "counter": 5,
        "skipped": 20,
        "last": False,
        "iterations": 25,
        "applied": 5,
    }


# --- D2: no ceiling -------------------------------------------------------------------------------


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


def test_scale_stops_at_its_ceiling_and_training_goes_on():
    optimizer, targets = wrapped(initial_scale=2.0**120, dynamic_growth_steps=1), variables([1.0])
    for _ in range(10):
        step_by_scale_loss(optimizer, targets, [np.array([0.0])])
    assert float(optimizer.loss_scale) == 2.0**126
    assert 1 / np.float32(optimizer.loss_scale) >= np.finfo("float32").tiny
    # 2**126 times 0.5 is finite, times 8 is not.
    step_by_scale_loss(optimizer, targets, [np.array([0.5])])
    assert targets[0].numpy().tolist() == [0.5]
    step_by_scale_loss(optimizer, targets, [np.array([8.0])])
    assert float(optimizer.loss_scale) == 2.0**125
    assert targets[0].numpy().tolist() == [0.5]


# --- D3: only the first replica is asked ----------------------------------------------------------


def two_replica_step(strategy, make):
    """One step with a finite gradient on replica 0 and an infinite one on replica 1."""
    with strategy.scope():
        weight, optimizer = keras.Variable([1.0]), make()
        optimizer.build([weight])

    def step(gradient):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value * gradient))
        optimizer.apply_gradients([(tape.gradient(loss, weight.value), weight)])

    gradient = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([INF if context.replica_id_in_sync_group else 0.25])
    )
    strategy.run(step, args=(gradient,))
    return optimizer, [
        v.numpy().tolist() for v in strategy.experimental_local_results(weight.value)
    ]


def test_peer_d3_overflow_on_replica_1_is_applied(two_replicas):
    optimizer, weights = two_replica_step(two_replicas, own)
    assert weights == [[-INF], [-INF]]
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**15


def test_overflow_on_replica_1_is_skipped_everywhere(two_replicas):
    optimizer, weights = two_replica_step(two_replicas, wrapped)
    assert weights == [[1.0], [1.0]]
    assert float(optimizer.loss_scale) == 2.0**14
    assert int(optimizer.steps_skipped) == 1


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
    x, y = data(rows=24)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    after = values(model.trainable_variables)
    return [a - b for a, b in zip(after, before, strict=True)], after


@pytest.mark.usefixtures("mixed_float16")
def test_peer_d7_update_is_32768_times_too_small():
    right, _ = forgetful_training(keras.optimizers.SGD(0.1), auto_scale_loss=False)
    small, _ = forgetful_training(own(keras.optimizers.SGD(0.1)))
    sizes = [np.abs(d).max() for d in (right[0], small[0])]
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


@pytest.mark.parametrize("inner", [wrapped, own], ids=["ours", "keras_own"])
def test_double_wrap_is_an_error_that_says_what_to_do(inner):
    with pytest.raises(TypeError, match="Wrap the optimizer inside it"):
        lossscale.LossScaleOptimizer(inner())


def test_two_wrappers_around_one_optimizer_are_an_error():
    inner = keras.optimizers.SGD()
    first = wrapped(inner)
    with pytest.raises(TypeError, match="already wrapped"):
        wrapped(inner)
    assert first.inner_optimizer is inner


def test_keras_own_class_around_ours_warns():
    optimizer, targets = own(wrapped()), variables([1.0])
    optimizer.build(targets)
    with pytest.warns(LossScaleWarning, match="too small by that factor"):
        step_by_scale_loss(optimizer, targets, [np.array([0.5])])


# --- D9: mixed_float16 model, loaded where the policy is float32 ----------------------------------


def saved_under_mixed_float16_loaded_under_float32(optimizer, path):
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = compiled(optimizer)
    model.fit(*data(24), batch_size=8, verbose=0)
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
    assert status(loaded)["applied"] == 3
    assert_same(values(loaded.variables), values(saved.variables))


# --- D10: weights of an optimizer without loss scaling --------------------------------------------


def trained(optimizer, steps=3):
    model = compiled(optimizer)
    model.fit(*data(8 * steps), batch_size=8, shuffle=False, verbose=0)
    return model


def built(optimizer):
    model = compiled(optimizer)
    optimizer.build(model.trainable_variables)
    return model


def test_peer_d10_plain_adam_weights_are_dropped(tmp_path):
    path = tmp_path / "plain.weights.h5"
    trained(keras.optimizers.Adam()).save_weights(path)
    model = built(own(keras.optimizers.Adam()))
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model.load_weights(path)
    assert int(model.optimizer.iterations) == 0


def test_plain_adam_weights_go_into_a_wrapped_adam(tmp_path):
    path = tmp_path / "plain.weights.h5"
    plain = trained(keras.optimizers.Adam())
    plain.save_weights(path)
    model = built(wrapped(keras.optimizers.Adam()))
    model.load_weights(path)
    assert_same(
        values(model.optimizer.inner_optimizer.variables), values(plain.optimizer.variables)
    )
    assert status(model.optimizer) == {
        "scale": 2.0**15,
        "counter": 0,
        "skipped": 0,
        "last": False,
        "iterations": 3,
        "applied": 3,
    }


def test_wrapped_adam_weights_go_into_a_plain_adam(tmp_path):
    path = tmp_path / "wrapped.weights.h5"
    ours = trained(wrapped(keras.optimizers.Adam()))
    ours.save_weights(path)
    model = built(keras.optimizers.Adam())
    model.load_weights(path)
    assert_same(values(model.optimizer.variables), values(ours.optimizer.inner_optimizer.variables))
    assert int(model.optimizer.iterations) == 3


@pytest.mark.parametrize("when", ["built", "unbuilt"])
def test_file_of_keras_own_class_is_read_whole(tmp_path, when):
    path = tmp_path / "keras.weights.h5"
    theirs = trained(own(keras.optimizers.Adam(), initial_scale=32.0, dynamic_growth_steps=2))
    theirs.save_weights(path)
    optimizer = wrapped(keras.optimizers.Adam())
    model = compiled(optimizer)
    if when == "built":
        optimizer.build(model.trainable_variables)
    model.load_weights(path)
    optimizer.build(model.trainable_variables)
    assert status(optimizer) == {
        "scale": 64.0,
        "counter": 1,
        "skipped": 0,
        "last": False,
        "iterations": 3,
        "applied": 3,
    }
    assert_same(
        values(optimizer.inner_optimizer.variables),
        values(theirs.optimizer.inner_optimizer.variables),
    )


def test_the_inner_variables_stand_in_the_file_once_where_a_plain_optimizer_has_them(tmp_path):
    plain, ours = tmp_path / "plain.weights.h5", tmp_path / "ours.weights.h5"
    trained(keras.optimizers.Adam()).save_weights(plain)
    trained(wrapped(keras.optimizers.Adam())).save_weights(ours)
    names = {}
    for path in (plain, ours):
        with h5py.File(path) as file:
            found = []
            file["optimizer"].visititems(
                lambda name, item, found=found: (
                    found.append(name) if isinstance(item, h5py.Dataset) else None
                )
            )
            names[path] = set(found)
    own_names = {name for name in names[ours] if name.startswith("loss_scale_state/")}
    assert names[ours] - own_names == names[plain]
    assert len(own_names) == 5


# --- D11: set_weights -----------------------------------------------------------------------------


def test_peer_d11_set_weights_leaves_the_inner_state():
    source = trained(own(keras.optimizers.Adam())).optimizer
    target = built(own(keras.optimizers.Adam())).optimizer
    target.set_weights(values(source.variables))
    assert int(target.inner_optimizer.iterations) == 0


def test_set_weights_with_all_variables_sets_all():
    source = trained(wrapped(keras.optimizers.Adam(), initial_scale=8.0, dynamic_growth_steps=2))
    target = built(wrapped(keras.optimizers.Adam()))
    target.optimizer.set_weights(values(source.optimizer.variables))
    assert_same(values(target.optimizer.variables), values(source.optimizer.variables))
    assert status(target.optimizer)["scale"] == 16.0
    assert status(target.optimizer)["iterations"] == 3


# --- D12: a second build --------------------------------------------------------------------------


def test_peer_d12_second_build_adds_variables():
    optimizer, targets = own(), variables([1.0], [2.0])
    optimizer.build(targets)
    count = len(optimizer.variables)
    optimizer.build(targets)
    assert len(optimizer.variables) == count + 2


def test_second_build_changes_nothing():
    optimizer, targets = wrapped(keras.optimizers.Adam()), variables([1.0], [2.0])
    optimizer.build(targets)
    step_by_scale_loss(optimizer, targets, [np.array([1.0]), np.array([INF])])
    step_by_scale_loss(optimizer, targets, [np.array([1.0]), np.array([1.0])])
    before, state = list(optimizer.variables), status(optimizer)
    optimizer.build(targets)
    assert [id(v) for v in optimizer.variables] == [id(v) for v in before]
    assert status(optimizer) == state


# --- D13: a counter above the growth interval -----------------------------------------------------


def test_peer_d13_counter_above_the_interval_never_grows():
    optimizer, targets = own(dynamic_growth_steps=10), variables([1.0])
    optimizer.build(targets)
    optimizer.step_counter.assign(20)
    for _ in range(15):
        step_by_scale_loss(optimizer, targets, [np.array([0.0])])
    assert float(optimizer.dynamic_scale) == 2.0**15


def test_counter_above_a_shorter_interval_grows_on_the_next_finite_step():
    optimizer, targets = wrapped(dynamic_growth_steps=10), variables([1.0])
    optimizer.dynamic_counter.assign(20)
    step_by_scale_loss(optimizer, targets, [np.array([0.0])])
    assert (status(optimizer)["scale"], status(optimizer)["counter"]) == (2.0**16, 0)


# --- D14: what apply_gradients returns ------------------------------------------------------------


def test_peer_d14_apply_gradients_returns_zero():
    optimizer, targets = own(), variables([1.0])
    returned = [int(optimizer.apply_gradients([(tf.constant([1.0]), targets[0])])) for _ in "abc"]
    assert returned == [0, 0, 0]


def test_apply_gradients_returns_the_number_of_steps():
    optimizer, targets = wrapped(), variables([1.0])
    returned = []
    for gradient in (1.0, INF, 1.0):
        grads = optimizer.get_unscaled_gradients([tf.constant([gradient])])
        returned.append(int(optimizer.apply_gradients(zip(grads, targets, strict=True))))
    assert returned == [1, 2, 3]


def test_what_apply_gradients_returns_can_be_returned_from_a_function():
    optimizer, targets = wrapped(), variables([1.0])
    optimizer.build(targets)

    @tf.function
    def step(gradient):
        grads = optimizer.get_unscaled_gradients([gradient])
        return optimizer.apply_gradients(zip(grads, targets, strict=True))

    assert [int(step(tf.constant([g]))) for g in (1.0, INF, 1.0)] == [1, 2, 3]


# --- D15: validation ------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    {"initial_scale": -1.0},
    {"initial_scale": 0.0},
    {"initial_scale": NAN},
    {"initial_scale": INF},
    {"initial_scale": "8"},
    {"dynamic_growth_steps": 0},
    {"dynamic_growth_steps": -5},
    {"dynamic_growth_steps": 2.5},
]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=str)
def test_peer_d15_bad_arguments_are_accepted(arguments):
    assert own(**arguments) is not None


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=str)
def test_bad_arguments_are_value_errors_that_name_them(arguments):
    inner = keras.optimizers.SGD()
    with pytest.raises(ValueError, match=next(iter(arguments))):
        wrapped(inner, **arguments)
    assert wrapped(inner).inner_optimizer is inner


def test_peer_d15_a_string_is_an_attribute_error():
    with pytest.raises(AttributeError):
        own("adam")


@pytest.mark.parametrize("inner", ["adam", keras.optimizers.Adam, None, 3])
def test_what_is_no_optimizer_is_a_type_error_that_says_what_to_do(inner):
    with pytest.raises(TypeError, match="must be an optimizer to wrap"):
        lossscale.LossScaleOptimizer(inner)


# --- D16: what cannot be said to Keras' class -----------------------------------------------------


@pytest.mark.parametrize("arguments", [{"dynamic": False, "initial_scale": 8.0}, {"rule": None}])
def test_peer_d16_fixed_scale_and_rules_are_refused(arguments):
    with pytest.raises(ValueError):
        own(**arguments)


def test_fixed_scale_stays_and_applies_what_it_is_given():
    optimizer, targets = wrapped(dynamic=False, initial_scale=8.0), variables([1.0])
    step_by_scale_loss(optimizer, targets, [np.array([0.5])])
    assert targets[0].numpy().tolist() == [0.5]
    step_by_scale_loss(optimizer, targets, [np.array([INF])])
    assert targets[0].numpy().tolist() == [-INF]
    assert status(optimizer) == {
        "scale": 8.0,
        "counter": None,
        "skipped": 0,
        "last": False,
        "iterations": 2,
        "applied": 2,
    }


def test_fixed_scale_skips_where_asked_to():
    rule = lossscale.FixedScale(8, skip_nonfinite=True)
    optimizer, targets = wrapped(rule=rule), variables([1.0])
    step_by_scale_loss(optimizer, targets, [np.array([INF])])
    assert targets[0].numpy().tolist() == [1.0]
    assert status(optimizer)["scale"] == 8.0
    assert status(optimizer)["skipped"] == 1


def test_factors_and_limits_of_the_rule_drive_the_scale():
    rule = DynamicScale(16, 1, growth_factor=4, backoff_factor=0.25, min_scale=0.5, max_scale=100)
    optimizer, targets = wrapped(rule=rule), variables([1.0])
    scales = []
    for gradient in (0.0, 0.0, INF, INF, INF, INF, 0.0):
        step_by_documented_calls(optimizer, targets, [np.array([gradient])])
        scales.append(float(optimizer.loss_scale))
    assert scales == [64, 64, 16, 4, 1, 0.5, 2]


# --- D19: sparse gradients ------------------------------------------------------------------------


class SparseSpy(keras.optimizers.SGD):
    """Notes in which form each gradient arrived."""

    def __init__(self):
        super().__init__(0.5)
        self.__dict__["seen"] = []

    def update_step(self, gradient, variable, learning_rate):
        self.seen.append(type(gradient))
        super().update_step(gradient, variable, learning_rate)


def embedding_step(optimizer, table, rows, multiplier):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_sum(tf.gather(table.value, rows) * multiplier))
    gradient = tape.gradient(loss, table.value)
    assert isinstance(gradient, tf.IndexedSlices)
    optimizer.apply_gradients([(gradient, table)])


def test_peer_d19_finite_check_makes_sparse_gradients_dense():
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 4]), tf.constant([1000, 3]))
    assert keras.ops.isfinite(slices).shape == (1000, 3)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_sparse_gradients_reach_the_inner_optimizer_sparse(traced):
    (table,) = variables(np.ones([6, 2]))
    optimizer = wrapped(SparseSpy())
    optimizer.build([table])
    rows = tf.constant([1, 4, 1])

    def step(multiplier):
        embedding_step(optimizer, table, rows, multiplier)

    step = tf.function(step) if traced else step
    step(tf.constant(0.25))
    step(tf.constant(INF))
    step(tf.constant(0.25))
    assert set(optimizer.inner_optimizer.seen) == {tf.IndexedSlices}
    expected = np.ones([6, 2], "float32")
    expected[[1, 4]] -= [[2 * 0.5 * 0.5], [2 * 0.5 * 0.25]]
    np.testing.assert_array_equal(table.numpy(), expected)
    assert int(optimizer.steps_skipped) == 1


def test_unscaling_keeps_indices_and_shape_of_sparse_gradients():
    slices = tf.IndexedSlices(tf.fill([2, 3], 8.0), tf.constant([1, 4]), tf.constant([10, 3]))
    (unscaled,) = wrapped(initial_scale=4.0).get_unscaled_gradients([slices])
    assert isinstance(unscaled, tf.IndexedSlices)
    np.testing.assert_array_equal(unscaled.values, np.full([2, 3], 2.0))
    assert unscaled.indices.numpy().tolist() == [1, 4]
    assert unscaled.dense_shape.numpy().tolist() == [10, 3]


# --- D20: several optimizers ----------------------------------------------------------------------


def two_optimizers():
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1), {".*hidden/.*": keras.optimizers.Adam(0.2)}
        )
    )


def halving_scheduler():
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)


def test_peer_d20_learning_rate_scheduler_fails_on_several_optimizers():
    model = compiled(own(two_optimizers()))
    with pytest.raises(ValueError, match="learning_rate"):
        model.fit(*data(16), verbose=0, callbacks=[halving_scheduler()])


def test_several_optimizers_train_with_a_learning_rate_scheduler():
    weights = []
    for optimizer in (two_optimizers(), wrapped(two_optimizers())):
        model = compiled(optimizer)
        model.fit(*data(16), epochs=2, verbose=0, shuffle=False, callbacks=[halving_scheduler()])
        weights.append(values(model.trainable_variables))
        rates = [float(part.learning_rate) for part in optimizer.optimizers]
        assert sorted(rates) == pytest.approx([0.025, 0.05])
    assert_same(*weights)


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


# --- D22: no gradients ----------------------------------------------------------------------------


def test_peer_d22_empty_list_counts_as_a_finite_step():
    optimizer, targets = own(), variables([1.0])
    optimizer.build(targets)
    optimizer.apply([], targets)
    assert int(optimizer.step_counter) == 1


def test_empty_list_given_to_apply_changes_nothing():
    optimizer, targets = wrapped(dynamic_growth_steps=1), variables([1.0])
    optimizer.build(targets)
    before = values(optimizer.variables)
    optimizer.apply([], targets)
    assert_same(values(optimizer.variables), before)


@pytest.mark.parametrize("gradients", [[], [None]], ids=["empty", "none"])
def test_apply_gradients_without_a_gradient_is_an_error_that_changes_nothing(gradients):
    optimizer, targets = wrapped(dynamic_growth_steps=1), variables([1.0])
    optimizer.build(targets)
    before = values(optimizer.variables)
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([(gradient, targets[0]) for gradient in gradients])
    with pytest.raises(TypeError, match="pairs"):
        optimizer.apply_gradients([tf.constant([1.0])])
    assert_same(values(optimizer.variables), before)


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


# --- Losses that the scale would push out of float16 ----------------------------------------------


def test_peer_float16_loss_overflows_before_build():
    assert not math.isfinite(float(own().scale_loss(tf.constant(3.0, tf.float16))))


@pytest.mark.parametrize("scale", ["scale_loss", "get_scaled_loss"])
def test_float16_loss_is_scaled_in_float32(scale):
    product = getattr(wrapped(), scale)(tf.constant(3.0, tf.float16))
    assert product.dtype == tf.float32
    assert float(product) == 3 * 2.0**15


def test_gradients_of_one_step_differ_between_variables_and_all_arrive():
    optimizer, targets = wrapped(), variables(np.ones(3), np.ones([2, 2]))
    (gradients,) = gradients_for(targets, 1)
    step_by_scale_loss(optimizer, targets, gradients)
    assert_same(
        values(targets), [np.ones(3, "f") - gradients[0], np.ones([2, 2], "f") - gradients[1]]
    )
