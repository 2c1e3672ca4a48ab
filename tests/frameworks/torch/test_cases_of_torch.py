"""PyTorch's own cases for its scaler: all of its optimizers, in all of their settings.

The cases come with PyTorch. The expectation is the same training without a scale.
"""

import copy
import sys
import types
import unittest

import pytest
import torch

from lossscale.torch.grad_scaler import GradScaler

# PyTorch's helpers import it for a base class of tests that are not used here.
try:
    import expecttest  # noqa: F401
except ModuleNotFoundError:
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

from torch.testing._internal.common_cuda import _create_scaling_case
from torch.testing._internal.common_optimizers import (
    _get_optim_inputs_including_global_cliquey_kwargs as settings_of,
)
from torch.testing._internal.common_optimizers import optim_db

CASES = [
    # Every other one unscales by itself, and clips.
    pytest.param(
        info.optim_cls,
        given.kwargs,
        number % 2 == 1,
        id=f"{info.name}-{number}-{given.desc or 'plain'}",
    )
    for info in optim_db
    # LBFGS needs a closure, which a scaler cannot give it. SparseAdam wants sparse gradients.
    if not (info.step_requires_closure or info.only_supports_sparse_grads)
    for number, given in enumerate(
        settings_of("cpu", torch.float32, info, skip=("differentiable",))
    )
]


def for_matrices(cls):
    """Muon takes parameters of two dimensions only."""
    if cls.__name__ != "Muon":
        return cls
    return lambda parameters, **kwargs: cls([p for p in parameters if p.ndim == 2], **kwargs)


def train(scaler, net, optimizer, data, loss_of, skipped, unscales):
    """PyTorch's loop: the gradients of one batch are not finite."""
    clipped = [p for group in optimizer.param_groups for p in group["params"]]
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler and number == skipped:
            net[1].weight.grad.fill_(torch.inf)
        if scaler and unscales:
            scaler.unscale_(optimizer)
        if unscales and (scaler or number != skipped):
            torch.nn.utils.clip_grad_norm_(clipped, max_norm=1.0)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        elif number != skipped:
            optimizer.step()


@pytest.mark.parametrize(("cls", "kwargs", "unscales"), CASES)
def test_training_with_a_scale_is_training_without_one(cls, kwargs, unscales):
    torch.manual_seed(0)
    plain, scaled, optimizer, scaled_optimizer, data, loss_of, skipped = _create_scaling_case(
        "cpu", optimizer_ctor=for_matrices(cls), optimizer_kwargs=copy.deepcopy(kwargs)
    )
    scaler = GradScaler("cpu", init_scale=128.0, growth_interval=1)
    train(None, plain, optimizer, data, loss_of, skipped, unscales)
    train(scaler, scaled, scaled_optimizer, data, loss_of, skipped, unscales)
    # Up, up, down, up; and a skip is no step of the optimizer.
    assert scaler.get_scale() == 128 * 2 * 2 / 2 * 2
    for expected, got in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(expected, got)
    expected, got = optimizer.state_dict()["state"], scaled_optimizer.state_dict()["state"]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_all_optimizers_are_among_them():
    assert len({case.values[0] for case in CASES}) == len(optim_db) - 2
    assert sum(bool(case.values[1].get("fused")) for case in CASES) > 10
