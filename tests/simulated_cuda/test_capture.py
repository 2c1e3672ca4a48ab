"""Whole steps in a CUDA graph: replayed, they give the numbers of eager steps, bit for bit."""

import itertools

import pytest
import torch
from torch import nn

from benchmarks.frameworks.torch_native import SCALERS, Way
from lossscale import FixedScale
from lossscale.torch import LossScaleOptimizer, MasterWeights, guard
from simulated_cuda.device import taken

# Overflows of the steps, of which the first three are eager.
STEPS, OVERFLOWS = 10, (4, 6)


def trained(name, captured, to_none=True, clip_norm=None, micro_batches=1, verb=False):
    """The parameters and the scale after the steps; `verb` is `backward` with this way."""
    p = nn.Parameter(torch.ones(4, device="cuda"))
    x = torch.ones(4, device="cuda")
    inner = torch.optim.AdamW([p], lr=0.1, fused=True, capturable=True)
    way = Way(name, [inner], clip_norm, interval=2, scale=8.0)
    if name == "drop-in":
        # What it counts is that of each replay.
        scheduler = guard(torch.optim.lr_scheduler.StepLR(inner, 1000), way.scaler)

    def step():
        way.zero_grad(to_none)
        for _ in range(micro_batches):
            loss = (p * x).sum()
            way.wrappers[0].backward(loss) if verb else way.backward(loss)
        way.step()

    def give(number):
        x.fill_(torch.inf if number in OVERFLOWS else 0.1 * number + 0.1)

    for number in range(3):
        give(number)
        step()
    graph, shown = torch.cuda.CUDAGraph(), []
    if captured:
        give(0)
        with torch.cuda.graph(graph):
            step()
    for number in range(3, STEPS):
        give(number)
        graph.replay() if captured else step()
        if name == "drop-in":
            scaler = way.scaler
            shown.append((scaler.last_step_skipped, scaler.steps_skipped, scheduler._steps()))
    return p.tolist(), way.scales(), shown


CASES = list(itertools.product((True, False), (None, 1.0), (1, 2), (False, True)))


@pytest.mark.parametrize(("to_none", "clip_norm", "micro_batches", "verb"), CASES)
def test_a_step_decided_on_the_device(to_none, clip_norm, micro_batches, verb):
    settings = (to_none, clip_norm, micro_batches, verb)
    captured = trained("device", True, *settings)
    assert captured == trained("device", False, *settings)
    assert captured[1] == [2.0**4]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("to_none", [True, False])
def test_the_drop_in_is_captured_as_pytorchs_scaler(to_none, micro_batches, clip_norm):
    settings = (to_none, clip_norm, micro_batches)
    ends = [[trained(n, captured, *settings) for captured in (True, False)] for n in SCALERS]
    assert [captured for captured, _ in ends] == [eager for _, eager in ends]
    assert ends[0][0][:2] == ends[1][0][:2]


@pytest.mark.parametrize("verb", ["backward", "scale_loss", *SCALERS])
def test_float32_masters_of_float16_parameters(verb):
    """What is written into a parameter between replays is adopted, too."""

    def run(captured):
        p = nn.Parameter(torch.ones(4, device="cuda", dtype=torch.float16))
        x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
        adamw = torch.optim.AdamW([p], lr=1e-4, fused=True, capturable=True)
        inner = MasterWeights(adamw)
        way = Way("device" if verb in ("backward", "scale_loss") else verb, [inner], scale=8.0)

        def step():
            way.zero_grad()
            loss = (p.float() * x).sum()
            way.wrappers[0].backward(loss) if verb == "backward" else way.backward(loss)
            way.step()

        for number in range(STEPS):
            x.fill_(torch.inf if number in OVERFLOWS else 0.1 * number + 0.1)
            if number == 5:
                p.data[0] = 0.25
            if number == 3 and captured:
                with torch.cuda.graph(graph):
                    step()
            graph.replay() if number >= 3 and captured else step()
        (master,) = inner.masters.values()
        return p.tolist(), master.tolist(), way.scales()

    parameter, master, scales = run(True)
    assert (parameter, master, scales) == run(False)
    assert scales == [2.0]
    assert parameter[1] != 1.0 != master[1] != parameter[1]
    assert 0.249 < parameter[0] < 0.25


@pytest.mark.parametrize("name", ["backward", "scale_loss"])
def test_a_decision_of_the_host_cannot_be_captured_and_says_so(name):
    with pytest.raises(RuntimeError, match="cannot run while a CUDA graph is captured"):
        trained(name, True)


@pytest.mark.parametrize("captured", [False, True])
def test_buffers_follow_the_steps_that_the_device_applies(captured):
    """A captured step saves and restores them as it is replayed, and nothing waits."""

    def run(overflows, given, captured):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to("cuda")
        x, graph = torch.ones(4, 2, device="cuda"), torch.cuda.CUDAGraph()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        optimizer = LossScaleOptimizer(inner, rule=FixedScale(8.0, True), decide="device")
        guard(model, optimizer)

        def step():
            optimizer.zero_grad()
            optimizer.backward(model(x).square().sum())
            optimizer.step()

        waits = []
        for number in given:
            x.copy_(torch.arange(8.0).reshape(4, 2).sin().add(number))
            if number in overflows:
                x[0, 0] = torch.inf
            if number == 3 and captured:
                with torch.cuda.graph(graph):
                    step()
            taken()
            graph.replay() if number >= 3 and captured else step()
            waits += taken()
        return [t.tolist() for t in (*model.parameters(), *model.buffers())], waits

    found, waits = run(OVERFLOWS, range(STEPS), captured)
    assert waits == []
    assert found == run((), [n for n in range(STEPS) if n not in OVERFLOWS], False)[0]
