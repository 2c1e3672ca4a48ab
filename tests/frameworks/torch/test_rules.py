"""A scale that the device moves, by PyTorch's kernel where that equals the rule, bit for bit.

The oracle is the rule itself on NumPy's scalars.
"""

import math
import random

import numpy as np
import pytest
import torch

from lossscale import DynamicScale, FixedScale
from lossscale.torch.scale import Counts, DeviceLossScale

CPU = torch.device("cpu")
DTYPES = {float: np.float32, int: np.int32}


def as_numpy(state):
    return type(state)(*(DTYPES[type(value)](value) for value in state))


def updated(rule, state, finite):
    with np.errstate(all="ignore"):
        found = rule.update(state, np.bool_(finite), xp=np)
        return type(state)(*map(lambda before, value: type(before)(value), state, found))


def bits(state):
    return [np.asarray(value).tobytes() for value in state]


def rules():
    """Rules of all kinds: those that the kernel equals, and those that it does not."""
    chosen = random.Random(0)
    for _ in range(40):
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


def kernel_calls(monkeypatch):
    calls, kernel = [], torch._amp_update_scale_

    def counted(*args):
        calls.append(args)
        return kernel(*args)

    monkeypatch.setattr(torch, "_amp_update_scale_", counted)
    return calls


@pytest.mark.parametrize("rule", list(rules()))
def test_any_rule_moves_as_on_numpy_also_after_a_load(rule, monkeypatch):
    calls, chosen = kernel_calls(monkeypatch), random.Random(1)
    scale = DeviceLossScale(rule, [CPU])
    state, skipped, kinds = as_numpy(rule.init()), 0, list(map(type, rule.init()))
    for number in range(400):
        finite = chosen.random() < 0.7
        if number % 50 == 49:
            # PyTorch's kernel cannot go on from all that a file may have.
            loaded = state._replace(scale=chosen.choice([math.inf, 48.0, 2.0**20, 0.25]))
            start = rule.restored(type(state)(*(float(each) for each in loaded)))
            start = type(state)(*(kind(each) for kind, each in zip(kinds, start, strict=True)))
            state = as_numpy(start)
            scale.restore(start, Counts(number, skipped, False))
        overflow = torch.tensor(float(not finite))
        scale.update(overflow)
        scale.count(overflow)
        state, skipped = updated(rule, state, finite), skipped + (not finite)
        assert bits(each.numpy() for each in scale.state) == bits(state), number
        assert float(scale.tensor) == float(state.scale) or np.isnan(state.scale)
    assert scale.counts.iterations.dtype == torch.int64
    assert scale.counts.last_step_skipped.dtype == torch.bool
    assert bool(scale.counts.last_step_skipped) == (not finite)
    doubles = (
        isinstance(rule, DynamicScale)
        and rule.powers_of_two
        and (rule.growth_factor, rule.overflows_before_backoff) == (2.0, 1)
    )
    # Up to the first load, at least.
    assert len(calls) >= 49 if doubles else calls == []


def test_a_subclass_of_a_rule_moves_as_it_says(monkeypatch):
    class Stays(DynamicScale):
        def update(self, state, finite, *, xp):
            return state

    calls = kernel_calls(monkeypatch)
    scale = DeviceLossScale(Stays(8.0), [CPU])
    scale.update(torch.tensor(1.0))
    assert (float(scale.tensor), calls) == (8.0, [])
    # Its counts pass what 32 bits hold.
    scale.restore(scale.first, Counts(2**40, 2**35, True))
    scale.count(torch.tensor(1.0))
    numbers = {"iterations": 2**40 + 1, "steps_skipped": 2**35 + 1, "last_step_skipped": True}
    assert scale.numbers() == {"scale": 8.0, "good_steps": 0, **numbers}
