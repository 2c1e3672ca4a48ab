"""Old files in an optimizer whose rule is the user's own, and remembers other things."""

from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale
from lossscale.migration import restore_checkpoint
from lossscale.rules import ScaleRule
from migration.support import FIXTURES, number

CHECKPOINT = next(FIXTURES.glob("ck/2.4.4_new-1.index"))


class OnlyAScale(NamedTuple):
    scale: float = 2.0**15


class WithMore(NamedTuple):
    scale: float = 2.0**15
    good_steps: int = 0
    lowest: float = 1.0


class Halving(ScaleRule):
    """Halves after an overflow, and never grows."""

    powers_of_two = True

    def __init__(self, state):
        self.state = state

    def init(self):
        return self.state()

    def update(self, state, seen, *, xp):
        return state._replace(scale=xp.where(seen.finite, state.scale, state.scale * 0.5))

    def get_config(self):
        return {}


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("state", [OnlyAScale, WithMore])
def test_what_the_rule_has_is_restored(state, library):
    v = tf.Variable([5.0])
    inner = library.optimizers.SGD(0.5, momentum=0.9)
    optimizer = lossscale.LossScaleOptimizer(inner, rule=Halving(state))
    restore_checkpoint(CHECKPOINT, optimizer=optimizer, v=v)
    assert number(optimizer.loss_scale) == 8.0
    assert number(optimizer.iterations) == 1
    optimizer.minimize(lambda: v * np.inf, [v])
    assert number(optimizer.loss_scale) == 4.0
    np.testing.assert_allclose(v.numpy(), [0.8])
