"""What runs in autograd's device threads: hooks, errors of hooks, several losses in one pass."""

import functools
import sys
import threading
import time
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lossscale
from lossscale.errors import GradientsError
from lossscale.torch import LossScaleOptimizer
from simulated_cuda.test_devices_and_streams import ones, two_gpus


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
    # PyTorch's, about graphs of gradients.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        optimizer.scale_loss((p * p).sum()).backward(create_graph=create_graph)
    optimizer.step()
    [(thread, mode, gradient)] = seen
    assert thread is not threading.main_thread()
    assert (mode, gradient) == (create_graph, [16.0] * 4)
    assert p.tolist() == [0.0] * 4


def test_an_error_in_a_device_thread_arrives_as_ours_and_checkpointing_goes_on():
    p, x = ones(), torch.ones(4, device="cuda", requires_grad=True)
    optimizer = wrapped(p)
    scaled = optimizer.scale_loss((p * 1).sum())
    with pytest.raises(GradientsError):
        optimizer.backward(scaled * 1)
    optimizer.zero_grad()
    optimizer.scale_loss(checkpoint(lambda v: v * p, x, use_reentrant=True).sum()).backward()
    optimizer.step()
    assert p.tolist() == [0.5] * 4


@two_gpus
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


class SlowThreads(TorchDispatchMode):
    """Pauses a multiplication in a device thread, so that another thread gets in between."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mul" in func.__name__ and threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        return func(*args, **(kwargs or {}))


@two_gpus
@pytest.mark.parametrize("there", [False, True], ids=["no gradients yet", "gradients are there"])
@pytest.mark.parametrize("how", ["one sum", "several losses"])
@pytest.mark.parametrize("way", ["wrapper", "drop-in"])
def test_scaled_losses_on_two_devices_in_one_pass_are_multiplied_once(way, how, there):
    for _ in range(3):
        p, q = ones("cuda:0"), ones("cuda:1")
        inner = torch.optim.SGD([p, q], lr=0.5)
        if way == "wrapper":
            optimizer = LossScaleOptimizer(inner, initial_scale=8)
            scale, unscale = optimizer.scale_loss, optimizer.unscale_
        else:
            scaler = lossscale.torch.GradScaler("cuda", init_scale=8.0)
            scale, unscale = scaler.scale, functools.partial(scaler.unscale_, inner)
        if there:
            # Unscaled in the wrapper; the drop-in expects scaled ones.
            first = (p * 1).sum() + (q * 1).sum().to("cuda:0")
            optimizer.backward(first) if way == "wrapper" else scale(first).backward()
        losses = [scale((p * 1).sum()), scale((q * 1).sum())]
        with SlowThreads():
            if how == "one sum":
                (losses[0] + losses[1].to("cuda:0")).backward()
            else:
                torch.autograd.backward(losses)
        unscale()
        assert p.grad.tolist() == q.grad.tolist() == [1.0 + there] * 4


def test_optimizers_are_made_in_one_thread_while_another_trains():
    # On the host each of them is made and stepped faster, so that they meet more often.
    p, failed, stop = ones("cpu"), [], threading.Event()
    optimizer = wrapped(p, lr=0.0)

    def train():
        try:
            while not stop.is_set():
                optimizer.zero_grad()
                optimizer.scale_loss((p * 1).sum()).backward()
                optimizer.step()
        except RuntimeError as error:
            failed.append(error)
            stop.set()

    def search():
        kept = []
        for _ in range(1000):
            if stop.is_set():
                break
            kept = [*kept[-50:], wrapped(ones("cpu"))]
        stop.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=each) for each in (train, search)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert failed == []
