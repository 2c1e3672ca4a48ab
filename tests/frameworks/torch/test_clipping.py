"""`clip_norm`: what `torch.nn.utils.clip_grad_norm_` does, and the verdict of the same norm."""

import itertools
import math

import numpy as np
import pytest
import torch

from frameworks.torch.support import backward, bits, fill, parameters, snapshot, wrapped
from lossscale import DynamicScale, FixedScale

SHAPES = ((3,), (2, 2))
ONES = [torch.ones(shape) for shape in SHAPES]
KINDS = {
    "fused": {"fused": True},
    "device": {"fused": True},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_it_clips_as_pytorch_does(kind, clip, by_hand):
    runs = []
    for wrap in (True, False):
        given = parameters(*SHAPES)
        optimizer = torch.optim.AdamW(given, lr=0.1, **KINDS[kind])
        if wrap:
            decide = "device" if kind == "device" else "host"
            optimizer = wrapped(optimizer, clip_norm=clip, decide=decide)
        for factor in (1.0, torch.inf, 0.3, torch.nan, 3.0):
            if not wrap and not math.isfinite(factor):
                continue
            optimizer.zero_grad()
            backward(optimizer, given, [p.detach() for p in given], factor)
            if wrap and by_hand:
                optimizer.unscale_()
            if not wrap:
                torch.nn.utils.clip_grad_norm_(given, clip)
            optimizer.step()
        if wrap:
            assert int(optimizer.steps_skipped) == 2
        runs.append((snapshot(given, optimizer), bits([p.grad for p in given])))
    # A fused kernel divides by scale / factor, which rounds otherwise than multiplying.
    if kind == "fused" and clip == 0.5 and not by_hand:
        for ours, theirs in zip(runs[0][1], runs[1][1], strict=True):
            numbers = [np.frombuffer(stored, np.float32) for _, _, stored in (ours, theirs)]
            np.testing.assert_allclose(*numbers, rtol=3e-7)
    else:
        assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_non_finite_value_is_found_by_the_norm(kind):
    given = parameters(*SHAPES)
    inner = torch.optim.AdamW(given, **KINDS[kind])
    optimizer = wrapped(inner, clip_norm=1.0, decide="device" if kind == "device" else "host")
    fill(optimizer, given, ONES)
    optimizer.step()
    for value, place in itertools.product((torch.inf, -torch.inf, torch.nan), (0, 1)):
        before = snapshot(given, optimizer)
        spoiled = [g.clone() for g in ONES]
        spoiled[place].view(-1)[0] = value
        fill(optimizer, given, spoiled)
        optimizer.step()
        assert snapshot(given, optimizer) == before
    assert float(optimizer.loss_scale) == 2.0**9


@pytest.mark.parametrize("kind", ["fused", "single"])
def test_a_norm_may_overflow_though_every_number_is_finite(kind):
    # Of the scaled gradients, and of the unscaled ones as well.
    for size, scale in ((1e16, 2.0**20), (1e30, 8.0)):
        given = parameters(*SHAPES)
        optimizer = torch.optim.SGD(given, lr=1.0, **KINDS[kind])
        optimizer = wrapped(optimizer, clip_norm=1.0, initial_scale=scale)
        before = [p.detach().clone() for p in given]
        fill(optimizer, given, [g * size for g in ONES])
        optimizer.step()
        assert not optimizer.last_step_skipped
        for p, value in zip(given, before, strict=True):
            torch.testing.assert_close(p.detach(), value - 1 / math.sqrt(7), rtol=1e-6, atol=1e-6)


def test_a_gradient_that_unscaling_makes_infinite_is_skipped():
    given = parameters(*SHAPES)
    rule = DynamicScale(2.0**-20, min_scale=2.0**-30)
    optimizer = wrapped(torch.optim.SGD(given, lr=1.0), clip_norm=1.0, rule=rule)
    before = snapshot(given, optimizer)
    optimizer.scale_loss(torch.ones(()))
    for p in given:
        p.grad = torch.full_like(p, 1e34)
    optimizer.step()
    assert snapshot(given, optimizer) == before
    assert optimizer.last_step_skipped


def test_a_scale_that_is_no_power_of_two_and_one_that_is_fixed():
    for rule in (FixedScale(3.0), FixedScale(8.0), DynamicScale(3.0)):
        given = parameters(*SHAPES)
        optimizer = wrapped(torch.optim.SGD(given, lr=1.0), clip_norm=1.0, rule=rule)
        before = [p.detach().clone() for p in given]
        fill(optimizer, given, ONES)
        optimizer.step()
        for p, value in zip(given, before, strict=True):
            torch.testing.assert_close(p.detach(), value - 1 / math.sqrt(7), rtol=1e-6, atol=1e-6)
