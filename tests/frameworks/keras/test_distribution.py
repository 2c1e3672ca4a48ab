"""Replicas: what is of Keras 3 alone; conformance/test_replicas.py has the promises."""

import keras
import pytest
import tensorflow as tf

import lossscale
from backends.programs import Run, made
from kerases import loss_scale_warnings
from lossscale.errors import UnsupportedError
from tensorflow_steps import variables, wrapped


@pytest.mark.filterwarnings("ignore::lossscale.LossScaleWarning")
def test_a_keras_whose_sum_over_replicas_is_elsewhere_does_not_sum_twice_in_silence(monkeypatch):
    [weight], optimizer = variables([1.0, -2.0]), wrapped()
    base = next(c for c in keras.optimizers.SGD.__mro__ if "_all_reduce_sum_gradients" in vars(c))
    monkeypatch.delattr(base, "_all_reduce_sum_gradients")
    with pytest.raises(
        UnsupportedError, match=r"SGD\._all_reduce_sum_gradients.* to apply gradien"
    ):
        optimizer.apply_gradients([(tf.ones(2), weight)], skip_gradients_aggregation=True)
    assert weight.numpy().tolist() == [1.0, -2.0]


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_each_replica_has_marks_of_its_own_on_scaled_gradients(two_replicas, in_function):
    with two_replicas.scope():
        run = made(rule=lossscale.FixedScale(2.0**15))

    def replica_step():
        # What one replica holds is no tensor of the other.
        own = Run(run.optimizer, run.variables)
        own.calls("scale apply:a apply:b hand unscale:ab unscaled:a unscaled:b minimize:a")
        own.calls("scale hand unscale:a unscaled:a unscale:b unscaled:b scale unscale:a unscaled:a")
        own.calls("apply:b")

    step = lambda: two_replicas.run(replica_step)  # noqa: E731
    step = tf.function(step) if in_function else step
    with loss_scale_warnings() as messages:
        step()
        step()
    # The gradients of both replicas are summed: five of `a`, four of `b`, two steps.
    assert run.gone() == {"a": -2 * 2 * 5.0, "b": 2 * 2 * 4 * 0.25}
    assert messages == []
