"""What runs in autograd's device threads: hooks, errors of hooks, several losses in one pass."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lossscale.errors import GradientsError
from lossscale.torch import LossScaleOptimizer


def ones(at="cuda"):
    return nn.Parameter(torch.ones(4, device=at))


def wrapped(*parameters, scale=8.0, lr=0.5):
    return LossScaleOptimizer(torch.optim.SGD(parameters, lr=lr), initial_scale=scale)


@pytest.mark.parametrize("create_graph", [False, True])
def test_hooks_of_parameters_run_in_a_device_thread_with_scaled_gradients(create_graph):
    p, seen = ones(), []
    p.register_hook(
        lambda gradient: seen.append(
            (threading.current_thread(), torch.is_grad_enabled(), gradient.tolist())
        )
    )
    optimizer = wrapped(p)
    with warnings.catch_warnings():
        # PyTorch's, about graphs of gradients.
        warnings.simplefilter("ignore", UserWarning)
        optimizer.scale_loss((p * p).sum()).backward(create_graph=create_graph)
    optimizer.step()
    [(thread, mode, gradient)] = seen
    assert thread is not threading.main_thread()
    assert (mode, gradient) == (create_graph, [16.0] * 4)
    assert p.tolist() == [0.0] * 4


def test_an_error_in_a_device_thread_arrives_as_ours():
    p = ones()
    optimizer = wrapped(p)
    scaled = optimizer.scale_loss((p * 1).sum())
    with pytest.raises(GradientsError):
        optimizer.backward(scaled * 1)
    optimizer.zero_grad()
    optimizer.scale_loss((p * 1).sum()).backward()
    optimizer.step()
    assert p.tolist() == [0.5] * 4


def test_reentrant_checkpointing():
    p, x = ones(), torch.ones(4, device="cuda", requires_grad=True)
    optimizer = wrapped(p)
    optimizer.scale_loss(checkpoint(lambda v: v * p, x, use_reentrant=True).sum()).backward()
    optimizer.step()
    assert p.tolist() == [0.5] * 4


def test_two_wrappers_on_two_devices_in_one_pass():
    p, q = ones("cuda:0"), ones("cuda:1")
    first, second = wrapped(p), wrapped(q, scale=2.0**10)
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        losses = [first.scale_loss((p * 1).sum()), second.scale_loss((q * 1).sum())]
        torch.autograd.backward(losses)
        first.step()
        second.step()
    assert p.tolist() == q.tolist() == [0.0] * 4
