"""torch.compile: one graph for forward and scale_loss, none anew while the scale moves."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from frameworks.torch.support import bits, scaler, watched, wrapper
from lossscale import DynamicScale

RULE = DynamicScale(2.0**3, growth_interval=1, max_scale=2.0**8)
X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture
def counter():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield CompileCounter()
    torch._dynamo.reset()


def made(inner=torch.optim.SGD, by="host"):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    flags = {"fused": True} if by == "device" else {}
    optimizer = inner(model.parameters(), lr=0.1, momentum=0.5, **flags)
    if by == "scaler":
        return model, scaler(optimizer, rule=RULE)
    return model, wrapper(optimizer, rule=RULE, decide=by)


def run(step, loop):
    """Seven moves of the scale, one of them down, and the scales in between."""
    scales = []
    for number in range(8):
        step(X * (torch.inf if number == 4 else 1.0))
        scales.append(float(loop.loss_scale))
    assert scales == [2.0**power for power in (4, 5, 6, 7, 6, 7, 8, 8)]
    assert int(watched(loop).steps_skipped) == 1


def training_step(model, loop, scaled_loss=None):
    """A step of a loop, of which `scaled_loss` may be compiled."""

    def step(x):
        loop.zero_grad()
        scale = scaled_loss or (lambda x: loop.scale_loss(model(x).square().sum()))
        scale(x).backward()
        loop.step()

    return step


def eager(inner=torch.optim.SGD):
    model, loop = made(inner)
    run(training_step(model, loop), loop)
    return list(model.parameters())


@pytest.mark.parametrize("by", ["host", "device", "scaler"])
def test_forward_and_scale_loss_are_one_graph_while_the_scale_moves(counter, by):
    model, loop = made(by=by)

    @torch.compile(backend=counter, fullgraph=True)
    def scaled_loss(x):
        return loop.scale_loss(model(x).square().sum())

    if by == "scaler":
        # D23: that of PyTorch is not compiled in a full graph.
        theirs = torch.compile(torch.amp.GradScaler("cpu").scale, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            theirs(X.sum())
        # The first call makes the scale, and is the only one that does.
        with torch._dynamo.config.patch(error_on_recompile=False):
            scaled_loss(X)
            scaled_loss(X)
    # The mark that compiled code sets arrives: the gradients are divided, and the scale moves.
    run(training_step(model, loop, scaled_loss), loop)
    assert counter.frame_count == (2 if by == "scaler" else 1)
    assert bits(list(model.parameters())) == bits(eager())


def test_a_scaled_loss_becomes_machine_code():
    import torch._inductor.config

    model, loop = made()
    scaled_loss = torch.compile(lambda x: loop.scale_loss(model(x).square().sum()))

    # Processes to compile in would each import PyTorch first.
    with torch._inductor.config.patch(compile_threads=1):
        run(training_step(model, loop, scaled_loss), loop)
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
    assert optimizer.iterations == 8
    assert bits(list(model.parameters())) == bits(eager())
