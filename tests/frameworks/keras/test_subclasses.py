"""Subclasses of ours, and optimizers of one's own inside (see conformance/test_subclasses.py)."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from frameworks.keras.support import (
    INF,
    STEPS,
    small_model,
    status,
    variables,
    wrapped,
)

SGD = keras.optimizers.SGD


class Halving(SGD):
    """Applies half of each gradient."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * g, v) for g, v in grads_and_vars])


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        *itertools.product(["eager", "function"], ["documented", "scale_loss", "minimize"]),
        ("xla", "scale_loss"),
    ],
)
def test_apply_gradients_of_the_inner_optimizer_is_called_on_a_step_that_is_applied(how, mode):
    (weight,) = variables([1.0])
    optimizer = wrapped(Halving(0.5))

    def step(gradient):
        STEPS[how](optimizer, [weight], [gradient])

    run = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    for gradient, expected in ((1.0, 0.75), (INF, 0.75), (1.0, 0.5)):
        run(tf.constant([gradient]))
        assert weight.numpy() == expected
    assert status(optimizer).applied == 2


@keras.saving.register_keras_serializable(package="subclasses_test")
class Registered(lossscale.keras.LossScaleOptimizer):
    """A subclass that names no framework."""

    def apply_gradients(self, grads_and_vars, **kwargs):
        self.__dict__.setdefault("calls", []).append(len(grads_and_vars := list(grads_and_vars)))
        return super().apply_gradients(grads_and_vars, **kwargs)


def test_a_subclass_trains_in_fit_and_is_loaded_as_itself(tmp_path):
    model = small_model()
    model.compile(Registered(SGD(0.1), initial_scale=8.0), "mse", jit_compile=False)
    model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.optimizer.calls == [4]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert isinstance(loaded, Registered)
    assert status(loaded) == status(model.optimizer)
