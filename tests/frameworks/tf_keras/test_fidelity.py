"""What float16 does to the gradients of models of tf_keras."""

import functools

import pytest
import tensorflow as tf
import tf_keras

import fidelity_cases as cases
import fidelity_claims as claims
from lossscale.callbacks import LossScaleMonitor
from lossscale.diagnostics import Verdict, diagnose

LIBRARY = cases.library_of_tf_keras()


@pytest.fixture(autouse=True)
def _float32_policy():
    yield
    tf_keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("claim", claims.EVERYWHERE, ids=lambda claim: claim.__name__)
def test_on_tf_keras(claim):
    claim(LIBRARY)


def test_it_is_what_a_step_computes():
    claims.it_is_what_a_step_computes(
        LIBRARY, lambda optimizer: [each.numpy() for each in optimizer.momentums]
    )


def test_random_operations_of_tensorflow_draw_the_same_in_both():
    class Sampled(tf_keras.layers.Layer):
        def call(self, x):
            noise = tf.random.normal(tf.shape(x), dtype=x.dtype)
            return tf.nn.dropout(x + noise, 0.5) * tf.random.uniform(tf.shape(x), dtype=x.dtype)

    model = tf_keras.Sequential(
        [tf_keras.Input((3,)), tf_keras.layers.Dense(8), Sampled(), tf_keras.layers.Dense(1)]
    )
    before = tf.random.normal
    report = diagnose(cases.compiled(LIBRARY, model), *cases.some_inputs())
    assert report.verdict is Verdict.NOT_NEEDED
    assert all(each.unscaled.error < 0.01 for each in report.measured_variables)
    assert tf.random.normal is before


def test_a_monitor_measures_fidelity(tmp_path):
    monitor = functools.partial(LossScaleMonitor, framework="tf_keras")
    claims.a_monitor_measures_fidelity(LIBRARY, monitor, tmp_path)


def test_a_monitor_says_what_it_cannot_measure():
    monitor = functools.partial(LossScaleMonitor, framework="tf_keras")
    claims.a_monitor_says_what_it_cannot_measure(LIBRARY, monitor)


def test_a_train_step_may_choose_with_python():
    class Choosing(tf_keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                if tf.reduce_max(x) > 1e9:
                    loss = loss * 0.0
                loss = self.optimizer.get_scaled_loss(loss)
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = self.optimizer.get_unscaled_gradients(gradients)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {}

    model = Choosing([tf_keras.Input((3,)), tf_keras.layers.Dense(1)])
    report = diagnose(cases.compiled(LIBRARY, model, cases.LOST), *cases.some_inputs())
    assert report.caveats == ()
    assert report.verdict is Verdict.REQUIRED
