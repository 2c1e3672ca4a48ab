"""What is tried in several processes that talk over gloo.

`main` runs each case of a set in one of its processes. A case checks what its process sees, and
returns what all processes of the set must have alike, or one process without the others.
"""

import contextlib
import datetime
import functools
import itertools
import json
import math
import os
import pathlib
import re
import textwrap
import traceback

import pytest
import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.nn.parallel import DistributedDataParallel

import lossscale
import pages
from frameworks.torch import cases_of_float16, cases_of_parallel
from frameworks.torch.support import (
    KINDS,
    OURS,
    WithScaler,
    counted,
    shown,
    theirs,
    train_step,
    wrapper,
)
from lossscale.torch import LossScaleOptimizer
from lossscale.torch.installation import ShardedGradScaler as OurShardedGradScaler

INF = float("inf")


def rank():
    return distributed.get_rank()


def is_last():
    return rank() == distributed.get_world_size() - 1


@functools.cache
def mesh_of_four():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "in_pair"))


@functools.cache
def mesh_of_all():
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def total(parameters):
    """The sum of what is here, which is finite if all of it is."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return sum(float(p.detach().double().sum()) for p in local)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def guarded(folder):
    """A batch that overflows on the last process leaves no trace in the buffers of any."""

    def wrapped(kind):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )
        if kind == "fsdp":
            for each in (net[0], net):
                fully_shard(each)
            return net, net
        called = DistributedDataParallel(net, broadcast_buffers="broadcast" in kind)
        return called, net if "inner" in kind else called

    def trained(kind, is_given, is_guarded):
        net, part = wrapped(kind)
        rule = lossscale.FixedScale(2.0**10, skip_nonfinite=True)
        optimizer = LossScaleOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), rule=rule)
        if is_guarded:
            lossscale.torch.guard(part, optimizer)
        numbers = torch.Generator().manual_seed(rank())
        for step in range(4):
            x = torch.randn(8, 4, generator=numbers)
            if step == 2 and not is_given:
                continue
            with torch.autocast("cpu", torch.float16):
                loss = net(x * (1e6 if step == 2 and is_last() else 1)).float().pow(2).mean()
            train_step(optimizer, loss, "verb")
        return whole([*net.parameters(), *net.buffers()]), optimizer.steps_skipped

    for kind in ("broadcast", "broadcast inner", "own", "own inner", "fsdp"):
        found, skipped = trained(kind, True, True)
        assert (found, skipped) == (trained(kind, False, False)[0], 1), kind


class Parallel(torch.nn.Module):
    """Sums what all processes compute, in the forward pass."""

    def __init__(self, sums):
        super().__init__()
        torch.manual_seed(0)
        self.sums, self.a, self.b = sums, torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.a(x).float()
        return self.b(all_reduce(hidden) if self.sums else hidden)


def explained(folder):
    """If only the last process overflows, it explains alone: nothing is sent, and all train on."""

    def trained(kind, explains):
        net = Parallel(kind == "sum")
        if kind == "sync":
            net.a = torch.nn.Sequential(net.a, torch.nn.SyncBatchNorm(4).eval())
        if kind == "fsdp":
            fully_shard(net)
        called = DistributedDataParallel(net) if kind == "ddp" else net
        optimizer = LossScaleOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            initial_scale=2.0**8,
            process_group=distributed.group.WORLD,
        )
        losses, causes = [], []

        def loss_fn(model, x):
            return model(x).float().mean()

        for step in range(4):
            x = torch.ones(2, 4) * (1e6 if step == 1 and is_last() else 1)
            with torch.autocast("cpu", torch.float16):
                loss = loss_fn(called, x)
            train_step(optimizer, loss, "verb")
            losses.append(float(loss.detach()))
            if optimizer.last_step_skipped and explains and (kind != "ddp" or is_last()):
                causes.append(str(lossscale.torch.explain(net, loss_fn, x, scale=2.0**8).cause))
        return repr(losses), whole(net.parameters()), causes

    for kind in ("sum", "ddp", "sync", "fsdp"):
        causes = ["forward overflow" if kind == "ddp" else "unknown"]
        causes = [] if kind == "ddp" and not is_last() else causes
        assert trained(kind, True) == (*trained(kind, False)[:2], causes)


# FSDP2: each process holds a part of each parameter. PyTorch has no fused SGD for them.

OPTIMIZERS = (
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
)
HALF = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def fsdp(folder):
    """They skip together, with one number sent for each step."""
    for make, inner in itertools.product(OURS.values(), OPTIMIZERS):
        net = fully_shard(model(), mesh=mesh_of_all(), mp_policy=HALF)
        run = make(inner(net.parameters()))
        with counted() as reduced:
            for step in range(3):
                run.zero_grad()
                run.scale_loss(net(torch.ones(2, 4)).sum()).backward()
                before = total(net.parameters())
                if step == 0 and is_last():
                    # Of the second layer the last of four processes holds nothing.
                    net[2].weight.grad._local_tensor.fill_(INF)
                    net[0].weight.grad._local_tensor[-1, -1] = INF
                run.step()
                assert shown(run) == [4.0, step]
                is_same = before == total(net.parameters())
                assert is_same == (step == 0) or (step and rank() > 0)
        assert math.isfinite(total(net.parameters()))
        assert len(reduced) == 3


def monitored(folder):
    """Each process logs its own records, and names the overflows of its shards."""
    for watches in (True, rank() == 0):
        net, logged = fully_shard(model(), mesh=mesh_of_all(), mp_policy=HALF), []
        inner = torch.optim.SGD(net.parameters(), lr=0.0)
        optimizer = lossscale.torch.LossScaleOptimizer(inner, initial_scale=8.0)
        monitor = lossscale.torch.Monitor(optimizer, net, log=logged.append) if watches else None
        for step in range(3):
            optimizer.zero_grad()
            optimizer.scale_loss(net(torch.ones(2, 4)).sum()).backward()
            if step == 1 and is_last():
                net[0].weight.grad._local_tensor[-1, -1] = INF
            optimizer.step()
            # A monitor in one process alone exchanges nothing that the others would have to answer.
            if watches:
                monitor.step(0.5)
        bad = [{"name": "0.weight", "infs": 1, "nans": 0}] if is_last() else []
        assert [(r["scale"], r["skipped"], r["nonfinite"]) for r in logged] == [
            (8.0, False, []),
            (8.0, True, bad),
            (4.0, False, []),
        ][: 3 * watches]


# A mesh of two dimensions, and parameters that are spread over none, either or both of them.

LAYOUTS = {
    "RR": (Replicate(), Replicate()),
    "RS": (Replicate(), Shard(0)),
    "SR": (Shard(0), Replicate()),
    "SS": (Shard(0), Shard(0)),
}


def mesh_2x2(folder):
    """D5: every order of the four layouts, and every one that is not replicated overflowing."""

    def spread(layout, value):
        local = torch.full((2,), value)
        return DTensor.from_local(local, mesh_of_four(), LAYOUTS[layout], run_check=False)

    # PyTorch reduces over the mesh and placements of the first gradient.
    theirs_shown = []
    for order, bad in itertools.product(itertools.permutations(LAYOUTS), ("RS", "SR", "SS")):
        for make in (*OURS.values(), theirs):
            parameters = [torch.nn.Parameter(spread(layout, 1.0)) for layout in order]
            run = make(torch.optim.SGD(parameters, lr=0.5))
            run.scale_loss(torch.zeros(()))
            for layout, parameter in zip(order, parameters, strict=True):
                parameter.grad = spread(layout, INF if layout == bad and is_last() else 0.0)
            with counted() as reduced:
                run.step()
            if make is theirs:
                theirs_shown.append(float(run.loss_scale))
            else:
                assert (float(run.loss_scale), len(reduced)) == (4.0, 2), (order, bad)
    assert is_last() or 8.0 in theirs_shown


def of_parts(value, layout):
    """A gradient of four elements that each process of a pair has a part of."""
    parts = torch.full((2 if layout == "RS" else 4,), value)
    placements = (Partial(), LAYOUTS[layout][1])
    return DTensor.from_local(parts, mesh_of_four(), placements, run_check=False)


def partial(folder):
    """Gradients that are parts of a sum over a dimension that the parameter is spread over or not.

    In turn: one part is infinite; the parts are finite and their sum is not; two are good.
    """
    makers = [*OURS.values(), functools.partial(wrapper, decide="device")]
    for make, layout in itertools.product(makers, ("RR", "SR", "RS")):
        parameter = torch.nn.Parameter(placed(torch.ones(4), layout))
        run = make(torch.optim.AdamW([parameter], lr=0.5, fused=True))
        trace = []
        for value in (INF if rank() >= 2 else 0.0, 3e38, 2.0, 2.0):
            run.scale_loss(torch.zeros(()))
            parameter.grad = of_parts(value, layout)
            before = whole([parameter])
            run.step()
            applied = whole([parameter]) != before
            trace.append([float(run.loss_scale), whole([parameter.grad]) if applied else []])
        # Skipped twice. Then the two parts of 2, divided by a scale of 2, are a gradient of 2.
        assert trace == [[4.0, []], [2.0, []], [2.0, [2.0] * 4], [2.0, [2.0] * 4]]


# What one process would clip, of parameters that are spread in every way.

SIZES = {"RR": 5, "RS": 3, "SR": 1, "SS": 6}
"""Some processes hold nothing of some of them."""


def spoiled(gradients):
    """An overflow that only the last process sees."""
    *others, last = gradients
    return [*others, torch.where(torch.arange(len(last)) == len(last) - 1, INF, last)]


def placed(tensor, layout):
    if not distributed.is_initialized():
        return tensor
    return distribute_tensor(tensor, mesh_of_four(), LAYOUTS[layout])


def in_all_layouts():
    return [torch.nn.Parameter(placed(torch.ones(n), name)) for name, n in SIZES.items()]


def give(run, weights, gradients):
    factor = run.scale_loss(torch.ones(()))
    for weight, gradient, layout in zip(weights, gradients, SIZES, strict=True):
        weight.grad = None if gradient is None else placed(gradient * factor, layout)


def whole(tensors):
    held = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return [number for tensor in held for number in tensor.flatten().tolist()]


def as_given(folder):
    """An overflow that one process sees, in a step whose loss nobody scaled: all skip it."""
    for layout, by_hand in itertools.product(("RS", "SR", "SS"), (False, True)):
        weight = torch.nn.Parameter(placed(torch.ones(4), layout))
        optimizer = LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5), initial_scale=8.0)
        for gradient, skips in ((spoiled([torch.ones(4)])[0], True), (torch.ones(4), False)):
            weight.grad = placed(gradient, layout)
            assert not by_hand or optimizer.unscale_() is not skips
            optimizer.step()
            assert optimizer.last_step_skipped is skips
            assert whole([weight]) == [1.0 if skips else 0.5] * 4


def clipped(folder):
    """The norm of all gradients, on a mesh as in one process; the gradients that are applied."""
    found = {}
    generator = torch.Generator().manual_seed(0)
    good = [torch.randn(size, generator=generator) * 3 for size in SIZES.values()]
    large = [gradient * 1e30 for gradient in good]
    kinds = {**KINDS, "device": {"fused": True}}
    for (name, kind), by_hand in itertools.product(kinds.items(), (False, True)):
        weights = in_all_layouts()
        made = LossScaleOptimizer(
            torch.optim.AdamW(weights, lr=0.1, **kind),
            initial_scale=8.0,
            clip_norm=1,
            decide="device" if name == "device" else "host",
        )
        trace = []
        # Where the device decides, no norm is read, so that an overflow of its own is not seen.
        later = ([None] * 4, *(() if name == "device" else (large,)))
        for gradients in (good, [None, *good[1:]], spoiled(good), *later):
            give(made, weights, gradients)
            if by_hand:
                made.unscale_()
            made.step()
            skipped = bool(made.last_step_skipped)
            applied = [] if skipped else whole(weight.grad for weight in weights)
            # Without a gradient nothing is done; else all are clipped to a norm of 1.
            norm = sum(number**2 for number in applied) ** 0.5
            assert not applied or abs(norm - 1) < 1e-5
            trace.append([*shown(made), skipped, applied])
        assert [step[2] for step in trace[:3]] == [False, False, True]
        # A step without any gradient moves nothing.
        assert trace[3][:2] == trace[2][:2] == [4.0, 0]
        assert name == "device" or trace[4][:3] == [4.0, 1, False]
        found[f"{name}{' unscaled' if by_hand else ''}"] = trace
    return found


def sharded_scaler(folder):
    """D4: FSDP1's scaler with a fused optimizer, its own and the one that `install` puts there."""
    theirs_shown = [4.0, 0] if rank() == 0 else [8.0, 1]
    for make, expected in ((ShardedGradScaler, theirs_shown), (OurShardedGradScaler, [4.0, 0])):
        weight = torch.nn.Parameter(torch.ones(2))
        run = WithScaler(torch.optim.AdamW([weight], fused=True), make("cpu", init_scale=8.0))
        run.scale_loss((weight * (INF if rank() == 0 else 1.0)).sum()).backward()
        run.step()
        assert shown(run) == expected


def averaged_by_hand(folder):
    """Gradients averaged after `backward`, as PyTorch's tutorial does; one process overflows."""
    shown = []
    for way in (lambda p: p.grad, lambda p: p.grad.data):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = LossScaleOptimizer(torch.optim.SGD([weight], lr=0.25), initial_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            is_bad = (step, distributed.get_rank()) == (1, 0)
            optimizer.backward(weight.sum() * (INF if is_bad else 1.0))
            distributed.all_reduce(way(weight))
            way(weight).div_(distributed.get_world_size())
            optimizer.step()
        assert weight.tolist() == [0.5, 0.5]
        shown.append([float(optimizer.loss_scale), optimizer.steps_skipped])
    assert shown == [[4.0, 1]] * 2
    return shown


def compressed(folder):
    """PowerSGD after one overflow, with the lines of docs/parallel.md: the steps skipped."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = LossScaleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    def clear(optimizer):
        state.error_dict.clear()
        state.p_memory_dict.clear()
        state.q_memory_dict.clear()

    optimizer.register_step_skipped_hook(clear)
    for step in range(8):
        loss = model(torch.randn(2, 64)).square().mean()
        train_step(optimizer, loss * (INF if step == 4 else 1.0), "verb")
    assert optimizer.steps_skipped == 1


def left_out(folder):
    """A batch that is bad on the last process, with the lines of docs/troubleshooting.md."""
    page = (pages.DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    [lines] = [block for block in blocks if "all_reduce" in block]
    loop = "for batch in batches:\n    loss = loss_of(batch)\n{}    train(loss)\n"
    program = loop.format(textwrap.indent(lines, "    "))

    def trained(batches, **how):
        net = DistributedDataParallel(model(), **how)
        optimizer = LossScaleOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))

        def loss_of(batch):
            loss = net(torch.full((2, 4), 1.0 + batch + rank())).square().mean()
            return loss * (INF if batch == 2 and is_last() else 1.0)

        def train(loss):
            train_step(optimizer, loss, "verb")

        exec(program, {"torch": torch, "batches": batches, "loss_of": loss_of, "train": train})
        assert (optimizer.iterations, optimizer.steps_skipped) == (3, 0)
        return whole(net.parameters())

    for how in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        assert trained([0, 1, 2, 3], **how) == trained([0, 1, 3], **how), how


def in_zero(folder):
    """A wrapper that `ZeroRedundancyOptimizer` makes for the part of one process."""
    # PyTorch's own import of it uses what PyTorch has deprecated.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(torch.nn.Linear(2, 2))

    def made(group):
        return ZeroRedundancyOptimizer(
            model.parameters(),
            lambda part: LossScaleOptimizer(torch.optim.SGD(part, lr=0.5), process_group=group),
        )

    words = "Wrap the ZeroRedundancyOptimizer, or make the LossScaleOptimizer with"
    with pytest.raises(lossscale.errors.UnsupportedError, match=words):
        made(None)
    outer = made(distributed.group.WORLD)
    for factor in (1.0, INF, 1.0):
        outer.zero_grad()
        outer.optim.scale_loss(model(torch.ones(1, 2)).sum() * factor).backward()
        outer.step()
    assert (float(outer.optim.loss_scale), outer.optim.steps_skipped) == (2.0**14, 1)


CASES = {
    4: (fsdp, mesh_2x2, partial, as_given, clipped, sharded_scaler),
    2: (guarded, explained, fsdp, averaged_by_hand, compressed, in_zero, monitored, left_out),
    1: (clipped,),
}
CASES = {size: (*cases_of_parallel.CASES[size], *cases) for size, cases in CASES.items()}
CASES |= {size: CASES[size] + cases_of_float16.CASES for size in (2, 4)}
with contextlib.suppress(ModuleNotFoundError):
    from frameworks.torch import cases_of_trainers

    CASES[2] += cases_of_trainers.CASES
"""Of each size of a set, in the order in which they run: what was saved is gone on from."""


def main(number, size, folder):
    """Runs the cases of a set in one of its processes, and writes down what each returns."""
    number, size, folder = int(number), int(size), pathlib.Path(folder)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if size > 1:
        store = distributed.FileStore(str(folder / f"store-{size}"), size)
        distributed.init_process_group(
            "gloo",
            store=store,
            rank=number,
            world_size=size,
            timeout=datetime.timedelta(seconds=60),
        )
    found = {}
    for case in CASES[size]:
        try:
            found[case.__name__] = [None, case(folder)]
        except Exception:
            found[case.__name__] = [traceback.format_exc(), None]
        (folder / f"{size}-{number}.json").write_text(json.dumps(found))
    if size > 1:
        distributed.destroy_process_group()
