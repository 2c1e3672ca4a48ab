"""torch.compile: one graph for forward and scale_loss, none anew while the scale moves."""

import itertools
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from frameworks.torch.support import Reads, bits, wrapped
from lossscale import DynamicScale, FixedScale

RULE = DynamicScale(2.0**3, growth_interval=1, max_scale=2.0**8)
X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture
def counter():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield CompileCounter()
    torch._dynamo.reset()


def made(inner=torch.optim.SGD, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    flags = {"fused": True} if settings.get("decide") == "device" else {}
    optimizer = inner(model.parameters(), lr=0.1, momentum=0.5, **flags)
    return model, wrapped(optimizer, rule=RULE, **settings)


def run(step, optimizer):
    """Seven moves of the scale, one of them down, and the scales in between."""
    scales = [float(optimizer.loss_scale)]
    for number in range(8):
        step(X * (torch.inf if number == 4 else 1.0))
        scales.append(float(optimizer.loss_scale))
    assert scales == [2.0**power for power in (3, 4, 5, 6, 7, 6, 7, 8, 8)]
    assert sum(a != b for a, b in itertools.pairwise(scales)) == 7
    assert int(optimizer.steps_skipped) == 1
    assert int(optimizer.iterations) == 8


def training_step(model, optimizer, scaled_loss=None):
    """A step of a loop, of which `scaled_loss` may be compiled."""

    def step(x):
        optimizer.zero_grad()
        scale = scaled_loss or (lambda x: optimizer.scale_loss(model(x).square().sum()))
        scale(x).backward()
        optimizer.step()

    return step


def eager(inner=torch.optim.SGD):
    model, optimizer = made(inner)
    run(training_step(model, optimizer), optimizer)
    return list(model.parameters())


@pytest.mark.parametrize("decide", ["host", "device"])
def test_forward_and_scale_loss_are_one_graph_while_the_scale_moves(counter, decide):
    model, optimizer = made(decide=decide)

    @torch.compile(backend=counter, fullgraph=True)
    def scaled_loss(x):
        return optimizer.scale_loss(model(x).square().sum())

    # The mark that compiled code sets arrives: the gradients are divided, and the scale moves.
    run(training_step(model, optimizer, scaled_loss), optimizer)
    assert counter.frame_count == 1
    assert bits(list(model.parameters())) == bits(eager())


def test_a_scaled_loss_becomes_machine_code():
    import torch._inductor.config

    model, optimizer = made()
    scaled_loss = torch.compile(lambda x: optimizer.scale_loss(model(x).square().sum()))

    # Processes to compile in would each import PyTorch first.
    with torch._inductor.config.patch(compile_threads=1):
        run(training_step(model, optimizer, scaled_loss), optimizer)
    # Its sums may round otherwise.
    torch.testing.assert_close(list(model.parameters()), eager())


@pytest.mark.parametrize("unscales", [False, True])
def test_a_whole_step_breaks_where_pytorch_does_and_is_not_compiled_anew(counter, unscales):
    model, optimizer = made()

    @torch.compile(backend=counter)
    def step(x):
        optimizer.zero_grad()
        optimizer.scale_loss(model(x).square().sum()).backward()
        if unscales:
            optimizer.unscale_()
        optimizer.step()

    run(step, optimizer)
    assert counter.frame_count == 1
    assert bits(list(model.parameters())) == bits(eager())


def without_momentum(parameters, lr, momentum):
    # The first step with momentum allocates it, and PyTorch compiles the second one anew.
    return torch.optim.SGD(parameters, lr=lr, foreach=True)


def test_the_optimizer_inside_may_be_compiled(counter):
    model, optimizer = made(without_momentum)
    inner = optimizer.inner_optimizer
    inner.step = torch.compile(inner.step, backend=counter)
    with warnings.catch_warnings():
        # Raised by Dynamo itself while it traces an optimizer.
        warnings.filterwarnings("ignore", "`torch.jit.script_method", DeprecationWarning)
        run(training_step(model, optimizer), optimizer)
    assert counter.frame_count == 1
    assert bits(list(model.parameters())) == bits(eager(without_momentum))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1),
        ({"clip_norm": 1.0}, 1),
        ({"decide": "device"}, 0),
        ({"decide": "device", "clip_norm": 1.0}, 0),
        ({"rule": FixedScale(8.0)}, 0),
    ],
    ids=str,
)
def test_a_step_waits_for_one_number_or_for_none(settings, expected):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = wrapped(inner, **{"rule": RULE, **settings})
    for number in range(4):
        optimizer.zero_grad()
        optimizer.scale_loss(model(X).square().sum()).backward()
        with Reads() as reads:
            optimizer.step()
        # A parameter's first step is decided by the host.
        assert number == 0 or reads.count == expected
