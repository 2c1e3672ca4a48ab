"""A monitor of both Kerases says where infinities arise that no loss scale takes away."""

import importlib
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import lossscale
from conformance.wrappers import KERAS
from lossscale.callbacks import LossScaleMonitor
from lossscale.errors import LossScaleWarning

keras = importlib.import_module(KERAS)
if KERAS == "keras":
    ops = keras.ops
else:
    import tensorflow as tf

    ops = SimpleNamespace(
        cast=tf.cast, log=tf.math.log, mean=tf.reduce_mean, square=tf.square, tanh=tf.tanh
    )


class Ending(keras.layers.Layer):
    """The end of a model that float16 gets wrong in one of six ways."""

    def __init__(self, kind, dtype):
        super().__init__(dtype=dtype)
        self.kind = kind
        self.head = keras.layers.Dense(1, name="head", dtype=dtype)
        self.wide = None
        if kind in ("forward", "tanh"):
            identity = keras.initializers.Identity(6e4)
            self.wide = keras.layers.Dense(4, kernel_initializer=identity, name="wide", dtype=dtype)

    def build(self, shape):
        for layer in filter(None, (self.wide, self.head)):
            layer.build(shape)
        self.built = True

    def call(self, x):
        if self.wide is not None:
            x = self.wide(10 * x)
        if self.kind == "tanh":
            # The derivative of the square is infinite, times 0.
            x = ops.tanh(x * x)
        return self.head(x)


def loss_of(kind):
    def loss(y, out):
        # Keras computes losses in float32 itself.
        wide = ops.cast(out, "float32")
        if kind == "loss":
            return ops.mean(ops.square(wide * 1e20))
        if kind == "backward":
            return ops.mean(wide) * 1e9
        return ops.mean(ops.log(wide * 0)) if kind == "log" else ops.mean(ops.square(wide))

    return loss


INSIDE = r"cannot help: \S*wide\S* \(\w+\) gives inf in float16, on the batch `data`"
SIX = [
    ("forward", INSIDE),
    ("tanh", INSIDE),
    ("loss", r"cannot help: .*(is not finite|is inf), in float32 too, on the batch `data`"),
    ("nan", r"cannot help: .*first.* is not finite, in float32 too, on the batch `data`"),
    ("log", r"cannot help: .*(is not finite|is -inf), in float32 too, on the batch `data`"),
    ("backward", r"at the lowest loss scale, 1, .* DynamicScale\(min_scale=2\.0\*\*-24\)"),
]


@pytest.mark.parametrize(("kind", "words"), SIX, ids=[kind for kind, _ in SIX])
def test_what_is_not_the_scale_is_named(kind, words):
    keras.utils.set_random_seed(1)
    policy = (
        keras.mixed_precision.Policy("mixed_float16") if KERAS == "tf_keras" else "mixed_float16"
    )
    first = keras.layers.Dense(4, dtype=policy, name="first")
    model = keras.Sequential([keras.layers.Input((4,)), first, Ending(kind, dtype=policy)])
    inner, rule = keras.optimizers.SGD(1e-3), lossscale.DynamicScale(16.0)
    model.compile(lossscale.LossScaleOptimizer(inner, rule=rule), loss_of(kind))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    x = x * np.float32("nan") if kind == "nan" else x
    y = np.ones((8, 1), "float32")
    monitor = LossScaleMonitor(every=1, data=(x, y), framework=KERAS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", LossScaleWarning)
        model.fit(x, y, batch_size=8, epochs=8, verbose=0, callbacks=[monitor])
    assert int(model.optimizer.steps_skipped) == 8
    messages = [str(each.message) for each in said if each.category is LossScaleWarning]
    assert re.search(words, messages[-1]), messages
    assert [line for line in messages[:-1] if "The loss of step 1 is" not in line] == []
    assert any("cannot help" in line for line in messages) == (kind != "backward")
