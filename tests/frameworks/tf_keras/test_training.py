"""Loops of one's own and graphs of TensorFlow 1."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
from kerases import INF, data
from lossscale import experimental
from tensorflow_steps import wrapped


@pytest.mark.parametrize("verb", ["compute_gradients", "_compute_gradients"])
def test_minimize_calls_what_computes_the_gradients(optimizers, verb):
    class Doubling(lossscale.tf_keras.LossScaleOptimizer):
        pass

    def doubled(self, loss, var_list, grad_loss=None, tape=None):
        return [(2.0 * g, v) for g, v in getattr(super(Doubling, self), verb)(loss, var_list)]

    setattr(Doubling, verb, doubled)
    optimizer, variable = Doubling(optimizers.SGD(1.0)), tf.Variable(1.0)
    optimizer.minimize(lambda: variable * 0.25, [variable])
    assert float(variable) == 0.5


@pytest.mark.parametrize("verb", ["minimize", "apply_gradients", "get_updates"])
@pytest.mark.parametrize("make", ["current", "experimental"])
def test_a_graph_and_a_session(verb, make):
    with tf.Graph().as_default():
        inner = tf_keras.optimizers.legacy.SGD(0.5, momentum=0.9)
        if make == "current":
            optimizer = wrapped(inner, initial_scale=8)
        else:
            scale = experimental.DynamicLossScale(8, 2)
            optimizer = experimental.LossScaleOptimizer(inner, scale)
        variable = tf.Variable([1.0, 2.0])
        factor = tf.compat.v1.placeholder(tf.float32, [2])

        def loss():
            return tf.reduce_sum(variable * factor)

        if verb == "minimize":
            train = optimizer.minimize(loss, [variable])
        elif verb == "get_updates":
            (train,) = optimizer.get_updates(loss(), [variable])
        else:
            gradients = optimizer.get_gradients(loss(), [variable])
            train = optimizer.apply_gradients(zip(gradients, [variable], strict=True))
        assert isinstance(train, tf.Operation)
        current = optimizer.loss_scale if make == "current" else optimizer.loss_scale()
        seen = [variable, current, optimizer.iterations, optimizer.steps_skipped]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(train, {factor: [1.0, 2.0]})
            after_one = session.run(seen)
            session.run(train, {factor: [1.0, np.inf]})
            after_two = session.run(seen)
            session.run(optimizer.iterations.assign(7))
            assert session.run([optimizer.iterations, inner.iterations]) == [7, 6]
    np.testing.assert_array_equal(after_one[0], [0.5, 1.0])
    assert after_one[1:] == [8.0, 1, 0]
    np.testing.assert_array_equal(after_two[0], [0.5, 1.0])
    assert after_two[1:] == [4.0, 2, 1]


def test_a_new_optimizer_is_refused_in_a_graph_of_tensorflow_1():
    with tf.Graph().as_default():
        optimizer, variable = wrapped(tf_keras.optimizers.SGD(0.5)), tf.Variable(1.0)
        with pytest.raises(lossscale.errors.UnsupportedError, match=r"optimizers\.legacy"):
            optimizer.minimize(lambda: variable * 1.0, [variable])


@pytest.mark.parametrize("make", [experimental.DynamicLossScale, experimental.FixedLossScale])
def test_update_returns_what_moves_it_in_a_graph_and_none_elsewhere(make):
    loss_scale = make(8.0)
    assert loss_scale.update([tf.constant(1.0)])[0] is None
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss_scale = make(8.0)
        # As programs of that time do, before it is used.
        initialize = tf.compat.v1.global_variables_initializer()
        bad = tf.compat.v1.placeholder(tf.float32, [])
        moved, should_apply = loss_scale.update([bad])
        nothing, _ = loss_scale.update([])
        moves = make is experimental.DynamicLossScale
        # TensorFlow 2.1 gave a tensor where something moves.
        assert isinstance(moved, tf.Tensor if moves else tf.Operation)
        assert isinstance(nothing, tf.Operation)
        session.run(initialize)
        session.run(nothing)
        # Asked for the verdict alone, nothing moves.
        session.run(tf.identity(should_apply), {bad: INF})
        assert session.run(loss_scale()) == 8.0
        session.run(moved, {bad: INF})
        assert session.run(loss_scale()) == (4.0 if moves else 8.0)


def test_a_diagnosis_is_refused_with_what_to_write_instead():
    model, (x, y) = tf_keras.Sequential([tf_keras.layers.Dense(1)]), data()
    with pytest.raises(lossscale.errors.ArgumentTypeError, match=r"new_model\.set_weights\(model"):
        lossscale.diagnosis.diagnose(model, x, y)
