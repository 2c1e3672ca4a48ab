"""Subclasses as programs of 2020 write them, of ours and of the optimizers that ours wrap."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
from frameworks.tf_keras.support import step, wrapped
from kerases import INF
from lossscale import experimental

CLASSES = {
    "2.4": lambda inner: lossscale.LossScaleOptimizer(inner, initial_scale=8),
    "2.0": lambda inner: experimental.LossScaleOptimizer(inner, experimental.DynamicLossScale(8)),
}
NEW, LEGACY = tf_keras.optimizers, tf_keras.optimizers.legacy


class WithoutArguments(LEGACY.SGD):
    """A legacy optimizer as averaging ones were written, whose verbs know few arguments."""

    def apply_gradients(self, grads_and_vars, name=None):
        return super().apply_gradients(grads_and_vars, name)

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        return super()._compute_gradients(loss, var_list, grad_loss, tape)


class NewWithoutArguments(NEW.SGD):
    def apply_gradients(self, grads_and_vars, name=None):
        return super().apply_gradients(grads_and_vars, name)


FEW_ARGUMENTS = [WithoutArguments, NewWithoutArguments]


@pytest.mark.parametrize("inner", FEW_ARGUMENTS)
def test_an_inner_optimizer_need_not_know_arguments_that_nobody_gives(inner):
    optimizer, weight = wrapped(inner(0.5)), tf.Variable(1.0)
    step(optimizer, [weight], [1.0])
    optimizer.minimize(lambda: weight * 1.0, [weight])
    tf.function(lambda: optimizer.minimize(lambda: weight * 1.0, [weight]))()
    assert float(weight) == -0.5
    model = tf_keras.Sequential([tf_keras.Input((1,)), tf_keras.layers.Dense(1)])
    model.compile(wrapped(inner(0.5)), "mse")
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    assert int(model.optimizer.inner_optimizer.iterations) == 1
    unsummed = {"experimental_aggregate_gradients": False}
    with pytest.raises(ValueError, match=r"apply_gradients\(\) does not take `"):
        optimizer.apply_gradients([(tf.constant(1.0), weight)], **unsummed)
    assert float(weight) == -0.5


@pytest.mark.parametrize("inner", FEW_ARGUMENTS)
def test_it_sums_the_gradients_of_replicas_itself(two_replicas, inner):
    with two_replicas.scope():
        optimizer, weight = wrapped(inner(0.5)), tf.Variable(1.0)

    @tf.function
    def run(values):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient = tf.gather(values, replica)
        scaled = optimizer.get_scaled_loss(gradient)
        optimizer.apply_gradients([(optimizer.get_unscaled_gradients([scaled])[0], weight)])

    two_replicas.run(run, args=(tf.constant([1.0, 2.0]),))
    assert weight.numpy() == -0.5
    # One replica overflows, and both skip.
    two_replicas.run(run, args=(tf.constant([1.0, INF]),))
    assert weight.numpy() == -0.5
    assert int(optimizer.steps_skipped) == 1
