"""What the pages document, on both families, and the faults that TensorFlow had there."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
from kerases import INF, assert_same
from lossscale import experimental
from tensorflow_steps import step_by_documented_calls as step
from tensorflow_steps import wrapped


@pytest.fixture
def var():
    return tf.Variable([1.0, 2.0])


def test_slots_and_weights_that_are_added_are_in_a_checkpoint(optimizers, var, tmp_path):
    optimizer = wrapped(optimizers.SGD(0.5))
    slot = optimizer.add_slot(var, "average", initializer="ones")
    seen = optimizer.add_weight("seen", (), dtype="int64", trainable=False)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, v=var)
    path = checkpoint.save(tmp_path / "a")
    slot.assign([3.0, 4.0])
    seen.assign(5)
    checkpoint.restore(path)
    assert_same([slot.numpy(), seen.numpy()], [np.ones(2, np.float32), np.int64(0)])


def after_three_steps(inner, var):
    """Our optimizer, after a step and two that were skipped."""
    optimizer = wrapped(inner)
    for gradient in (0.5, INF, INF):
        step(optimizer, [var], [[gradient, 0.0]])
    return optimizer


def test_iterations_serve_as_a_variable(optimizers, var):
    optimizer = after_three_steps(optimizers.Adam(0.1), var)
    steps = optimizer.iterations
    assert isinstance(steps, tf.Variable)
    assert (steps.numpy(), tf_keras.backend.get_value(steps), int(steps + 1)) == (3, 3, 4)
    assert float(tf.cast(steps, tf.float32) * 2.0) == float(steps) * 2.0 == 6.0
    assert (steps.dtype, steps.shape) == (tf.int64, ())
    assert steps.device == optimizer.inner_optimizer.iterations.device
    steps.assign_add(7)
    assert (int(steps), int(optimizer.inner_optimizer.iterations)) == (10, 8)
    assert int(optimizer.steps_skipped) == 2
    assert int(tf.function(lambda: optimizer.iterations + 1)()) == 11


def test_iterations_are_read_as_an_array_and_saved_by_themselves(optimizers, var, tmp_path):
    steps = after_three_steps(optimizers.SGD(0.1), var).iterations
    for array in (np.asarray(steps), np.array(steps, "f8"), np.arange(9)[steps]):
        assert array == 3
    # What a variable of TensorFlow saves and restores.
    plain = tf.Variable(0, dtype=tf.int64)
    tf.train.Checkpoint(i=plain).restore(tf.train.Checkpoint(i=steps).save(tmp_path / "ours"))
    assert int(plain) == 3
    plain.assign(7)
    path = tf.train.Checkpoint(i=plain).save(tmp_path / "plain")
    tf.train.Checkpoint(i=steps).restore(path).assert_consumed()
    assert int(steps) == 7


def test_a_counter_of_ones_own_is_used(optimizers, var):
    optimizer, mine = wrapped(optimizers.SGD(1.0)), tf.Variable(5, dtype=tf.int64)
    optimizer.iterations = mine
    step(optimizer, [var], [[0.0, 0.0]])
    assert (int(mine), int(optimizer.iterations)) == (6, 6)


def test_one_class_makes_optimizers_of_both_families():
    families = tf_keras.optimizers, tf_keras.optimizers.legacy
    made = [lossscale.tf_keras.LossScaleOptimizer(family.SGD()) for family in families]
    for own, other, optimizer in zip(families, reversed(families), made, strict=True):
        assert isinstance(optimizer, own.Optimizer)
        assert not isinstance(optimizer, other.Optimizer)
        assert type(type(optimizer)(own.Adam())) is type(optimizer)
        with pytest.raises(TypeError, match=r"Call lossscale\.tf_keras\.LossScaleOptimizer"):
            type(optimizer)(other.SGD())


# Two of the names are those of variables of ours.
@pytest.mark.parametrize("name", ["updates", "steps_skipped", "last_step_skipped"])
def test_a_loss_scale_of_ones_own_moves_by_its_own_code(optimizers, var, tmp_path, name):
    class Counting(experimental.LossScale):
        def __init__(self):
            self.updates = self._add_weight(name, 0, tf.int64)

        def __call__(self):
            return tf.constant(4.0)

        def get_config(self):
            return {}

        def update(self, grads):
            self.updates.assign_add(1)
            return None, tf.reduce_all([tf.reduce_all(g < 100.0) for g in grads])

    loss_scale = Counting()
    optimizer = experimental.LossScaleOptimizer(optimizers.SGD(1.0), loss_scale)
    for gradient in (0.5, 1000.0):
        step(optimizer, [var], [[gradient, 0.0]])
    assert_same([var.numpy()], [np.float32([0.5, 2.0])])
    assert (int(loss_scale.updates), int(optimizer.steps_skipped)) == (2, 1)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    path = checkpoint.save(tmp_path / "a")
    loss_scale.updates.assign(9)
    checkpoint.restore(path)
    assert (int(loss_scale.updates), int(optimizer.steps_skipped)) == (2, 1)


@pytest.mark.parametrize("base", [experimental.FixedLossScale, experimental.DynamicLossScale])
def test_a_weight_that_a_subclass_adds_is_saved(optimizers, var, base, tmp_path):
    class Weighted(base):
        def __init__(self):
            super().__init__(4.0)
            self.extra = self._add_weight("extra", 0, tf.int64)

        def get_config(self):
            return {}

    loss_scale = Weighted()
    optimizer = experimental.LossScaleOptimizer(optimizers.SGD(1.0), loss_scale)
    step(optimizer, [var], [[0.5, 0.0]])
    loss_scale.extra.assign(2)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    path = checkpoint.save(tmp_path / "a")
    loss_scale.extra.assign(9)
    checkpoint.restore(path)
    assert int(loss_scale.extra) == 2


def test_the_learning_rate_of_old_programs_is_that_of_the_schedule():
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(schedule))
    assert float(optimizer._decayed_lr(tf.float32)) == 0.5
    assert optimizer._get_hyper("learning_rate") is schedule
