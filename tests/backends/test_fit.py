"""`fit` on each backend, with `install()`, and with gradients that are added up."""

import re

import keras
import numpy as np
import pytest

import lossscale
from backends.support import BACKEND, arrays, data, model_with, number, wrapped
from pages import DOCS

pytestmark = pytest.mark.usefixtures("compiled_quickly")

# Tracing a training step takes PyTorch many seconds: tests/conformance/test_guard.py does it.
JIT = [False] if BACKEND == "torch" else [False, True]

FINITE_LOSS = re.search(
    r"```py\n(class FiniteLoss.*?)```", (DOCS / "troubleshooting.md").read_text(), re.S
)[1]


@pytest.mark.parametrize("jit", JIT)
def test_a_metric_leaves_out_a_skipped_batch_whose_loss_is_nan(jit):
    exec(FINITE_LOSS, found := {"keras": keras})
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(
        lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.0)),
        loss="mse",
        metrics=[found["FiniteLoss"]("finite_loss")],
        jit_compile=jit,
    )
    y = np.array([[0.0], [np.nan], [3.0]], np.float32)
    x = np.ones((3, 2))
    history = model.fit(x, y, batch_size=1, epochs=2, shuffle=False, verbose=0).history
    assert np.isnan(history["loss"]).all()
    assert history["finite_loss"] == [2.5, 2.5]
    assert int(model.optimizer.steps_skipped) == 2


def test_a_multi_optimizer_works_with_a_learning_rate_schedule():
    # Keras' own class hides `optimizers` from the callback, which then finds no learning rate.
    first, rest = keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01)
    parts = keras.optimizers.OptimizerMap(rest, {".*/bias": first})
    inner = keras.optimizers.MultiOptimizer(parts)
    optimizer = wrapped(inner)
    model = model_with(optimizer)
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model.fit(*data(), batch_size=8, epochs=2, verbose=0, callbacks=[halve])
    assert [round(number(part.learning_rate), 6) for part in inner.optimizers] == [0.0025] * 2


# --- Verbs that a subclass has written anew -------------------------------------------------------


class BySeven(lossscale.keras.LossScaleOptimizer):
    """Scales and unscales by itself."""

    def get_scaled_loss(self, loss):
        return loss * 7.0

    def get_unscaled_gradients(self, grads):
        return (gradient / 7.0 for gradient in grads)


class Clipping(lossscale.keras.LossScaleOptimizer):
    """Clips what was unscaled."""

    def get_unscaled_gradients(self, grads):
        return [
            keras.ops.clip(each, -0.125, 0.125) for each in super().get_unscaled_gradients(grads)
        ]


class Twice(lossscale.keras.LossScaleOptimizer):
    """Trains on another loss."""

    def get_scaled_loss(self, loss):
        return super().get_scaled_loss(loss * 2.0)


class Calling(lossscale.keras.LossScaleOptimizer):
    """Calls the verb that calls it."""

    def get_scaled_loss(self, loss):
        return self.scale_loss(loss)


SUBCLASSES = {
    BySeven: lambda: keras.optimizers.SGD(0.1),
    Clipping: lambda: keras.optimizers.SGD(0.1, clipvalue=0.125),
    Twice: lambda: keras.optimizers.SGD(0.2),
    Calling: lambda: keras.optimizers.SGD(0.1),
}


@pytest.mark.parametrize("cls", SUBCLASSES)
def test_fit_calls_the_verbs_that_a_subclass_has_written(cls):
    # Warnings are errors: it says nothing of a loss that was never scaled.
    x, y = data(24)
    spoiled = np.concatenate([x, x[:8] * np.nan])
    optimizer = cls(keras.optimizers.SGD(0.1), initial_scale=2.0**10)
    trained = []
    for each, inputs in ((SUBCLASSES[cls](), x), (optimizer, spoiled)):
        model = model_with(each, jit_compile=JIT[-1])
        model.fit(inputs, np.resize(y, (len(inputs), 1)), batch_size=8, shuffle=False, verbose=0)
        trained.append(arrays(model.trainable_variables))
    for expected, weights in zip(*trained, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-7)
    assert number(optimizer.steps_skipped) == 1


# --- Gradients that the inner optimizer adds up before it applies them ----------------------------

WINDOW = [np.array([0.5, -1.0, 2.0]), np.array([1.5, 1.0, -4.0])]


@pytest.mark.filterwarnings("ignore:float16 variables are rounded")
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_variables_of_every_dtype_take_the_mean_of_a_window(dtype):
    variable = keras.Variable(np.array([1.0, 2.0, -3.0]), dtype=dtype)
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer = lossscale.LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build([variable])
    for gradient in (WINDOW[0], WINDOW[0] * np.inf, WINDOW[1]):
        scaled = optimizer.scale_loss(keras.ops.convert_to_tensor(gradient, dtype="float32"))
        # The skipped step halved the scale; what comes of a loss has its variable's dtype.
        optimizer.apply([keras.ops.cast(scaled, dtype)], [variable])
    # Every call is a step, also one that only adds to the window or is skipped.
    assert "1 of 3 steps skipped" in repr(optimizer)
    assert (int(optimizer.iterations), int(inner.iterations)) == (3, 1)
    optimizer.iterations = 5
    assert (int(optimizer.iterations), int(inner.iterations)) == (5, 2)
    found = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
    np.testing.assert_array_equal(found, [1.0 - 0.5, 2.0 - 0.0, -3.0 + 0.5])
    assert int(optimizer.steps_skipped) == 1
