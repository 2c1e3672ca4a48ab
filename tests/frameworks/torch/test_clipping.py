"""`clip_norm`: what `torch.nn.utils.clip_grad_norm_` does, and the verdict of the same norm."""

import math

import numpy as np
import pytest
import torch

from frameworks.torch.support import (
    KINDS,
    ONES,
    SHAPES,
    backward,
    bits,
    parameters,
    snapshot,
    step,
    wrapped,
)
from lossscale import DynamicScale, FixedScale, LossScaleWarning

pytestmark = pytest.mark.usefixtures("on_the_device")
KINDS = {**KINDS, "device": {"fused": True}}


def clipping(kind, clip=1.0):
    """Parameters, and an AdamW of a kind that clips."""
    given = parameters(*SHAPES)
    inner = torch.optim.AdamW(given, lr=0.1, **KINDS[kind])
    return given, wrapped(inner, clip_norm=clip, decide="device" if kind == "device" else "host")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["scale_loss", "unscale_", "backward"])
@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_it_clips_as_pytorch_does(kind, clip, way):
    given, optimizer = clipping(kind, clip)
    plain = parameters(*SHAPES)
    bare = torch.optim.AdamW(plain, lr=0.1, **KINDS[kind])
    for factor in (1.0, torch.inf, 0.3, torch.nan, 3.0):
        optimizer.zero_grad()
        if way == "backward":
            optimizer.backward(sum((p * (p.detach() * factor)).sum() for p in given))
        else:
            backward(optimizer, given, [p.detach() for p in given], factor)
        if way == "unscale_":
            optimizer.unscale_()
        optimizer.step()
        if math.isfinite(factor):
            bare.zero_grad()
            backward(bare, plain, [p.detach() for p in plain], factor)
            torch.nn.utils.clip_grad_norm_(plain, clip)
            bare.step()
    assert int(optimizer.steps_skipped) == 2
    ours, theirs = bits([p.grad for p in given]), bits([p.grad for p in plain])
    # A fused kernel divides by scale / factor, which rounds otherwise than multiplying.
    if kind == "fused" and clip == 0.5 and way != "unscale_":
        for (_, _, left), (_, _, right) in zip(ours, theirs, strict=True):
            numbers = [np.frombuffer(stored, np.float32) for stored in (left, right)]
            # A GPU rounds products and sums once, so that weights and then gradients differ.
            rtol = 3e-7 if given[0].device.type == "cpu" else 3e-6
            np.testing.assert_allclose(*numbers, rtol=rtol)
    else:
        assert (snapshot(given, optimizer), ours) == (snapshot(plain, bare), theirs)


ANY_SCALE = {
    # Of the scaled gradients the norm overflows, or of the unscaled ones as well.
    "overflows scaled": (1e16, {"initial_scale": 2.0**20}),
    "overflows unscaled": (1e30, {"initial_scale": 8.0}),
    "fixed": (1.0, {"rule": FixedScale(8.0)}),
    "fixed, no power of two": (1.0, {"rule": FixedScale(3.0)}),
    "no power of two": (1.0, {"rule": DynamicScale(3.0)}),
}


@pytest.mark.parametrize("kind", ["fused", "single"])
@pytest.mark.parametrize("case", ANY_SCALE)
def test_finite_gradients_are_clipped_to_the_norm_at_any_scale(case, kind):
    size, settings = ANY_SCALE[case]
    given = parameters(*SHAPES)
    optimizer = wrapped(torch.optim.SGD(given, lr=1.0, **KINDS[kind]), clip_norm=1.0, **settings)
    before = [p.detach().clone() for p in given]
    step(optimizer, given, [g * size for g in ONES])
    assert not optimizer.last_step_skipped
    expected = [value - 1 / math.sqrt(7) for value in before]
    torch.testing.assert_close([p.detach() for p in given], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("by_hand", [False, True])
def test_float64_is_clipped_to_its_own_digits(cls, by_hand):
    found = []
    for wraps in (True, False):
        given = [torch.tensor([3.0, 4.0, 12.0], dtype=torch.float64, requires_grad=True)]
        optimizer = cls(given, lr=0.1, fused=True)
        optimizer = wrapped(optimizer, clip_norm=1.0) if wraps else optimizer
        backward(optimizer, given, [given[0].detach()])
        if not wraps:
            torch.nn.utils.clip_grad_norm_(given, 1.0)
        elif by_hand:
            optimizer.unscale_()
        optimizer.step()
        found.append([given[0].grad, given[0].detach()])
    torch.testing.assert_close(*found, rtol=4 * torch.finfo(torch.float64).eps, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_of_a_loss_that_nobody_scaled_are_clipped_and_move_no_scale(kind, by_hand):
    given, optimizer = clipping(kind)
    plain = parameters(*SHAPES)
    bare = torch.optim.AdamW(plain, lr=0.1, **KINDS[kind])
    for weights in (given, plain):
        backward(None, weights, ONES)
    torch.nn.utils.clip_grad_norm_(plain, 1.0)
    bare.step()
    with pytest.warns(LossScaleWarning, match="scaled no loss"):
        (optimizer.unscale_ if by_hand else optimizer.step)()
    if by_hand:
        optimizer.step()
    torch.testing.assert_close([p.grad for p in given], [p.grad for p in plain])
    assert snapshot(given, optimizer) == snapshot(plain, bare)
    assert (int(optimizer.iterations), int(optimizer.dynamic_counter)) == (1, 0)


def test_a_sparse_gradient_without_rows_has_no_norm():
    table = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = wrapped(torch.optim.SGD(table.parameters(), lr=0.1), clip_norm=1.0)
    optimizer.scale_loss(table(torch.zeros(0, dtype=torch.int64)).sum()).backward()
    optimizer.step()
    assert (optimizer.iterations, optimizer.steps_skipped) == (1, 0)
