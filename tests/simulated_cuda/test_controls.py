"""The simulated device notices what a GPU would: each fault here is injected, and has to be found.

Beside each stands the program without the fault, in which nothing may be found.
"""

import pickle
import threading

import pytest
import torch
from torch import nn

from simulated_cuda import device

CUDA = "cuda"


@pytest.fixture(autouse=True)
def _nothing_before():
    device.taken()
    device.taken(of_races=True)
    yield
    torch.cuda.set_sync_debug_mode("default")


def ones(*shape, at=CUDA):
    return torch.ones(shape, device=at)


def test_a_pickle_keeps_device_and_numbers():
    copied = pickle.loads(pickle.dumps(nn.Parameter(ones(3, at="cuda:1"))))
    assert (str(copied.device), copied.tolist()) == ("cuda:1", [1.0] * 3)


WAITS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if x[0] else 2,
    "tolist": lambda x: x.tolist(),
    "a copy to the host": lambda x: x.cpu(),
    "copy_ to the host": lambda x: torch.empty(4).copy_(x),
    "a copy from the host": lambda x: x.copy_(torch.ones(4)),
    "a tensor made of numbers": lambda x: torch.tensor([1.0], device=CUDA),
    "a mask": lambda x: x[x > 0],
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "a stream": lambda x: torch.cuda.current_stream().synchronize(),
    "a device": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_is_counted_and_an_error_if_it_is_forbidden_or_a_graph_is_captured(wait):
    x = ones(4)
    device.taken()
    wait(x)
    # `tolist` and masks wait once or more.
    assert device.taken()
    words = "not permitted when stream is capturing"
    with pytest.raises(RuntimeError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wait(x)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        wait(x)


def test_what_does_not_wait_is_not_counted():
    x = ones(4)
    torch.cuda.set_sync_debug_mode("error")
    parameter = nn.Parameter(x.clone())
    (parameter * 2).sum().backward()
    for flags in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        torch.optim.AdamW([parameter], **flags).step()
    x.to("cpu", non_blocking=True)
    x.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    torch.where(x > 0, x, 0).norm()
    x.to("cuda:1")
    assert device.taken() == []


DEVICES_MIX = {
    "a tensor of the host": lambda x: x + torch.ones(4),
    "another GPU": lambda x: x + ones(4, at="cuda:1"),
    "a number of another GPU": lambda x: x + ones(at="cuda:1"),
    "in place": lambda x: x.add_(ones(4, at="cuda:1")),
    "an output": lambda x: torch.add(x, 1, out=torch.empty(4)),
    "a matrix": lambda x: nn.functional.linear(x, torch.ones(4, 4)),
    "in a list": lambda x: torch._foreach_add([x, x], [x, torch.ones(4)]),
    "a number of the host by its address": lambda x: torch._foreach_mul_([x], torch.ones(())),
    "the scale of a scaler": lambda x: torch._amp_foreach_non_finite_check_and_unscale_(
        [x], ones(), torch.ones(())
    ),
}


@pytest.mark.parametrize("kind", DEVICES_MIX)
def test_two_devices_in_one_operator_are_an_error(kind):
    with pytest.raises(RuntimeError, match=r"two devices, (cpu|cuda:0) and cuda:"):
        DEVICES_MIX[kind](ones(4))
    with pytest.raises(TypeError, match="can't convert cuda"):
        ones(4).numpy()
    # Numbers of the host may take part.
    assert (ones(2) * torch.tensor(3.0)).tolist() == [3.0, 3.0]
    torch._foreach_mul_([ones(2)], [2.0])


def on_two_streams(waits):
    """The races of operators on two streams that wait for each other, or do not."""
    first, second = torch.cuda.current_stream(), torch.cuda.Stream()
    x = ones(4)
    if "producer" in waits:
        second.wait_stream(first)
    with torch.cuda.stream(second):
        x.mul_(2)
    if "event" in waits:
        first.wait_event(second.record_event())
    elif "host" in waits:
        second.synchronize()
    x.add_(1)
    return device.taken(of_races=True)


def test_what_uses_a_tensor_without_waiting_for_another_stream_is_a_race():
    assert on_two_streams(("producer", "event")) == []
    assert on_two_streams(("producer", "host")) == []
    [*_, found] = on_two_streams(("producer",))
    assert found.startswith("add_ on stream 0:0 uses the unfinished result of mul_ on stream 0:")
    assert "mul_ on stream" in on_two_streams(("event",))[0]
    x, side = ones(4).requires_grad_(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = (x * 2).to("cuda:1").sum()
    torch.cuda.current_stream().wait_stream(side)
    # Autograd waits between streams and devices.
    y.backward()
    assert (x.grad * 1).tolist() == [2.0] * 4
    assert device.taken(of_races=True) == []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.detach() + 1
    x.detach().zero_()
    assert "zero_ on stream 0:0 overwrites what is read by add" in device.taken(of_races=True)[0]


def test_a_state_that_hooks_of_two_devices_share_is_used_by_two_threads_at_once():
    parameters = [ones(4, at=f"cuda:{n}").requires_grad_() for n in range(2)]
    # Both hooks have to be there at the same time.
    both, threads = threading.Barrier(2, timeout=30), []

    def hook(gradient):
        both.wait()
        threads.append(threading.current_thread())

    for parameter in parameters:
        parameter.register_hook(hook)
    torch.autograd.backward([(parameter * 1).sum() for parameter in parameters])
    assert len(set(threads)) == 2
    assert threading.main_thread() not in threads
