"""A scale that the device moves, by PyTorch's kernel where that equals the rule, bit for bit.

The oracle is the rule itself on NumPy's scalars.
"""

import math
import random

import numpy as np
import pytest
import torch

from frameworks.torch.support import parameter, sgd, wrapped
from lossscale import DynamicScale, FixedScale

DTYPES = {float: np.float32, int: np.int32}


def as_numpy(state):
    return type(state)(*(DTYPES[type(value)](value) for value in state))


def updated(rule, state, finite):
    with np.errstate(all="ignore"):
        found = rule.update(state, np.bool_(finite), xp=np)
        return type(state)(*map(lambda before, value: type(before)(value), state, found))


def rules():
    """Rules of all kinds: those that the kernel equals, and those that it does not."""
    for no_power_of_two in ({"backoff_factor": 0.7}, {"min_scale": 3.0}, {"max_scale": 100.0}):
        yield DynamicScale(8.0, growth_interval=1, **no_power_of_two)
    yield DynamicScale(8.0, growth_interval=1, growth_factor=4.0, max_scale=64.0)
    chosen = random.Random(0)
    for _ in range(30):
        yield DynamicScale(
            8.0,
            growth_interval=chosen.choice([1, 2, 5]),
            growth_factor=chosen.choice([2.0, 2.0, 2.0, 4.0, 1.5]),
            backoff_factor=chosen.choice([0.5, 0.5, 0.25, 0.7]),
            min_scale=chosen.choice([1.0, 2.0**-126, 4.0, 3.0]),
            max_scale=chosen.choice([None, 2.0**16, 64.0, 100.0, 16.0]),
            overflows_before_backoff=chosen.choice([1, 1, 1, 2]),
        )
    yield FixedScale(8.0)
    yield FixedScale(8.0, skip_nonfinite=True)


def on_device(rule):
    """An optimizer, and a step of it."""
    weight = parameter()
    optimizer = wrapped(sgd(weight, fused=True), rule=rule, decide="device")

    def step(finite=False):
        optimizer.scale_loss(torch.ones(()))
        weight.grad = torch.full((2,), 0.0 if finite else torch.nan)
        optimizer.step()

    return optimizer, step


@pytest.mark.filterwarnings("ignore:The saved loss scale:lossscale.LossScaleWarning")
@pytest.mark.parametrize("rule", list(rules()))
def test_any_rule_moves_as_on_numpy_also_after_a_load(rule):
    chosen, (optimizer, step) = random.Random(1), on_device(rule)
    state, skipped, kinds = as_numpy(rule.init()), 0, list(map(type, rule.init()))
    for number in range(120):
        finite = chosen.random() < 0.8
        if number % 15 == 14:
            # PyTorch's kernel cannot go on from all that a file may have.
            scale = chosen.choice([math.inf, 48.0, 2.0**20, 0.25])
            good_steps = chosen.choice([0, 7])
            start = rule.restored(state._replace(scale=scale, good_steps=float(good_steps)))
            state = as_numpy(type(state)(*map(lambda kind, each: kind(each), kinds, start)))
            saved = optimizer.loss_scale_state
            numbers = {"loss_scale": scale, "loss_scale_good_steps": good_steps}
            saved.load_state_dict(saved.state_dict() | numbers)
        step(finite)
        state = updated(rule, state, finite)
        skipped += rule.checks_gradients and not finite
        assert np.float32(optimizer.loss_scale).tobytes() == state.scale.tobytes(), number
        assert isinstance(rule, FixedScale) or optimizer.dynamic_counter == state.good_steps, number
    assert (optimizer.iterations, optimizer.steps_skipped) == (120, skipped)


def test_a_subclass_of_a_rule_moves_as_it_says_and_counts_pass_what_32_bits_hold():
    class Stays(DynamicScale):
        def update(self, state, finite, *, xp):
            return state

    optimizer, step = on_device(Stays(8.0))
    step()
    assert optimizer.loss_scale == 8.0
    saved = optimizer.loss_scale_state
    large = {"loss_scale_iterations": 2**40, "loss_scale_steps_skipped": 2**35}
    saved.load_state_dict(saved.state_dict() | large)
    step()
    assert (int(optimizer.iterations), int(optimizer.steps_skipped)) == (2**40 + 1, 2**35 + 1)
