"""Training on one device, a processor or the GPU that `tools.gpu` asks for.

The oracle is PyTorch's plain optimizer on the CPU, which is given the gradients of the steps
that are finite and no others.
"""

import os

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lossscale
from benchmarks.frameworks.torch_native import Way
from frameworks.torch.support import DEVICE, KINDS, bits, train_step
from lossscale import DynamicScale

ON_A_GPU = DEVICE != "cpu"

STEPS, OVERFLOWS = 8, (2, 5)
# What the rule does in these steps: two finite ones double the scale, an overflow halves it.
SCALES = [2.0**power for power in (10, 11, 10, 10, 11, 10, 10, 11)]
INNER = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
SHAPES = ((3,), (33, 65), (4097,))


def arrays(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters_on(device):
    return [nn.Parameter(value.to(device)) for value in arrays(0)]


def steps(run, parameters, numbers=range(STEPS)):
    """Steps with given gradients, times the scale if there is one; an overflow is one infinity."""
    for number in numbers:
        factor = run.scaled(torch.ones((), device=parameters[0].device))
        for parameter, gradient in zip(parameters, arrays(number + 1), strict=True):
            parameter.grad = gradient.to(parameter.device) * factor
        if number in OVERFLOWS:
            parameters[1].grad[0, 7] = torch.inf
        run.step()
        yield run


def assert_like_the_plain(parameters, name, device=DEVICE):
    """As after the finite steps alone, of the plain optimizer on the CPU."""
    (cls, settings), plain = INNER[name], parameters_on("cpu")
    good = [number for number in range(STEPS) if number not in OVERFLOWS]
    list(steps(Way("bare", [cls(plain, **settings, foreach=False)]), plain, good))
    for found, expected in zip(parameters, plain, strict=True):
        assert found.device.type == torch.device(device).type
        # Fused kernels of a GPU may contract a product and a sum, which the plain one rounds apart.
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)


WAYS = ("PyTorch's scaler", "drop-in", "scale_loss", "device")


def way_of(name, inner):
    return Way(name, [inner], interval=2, scale=SCALES[0], device=DEVICE)


@pytest.mark.parametrize("flags", KINDS)
@pytest.mark.parametrize("name", INNER)
def test_each_way_ends_as_the_plain_optimizer_and_the_drop_in_as_pytorchs_scaler(name, flags):
    cls, settings = INNER[name]
    ends = {}
    for way in WAYS:
        if way == "device" and flags != "fused":
            # It does not skip by itself.
            continue
        parameters = parameters_on(DEVICE)
        run = way_of(way, cls(parameters, **settings, **KINDS[flags]))
        assert [each.scales() for each in steps(run, parameters)] == [[scale] for scale in SCALES]
        assert all(int(each.steps_skipped) == len(OVERFLOWS) for each in run.wrappers)
        assert_like_the_plain(parameters, name)
        ends[way] = bits([parameter.detach().cpu() for parameter in parameters])
    assert ends["drop-in"] == ends["PyTorch's scaler"]


def small_model():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers).to(DEVICE)


def batches(count=30):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 64, 16, generator=generator).to(DEVICE)
    return list(zip(x, x[..., :4].sin(), strict=True))


def autocast_loss(model, x, y):
    with torch.autocast(DEVICE, torch.float16):
        output = model(x)
    return nn.functional.mse_loss(output.float(), y)


@pytest.mark.parametrize("way", ["backward", "scale_loss"])
def test_float16_training_is_that_of_pytorchs_scaler_bit_for_bit(way):
    def losses(way):
        model, found = small_model(), []
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        run = Way(way, [inner], scale=2.0**16, device=DEVICE)
        for x, y in batches():
            run.zero_grad()
            run.backward(loss := autocast_loss(model, x, y))
            run.step()
            found.append(float(loss.detach()))
        return found

    ours = losses(way)
    assert ours == losses("PyTorch's scaler")
    assert ours[-1] < ours[0] / 2


def test_state_of_one_device_goes_on_on_the_other():
    parameters, on_the_cpu = parameters_on(DEVICE), parameters_on("cpu")
    run, other = (
        way_of("scale_loss", torch.optim.Adam(given, lr=0.01)) for given in (parameters, on_the_cpu)
    )
    list(steps(run, parameters, range(4)))
    with torch.no_grad():
        for to, of in zip(on_the_cpu, parameters, strict=True):
            to.copy_(of)
    [resumed] = other.wrappers
    resumed.load_state_dict(run.wrappers[0].state_dict())
    list(steps(other, on_the_cpu, range(4, STEPS)))
    assert (other.scales(), int(resumed.steps_skipped)) == (SCALES[-1:], len(OVERFLOWS))
    assert_like_the_plain(on_the_cpu, "adam", "cpu")


def test_a_compiled_forward_pass():
    model = small_model()
    optimizer = lossscale.LossScaleOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    # Inductor on a processor needs a C++ compiler, and takes minutes.
    @torch.compile(backend="inductor" if ON_A_GPU else "eager", fullgraph=True)
    def scaled_loss(x, y):
        loss = autocast_loss(model, x, y)
        return optimizer.scale_loss(loss), loss

    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        scaled, loss = scaled_loss(x, y)
        scaled.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


def test_a_diagnosis_and_a_monitor(tmp_path):
    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]).float(), batch[1].to(torch.float32))

    report = lossscale.torch.diagnose(small_model(), loss_fn, batches(3))
    assert report.verdict in ("not needed", "needed")

    model = small_model()
    optimizer = lossscale.LossScaleOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    history = tmp_path / "run.jsonl"
    with lossscale.torch.Monitor(optimizer, model, history) as monitor:
        for x, y in batches():
            train_step(optimizer, loss := autocast_loss(model, x, y))
            monitor.step(loss)
    assert history.stat().st_size > 0


def _two_ranks(rank, folder):
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    model = nn.Linear(4, 1, bias=False).to(DEVICE)
    nn.init.ones_(model.weight)
    wrapped = DistributedDataParallel(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = lossscale.LossScaleOptimizer(inner, rule=DynamicScale(8.0))
    found = []
    for number in range(3):
        # One rank alone overflows, in the second step.
        x = torch.full((2, 4), torch.inf if (number, rank) == (1, 1) else 1.0, device=DEVICE)
        train_step(optimizer, wrapped(x).mean())
        found.append((float(optimizer.loss_scale), model.weight.tolist()))
    torch.save(found, f"{folder}/{rank}")
    distributed.destroy_process_group()


@pytest.mark.skipif("LOSSSCALE_TEST_DEVICE" not in os.environ, reason="tools.gpu runs it")
def test_two_ranks_on_one_device(tmp_path):
    torch.multiprocessing.spawn(_two_ranks, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert first == second == [(8.0, [[0.5] * 4]), (4.0, [[0.5] * 4]), (4.0, [[0.0] * 4])]
