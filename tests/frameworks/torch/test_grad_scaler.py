"""The drop-in takes the way of PyTorch's scaler, bit for bit."""

import collections
import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.oracle import trace
from frameworks.torch.scaling import (
    OPTIMIZERS,
    made,
    numbers,
    one_step,
    parameters,
    scale_and_tracker,
)
from frameworks.torch.support import through_a_file
from lossscale import DynamicScale, FixedScale
from lossscale.torch.grad_scaler import GradScaler


@settings(max_examples=60, deadline=None)
@given(
    finite=st.lists(st.booleans(), min_size=1, max_size=40),
    init=st.integers(-120, 120),
    growth=st.sampled_from([2.0, 4.0, 1.1, 1.5]),
    backoff=st.sampled_from([0.5, 0.25, 0.7, 2.0**-40]),
    interval=st.integers(1, 5),
    limits=st.sampled_from([(2.0**-126, None), (1.0, 2.0**24), (3.0, 5000.0)]),
)
def test_the_scale_takes_the_way_of_the_rule(finite, init, growth, backoff, interval, limits):
    lowest, highest = limits
    first = min(max(2.0**init, lowest), 2.0**126 if highest is None else highest)
    arguments = {
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "min_scale": lowest,
        "max_scale": highest,
    }
    weights, optimizer, scaler = made(init_scale=first, **arguments)
    scaler.scale(torch.zeros(1))
    shown = []
    for good in finite:
        weights[0].grad = torch.full((3,), 0.0 if good else torch.nan)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == float(scaler._scale)
        shown.append((float(scaler._scale), int(scaler._growth_tracker)))
    rule = DynamicScale(initial_scale=first, **arguments)
    assert shown == moved_as_by_torch(rule, finite)
    if rule.powers_of_two:
        assert shown == trace(rule, finite)


def moved_as_by_torch(rule, finite):
    """PyTorch multiplies in float64 and rounds to float32; a move past a limit is the rule's."""
    scale, good_steps, shown = rule.initial_scale, 0, []
    for good in finite:
        good_steps = good_steps + 1 if good else 0
        if not good:
            scale = max(float(np.float32(scale * rule.backoff_factor)), rule.min_scale)
        elif good_steps == rule.growth_interval:
            grown = float(np.float32(scale * rule.growth_factor))
            scale, good_steps = scale if grown > rule.ceiling else grown, 0
        shown.append((scale, good_steps))
    return shown


def test_which_step_was_skipped():
    good, bad = parameters(1), parameters(1)
    first, second = OPTIMIZERS["sgd"](good), OPTIMIZERS["adamw-fused"](bad)
    scaler = GradScaler("cpu", init_scale=8.0)
    assert not scaler.last_step_skipped
    scaler.scale(good[0].sum() + (bad[0] * torch.inf).sum()).backward()
    scaler.step(second)
    assert scaler.last_step_skipped
    scaler.step(first)
    scaler.update()
    assert not scaler.last_step_skipped
    assert scaler.steps_skipped == 1


Pair = collections.namedtuple("Pair", "a b")


def test_nests_of_losses():
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(())
    assert scaler.scale([one, (one, [one])]) == [4, (4, [4])]
    assert scaler.scale(Pair(one, one)) == Pair(4, 4)
    with pytest.raises(TypeError):
        torch.amp.GradScaler("cpu").scale(Pair(one, one))
    assert scaler.scale({"x": one, "y": [one]}) == {"x": 4, "y": [4]}
    assert scaler.scale([]) == []
    for iterable in (iter([one, one]), {"a": one}.values()):
        assert next(scaler.scale(iterable)) == 4
    # Without a tensor no scale is made.
    fresh = GradScaler("cpu")
    assert fresh.scale({"a": []}) == {"a": []}
    assert fresh._scale is None


def test_gradient_penalty():
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**20)
    loss = (weight**2).sum()
    (scaled,) = torch.autograd.grad(scaler.scale(loss), weight, create_graph=True)
    penalty = (scaled / scaler.get_scale()).pow(2).sum()
    scaler.scale(loss + penalty).backward()
    scaler.step(optimizer)
    # d/dw of w^2 + (2w)^2
    assert weight.tolist() == [2.0 - 20.0, 3.0 - 30.0]


def test_step_returns_what_the_optimizer_returns():
    class Returning(torch.optim.SGD):
        def step(self, word, *, closure=None, number):
            super().step(closure)
            return word, number

    weights = parameters(1)
    optimizer = Returning(weights, lr=1.0)
    scaler = GradScaler("cpu")
    scaler.scale(weights[0].sum()).backward()
    assert scaler.step(optimizer, "word", number=3) == ("word", 3)
    scaler.update()
    weights[0].grad.fill_(torch.inf)
    assert scaler.step(optimizer, "word", number=3) is None


def test_update_after_unscale_alone_moves_the_scale():
    for slope, expected in ((1.0, (8.0, 1)), (torch.inf, (4.0, 0))):
        weights, optimizer, scaler = made(init_scale=8.0)
        scaler.scale((weights[0] * slope).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.update()
        assert scale_and_tracker(scaler) == expected


def test_the_tensors_are_changed_in_place():
    weights, optimizer, scaler = made(init_scale=8.0, growth_interval=1)
    one_step(scaler, optimizer, weights)
    scale, tracker = scaler._scale, scaler._growth_tracker
    assert scale.dtype == torch.float32
    assert tracker.dtype == torch.int32
    one_step(scaler, optimizer, weights, torch.inf)
    scaler.update(32)
    scaler.load_state_dict({"scale": 2.0, "_growth_tracker": 1})
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker
    assert scale.item() == 2


def test_what_others_write_into_the_tensors_counts():
    weights, optimizer, scaler = made(init_scale=8.0, growth_interval=3)
    one_step(scaler, optimizer, weights)
    scaler._scale.fill_(64.0)
    assert scale_and_tracker(scaler) == (64.0, 1)
    scaler._growth_tracker.fill_(2)
    assert scale_and_tracker(scaler) == (64.0, 2)
    one_step(scaler, optimizer, weights)
    assert scale_and_tracker(scaler) == (128.0, 0)
    assert scaler._scale.item() == 128
    scaler._scale = torch.tensor(2.0)
    before = weights[0].detach().clone()
    one_step(scaler, optimizer, weights)
    assert torch.equal(before - weights[0], torch.full((3,), 0.5))
    assert scale_and_tracker(scaler) == (2.0, 1)


def test_made_in_inference_mode_and_used_outside():
    weights, optimizer, scaler = made(init_scale=8.0)
    with torch.inference_mode():
        assert scaler.scale(torch.ones(())) == 8
    one_step(scaler, optimizer, weights, torch.inf)
    assert scaler._scale.item() == 4


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("used", [False, True])
def test_copies(copied, used):
    weights, optimizer, scaler = made(init_scale=8.0, growth_interval=5, min_scale=2.0)
    if used:
        for slope in (torch.inf, 1.0, 1.0):
            one_step(scaler, optimizer, weights, slope)
    if copied == "deepcopy":
        other = copy.deepcopy(scaler)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(scaler))
    else:
        other = through_a_file(scaler, weights_only=False)
    assert other.rule == scaler.rule
    assert other.state_dict() == scaler.state_dict()
    for slope in (1.0, torch.inf):
        one_step(other, optimizer, weights, slope)
    assert other.state_dict() != scaler.state_dict()
    assert other.get_scale() == (2.0 if used else 4.0)


@pytest.mark.parametrize("slope", [4.0, torch.inf])
def test_gradients_that_other_code_unscales_before_anything_was_scaled(slope):
    weights, optimizer, scaler = made()
    weights[0].grad = torch.full((3,), slope)
    inverse, found = torch.tensor(0.25), torch.zeros(1)
    by_device = scaler._unscale_grads_(optimizer, inverse, found, False)
    assert [bool(each) for each in by_device.values()] == [slope == torch.inf]
    assert weights[0].grad.tolist() == [slope / 4.0] * 3


def test_disabled():
    weights, optimizer, scaler = made(enabled=False, growth_interval=7)
    loss = weights[0].sum()
    assert scaler.scale(loss) is loss
    assert scaler.scale("anything") == "anything"
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer, closure=lambda: 1.0)
    scaler.update()
    scaler.update(3.0)
    scaler.load_state_dict({})
    assert numbers(weights) == [[0.5] * 3]
    assert scaler.get_scale() == 1
    assert scaler.state_dict() == {}
    assert not scaler.is_enabled()
    assert scaler.get_growth_interval() == 7
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)
    assert not scaler.last_step_skipped
    assert copy.deepcopy(scaler).state_dict() == {}


@pytest.mark.parametrize("skips", [False, True])
def test_a_fixed_scale(skips):
    rule = FixedScale(128.0, skip_nonfinite=skips)
    weights, optimizer, scaler = made("adamw-fused", rule=rule)
    one_step(scaler, optimizer, weights)
    assert weights[0].tolist() == pytest.approx([0.899] * 3, abs=1e-3)
    assert scaler.get_scale() == 128
    one_step(scaler, optimizer, weights, torch.inf)
    assert scaler.get_scale() == 128
    assert scaler.last_step_skipped is skips
    assert bool(weights[0].isfinite().all()) is skips


def test_a_fixed_scale_read_by_torch_stays_fixed():
    weights, optimizer, theirs = made(make=torch.amp.GradScaler)
    theirs.load_state_dict(GradScaler("cpu", rule=FixedScale(128.0)).state_dict())
    for slope in (1.0, torch.inf, 1.0):
        one_step(theirs, optimizer, weights, slope)
        assert theirs.get_scale() == 128
