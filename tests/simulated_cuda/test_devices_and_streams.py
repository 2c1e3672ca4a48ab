"""Several devices and streams: the plain optimizer's numbers, no race, no mixed device."""

import pytest
import torch
from torch import nn

from benchmarks.frameworks.torch_native import FLAGS, SCALERS, WAYS, Way
from simulated_cuda import device

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")

STEPS, OVERFLOW = 5, 2


def ways(fused=True):
    """The ways that an optimizer can have."""
    return [name for name in WAYS if fused or name != "device"]


def ones(at="cuda:0"):
    return nn.Parameter(torch.ones(4, device=at))


def numbers(parameters):
    return [each.tolist() for each in parameters]


def numbers_and_races(run, way):
    """Runs a program, and returns its numbers and its races."""
    device.taken(of_races=True)
    return run(way), device.taken(of_races=True)


def trained_on_two(flags, cls, order):
    """A program with a parameter on each GPU, in whose third step gradients overflow."""

    def run(name):
        first, second = order
        p, q = ones(first), ones(second)
        way = Way(name, [cls([p, q], lr=0.1, **flags)], interval=2, scale=8.0)
        for number in range(STEPS):
            way.zero_grad()
            hidden = (p * 2).to(second)
            if number == OVERFLOW:
                if name in ("bare", "fixed"):
                    continue
                hidden = hidden * torch.inf
            way.backward((hidden * q).sum())
            way.step()
        return numbers((p, q))

    return run


@two_gpus
@pytest.mark.parametrize("order", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")], ids="01")
@pytest.mark.parametrize("flags", FLAGS)
def test_a_model_on_two_devices(flags, order):
    for cls, more in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
        run = trained_on_two(FLAGS[flags] | more, cls, order)
        expected = run("bare")
        for name in ways(flags == "fused"):
            found, races = numbers_and_races(run, name)
            # PyTorch's own scaler applies the overflow of one GPU on the other if fused.
            if name != "PyTorch's scaler" or flags != "fused":
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
            assert races == [], name


def way_of(name, *parameters, **flags):
    inner = torch.optim.AdamW(parameters, lr=0.1, **(flags or {"fused": True}))
    return Way(name, [inner], interval=2, scale=8.0)


def train(way, loss_fn, steps=STEPS):
    for _ in range(steps):
        way.zero_grad()
        way.backward(loss_fn())
        way.step()


def on_a_side_stream(name):
    """A whole step on another stream."""
    p, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(way_of(name, p), lambda: (p * 2).sum())
    torch.cuda.current_stream().wait_stream(side)
    return p.tolist()


def forward_pass_on_a_side_stream(name):
    """Losses of two micro-batches come from another stream, and their backward passes, too."""
    p, side = ones(), torch.cuda.Stream()
    way = way_of(name, p)
    for _ in range(STEPS):
        way.zero_grad()
        for _ in range(2):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = way.scaled((p * 2).sum())
            if name == "backward":
                torch.cuda.current_stream().wait_stream(side)
                way.backward(loss)
            else:
                loss.backward()
        way.step()
    return p.tolist()


def on_two_side_streams_in_turn(name):
    """Each step on the other of two streams."""
    p = ones()
    way, pair = way_of(name, p), [torch.cuda.Stream(), torch.cuda.Stream()]
    for each in pair:
        each.wait_stream(torch.cuda.current_stream())
    for number in range(STEPS):
        now, other = pair[number % 2], pair[1 - number % 2]
        now.wait_stream(other)
        with torch.cuda.stream(now):
            train(way, lambda: (p * 2).sum(), 1)
    torch.cuda.synchronize()
    return p.tolist()


def loss_on_the_host(name):
    p = ones()
    train(way_of(name, p), lambda: (p * 2).sum().cpu())
    return p.tolist()


def parameters_on_the_host_too(name):
    p, q = ones(), ones("cpu")
    train(way_of(name, p, q, foreach=False), lambda: (p * 2).sum().cpu() + (q * 3).sum())
    return [p.tolist(), q.tolist()]


@pytest.mark.parametrize(
    "run",
    [
        on_a_side_stream,
        forward_pass_on_a_side_stream,
        on_two_side_streams_in_turn,
        loss_on_the_host,
        parameters_on_the_host_too,
    ],
)
def test_streams_and_a_part_of_the_program_on_the_host(run):
    expected = run("bare")
    for name in ways(run is not parameters_on_the_host_too):
        found, races = numbers_and_races(run, name)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert races == [], name


@pytest.mark.parametrize("name", WAYS)
def test_the_default_device_is_not_asked_for(name):
    """A step on a GPU while tensors are made on the host, or on another GPU."""
    for default in ("cpu", "cuda:1", None):
        p = ones()
        way = Way(name, [torch.optim.SGD([p], lr=0.5, fused=True)], interval=2, scale=8.0)
        torch.set_default_device(default)
        try:
            for _ in range(2):
                way.zero_grad()
                way.backward((p * 1).sum())
                way.step()
        finally:
            torch.set_default_device(None)
        assert p.tolist() == [0.0] * 4
        assert name not in SCALERS or way.scales() == [2 * 8.0]
