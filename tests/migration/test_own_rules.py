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
    scale: float


class WithMore(NamedTuple):
    scale: float
    good_steps: int
    lowest: float


class Halving(ScaleRule):
    """Halves after an overflow, and never grows."""

    powers_of_two = True

    def init(self):
        return OnlyAScale(2.0**15)

    def update(self, state, seen, *, xp):
        return state._replace(scale=xp.where(seen.finite, state.scale, state.scale * 0.5))

    def get_config(self):
        return {}


class RemembersTheLowest(Halving):
    def init(self):
        return WithMore(2.0**15, 0, 2.0**15)

    def update(self, state, seen, *, xp):
        lower = xp.where(seen.finite, state.scale, state.scale * 0.5)
        return state._replace(
            scale=lower, lowest=xp.where(lower < state.lowest, lower, state.lowest)
        )


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("rule", [Halving(), RemembersTheLowest()], ids=["fewer", "more"])
def test_what_the_rule_has_is_restored(rule, library):
    v = tf.Variable([5.0])
    inner = library.optimizers.SGD(0.5, momentum=0.9)
    optimizer = lossscale.LossScaleOptimizer(inner, rule=rule)
    restore_checkpoint(CHECKPOINT, optimizer=optimizer, v=v)
    assert number(optimizer.loss_scale) == 8.0
    assert number(optimizer.iterations) == 1
    optimizer.minimize(lambda: v * np.inf, [v])
    assert number(optimizer.loss_scale) == 4.0
    np.testing.assert_allclose(v.numpy(), [0.8])
