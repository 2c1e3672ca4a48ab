"""A run of the Keras optimizer goes on with Optax, and back, with the same loss scales."""

from typing import Any, NamedTuple

import keras
import numpy as np
import optax
import pytest

import lossscale
import lossscale.optax

RULE = lossscale.DynamicScale(initial_scale=8, growth_interval=2)


class PacedState(NamedTuple):
    scale: Any
    good_steps: Any
    applied: Any


class Paced(lossscale.DynamicScale):
    """A rule with one more field in its state: how many steps were applied."""

    def init(self):
        return PacedState(self.initial_scale, 0, 0)

    def update(self, state, seen, *, xp):
        moved = super().update(lossscale.ScaleState(*state[:2]), seen, xp=xp)
        return PacedState(*moved, state.applied + xp.where(seen.finite, 1, 0))

    def restored(self, state):
        return PacedState(*super().restored(lossscale.ScaleState(*state[:2])), int(state.applied))


def keras_optimizer(rule):
    variable = keras.Variable([1.0, 2.0])
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), rule=rule)
    optimizer.build([variable])
    return optimizer, variable


def keras_trace(optimizer, variable, verdicts):
    found = []
    for finite in verdicts:
        scale = float(optimizer.scale_loss(keras.ops.convert_to_tensor(1.0)))
        gradient = keras.ops.convert_to_tensor([scale, scale if finite else np.inf])
        optimizer.apply([gradient], [variable])
        found.append((float(optimizer.loss_scale), int(optimizer.steps_skipped)))
    return found


def optax_trace(tx, opt_state, params, verdicts):
    found = []
    for finite in verdicts:
        scale = float(opt_state.loss_scale)
        grads = np.float32([scale, scale if finite else np.inf])
        _, opt_state = tx.update(grads, opt_state, params)
        found.append((float(opt_state.loss_scale), int(opt_state.skipped_steps)))
    return found, opt_state


@pytest.mark.parametrize("rule", [RULE, Paced(8, 2)], ids=["dynamic", "with a field of its own"])
def test_the_scales_that_follow_are_the_same(rule):
    optimizer, variable = keras_optimizer(rule)
    keras_trace(optimizer, variable, [True, False, True])
    tx = lossscale.optax.loss_scaled(optax.sgd(0.5), rule=rule)
    params = np.ones(2, np.float32)
    values = {v.name: v for v in optimizer.variables}
    opt_state = lossscale.optax.from_keras(rule, values, optax.sgd(0.5).init(params))

    there = [True, True, False, False, True]
    expected = keras_trace(optimizer, variable, there)
    found, opt_state = optax_trace(tx, opt_state, params, there)
    assert found == expected

    # And back, into an optimizer that knows nothing yet.
    other, variable = keras_optimizer(rule)
    values = lossscale.optax.to_keras(rule, opt_state)
    names = set()
    for v in other.variables:
        if v.name in values:
            v.assign(values[v.name])
            names.add(v.name)
    assert names == set(values)
    back = [True, True, True, False]
    assert keras_trace(other, variable, back) == optax_trace(tx, opt_state, params, back)[0]
