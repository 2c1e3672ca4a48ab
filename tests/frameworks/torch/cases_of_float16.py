"""Float16 models in several processes: rows of ways to train them, and one oracle for all.

The oracle has float32 weights made by hand, and adds up the losses of all processes.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint, fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from frameworks.torch.support import (
    OURS,
    ByHand,
    WithScaler,
    bits,
    counted,
    shown,
    through_a_file,
    train_step,
    watched,
    wrapped,
)
from lossscale.errors import GradientsError, UnsupportedError
from lossscale.torch import GradScaler, LossScaleOptimizer, MasterWeights

F16, F32 = torch.float16, torch.float32
STEPS, SCALE, CLOSE = 4, 2.0**10, {"rtol": 0, "atol": 5e-4}
INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
}
size = distributed.get_world_size


class Net(nn.Module):
    def __init__(self, kind="", dtype=F32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.extra = (nn.Linear(8, 8) for _ in range(3))
        self.last, self.kind = nn.Linear(8, 1), kind
        if kind == "tied":
            self.second.weight = self.first.weight
        if kind == "LoRA":
            self.requires_grad_(False).extra.requires_grad_()
        self.to(dtype)
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()

    def forward(self, x):
        with torch.autocast("cpu", F16, enabled=self.first.weight.dtype == F32):
            hidden = self.norm(self.first(x.to(self.first.weight.dtype)))
            # A part that some processes use in some steps.
            if self.kind != "unused" or x[0, 0] > 0:
                hidden = hidden + self.extra(hidden)
            return self.last(self.second(hidden.tanh()).tanh()).float().square().mean()


def batches(parts, passes, bad):
    """Those of all steps, micro-batches and processes, in this order; a bad one is the last's."""
    numbers = torch.Generator().manual_seed(0)
    for place in itertools.product(range(STEPS), range(passes), range(parts)):
        x = torch.randn(4, 8, dtype=F32, generator=numbers)
        yield x * torch.inf if place == (*(bad or ()), parts - 1) else x


@functools.cache
def trained_by_hand(parts, kind="", inner="sgd", dtype=F16, passes=1, bad=None, clip=None):
    """One process: the model, its float32 weights and the number of steps skipped."""
    net, skipped, given = Net(kind, dtype), 0, batches(parts, passes, bad)
    hand = ByHand(net, INNER[inner])
    for _ in range(STEPS):
        losses = []
        for number in [*range(parts)] * passes:
            # DDP sends the buffers of process 0 to all.
            buffers = {name: b.clone() if number else b for name, b in net.named_buffers()}
            losses.append(torch.func.functional_call(net, buffers, next(given)))
        skipped += not hand.step([sum(losses) / passes / parts], SCALE, clip and 0.1)
    return net, hand.masters, skipped


def in_float32(_, bucket):
    """The communication hook of docs/float16_models.md."""
    total = distributed.all_reduce(bucket.buffer().float(), async_op=True).get_future()
    return total.then(lambda f: bucket.buffer().copy_(f.value()[0] / size()))


# What the words of a row say. The oracle is told of some.
DEFAULTS = {"kind": "", "inner": "sgd", "dtype": F16, "passes": 1, "bad": None, "clip": None}
WORDS = {
    **{kind: {"kind": kind} for kind in ("norm", "tied", "LoRA")},
    "unused": {"kind": "unused", "ddp": {"find_unused_parameters": True}},
    "finds": {"ddp": {"find_unused_parameters": True}},
    "static": {"ddp": {"static_graph": True}},
    "views": {"ddp": {"gradient_as_bucket_view": True}},
    **{way: {"way": way} for way in ("verb", "scale_loss", "unscaled", "scaler", "theirs")},
    **{inner: {"inner": inner} for inner in INNER},
    "device": {"inner": "fused", "more": {"decide": "device"}},
    **{word: {word: True} for word in ("synced", "hook", "made_last")},
}
WORDS |= {"bfloat16": {"dtype": torch.bfloat16}, "float32": {"dtype": F32}, "bad": {"bad": (1, 0)}}
WORDS |= {"twice": {"passes": 2}, "thrice": {"passes": 3}, "by_hand": {"clip": "by hand"}}
WORDS |= {"clip_norm": {"clip": "norm", "more": {"clip_norm": 0.1}}}
ROWS = (
    *("hook", "adamw", "fused scale_loss", "fused scaler", "made_last", "made_last scaler views"),
    *("device bad", "device scale_loss twice bad", "clip_norm bad", "clip_norm scale_loss fused"),
    *("by_hand", "by_hand scale_loss twice", "by_hand scaler bad", "unused", "static bad"),
    *("unused scale_loss twice", "views twice", "static scale_loss", "views scale_loss", "norm"),
    *("norm scale_loss twice", "tied", "LoRA", "LoRA scaler", "bfloat16 adamw twice"),
    *("bfloat16 scaler bad", "float32 thrice bad", "float32 scaler thrice bad"),
    "float32 theirs thrice bad",
    *(
        f"{way} {rest}"
        for way in ("verb", "scale_loss", "unscaled", "scaler")
        # One process overflows in the first of two micro-batches.
        for rest in ("thrice", "thrice synced", "twice bad", "twice bad synced")
    ),
)


class Run:
    """A model in one of the processes, and what trains it as the words of a row say."""

    def __init__(self, row):
        self.told = functools.reduce(dict.__or__, map(WORDS.get, row.split()), {})
        self.row = {name: self.told.get(name, value) for name, value in DEFAULTS.items()}
        self.way, self.called = self.told.get("way", "verb"), None
        self.net = Net(self.row["kind"], self.row["dtype"])
        if "made_last" in self.told:
            self.wrap()
        self.trained = [p for p in self.net.parameters() if p.requires_grad]
        inner = self.inner = INNER[self.row["inner"]](self.trained)
        if self.row["dtype"] != F32:
            inner = self.inner = MasterWeights(inner, grad_dtype=None)
        scalers = {"scaler": GradScaler, "theirs": torch.amp.GradScaler}
        if self.way in scalers:
            self.by = WithScaler(inner, scalers[self.way]("cpu", init_scale=SCALE))
        else:
            more = self.told.get("more", {})
            self.by = LossScaleOptimizer(inner, initial_scale=SCALE, **more)

    def wrap(self):
        self.called = DistributedDataParallel(self.net, **self.told.get("ddp", {}))
        if "hook" in self.told:
            self.called.register_comm_hook(None, in_float32)

    def given(self):
        return list(batches(size(), self.row["passes"], self.row["bad"]))

    def train(self, start=0, end=STEPS):
        if self.called is None:
            self.wrap()
        passes = self.row["passes"]
        mine = iter(self.given()[distributed.get_rank() :: size()][start * passes :])
        for _ in range(start, end):
            self.by.zero_grad()
            for each in range(passes):
                waits = each < passes - 1 and "synced" not in self.told
                with self.called.no_sync() if waits else contextlib.nullcontext():
                    loss = self.called(next(mine)) / passes
                    if self.way == "verb":
                        self.by.backward(loss)
                    else:
                        self.by.scale_loss(loss).backward()
                    if self.way == "unscaled":
                        self.by.unscale_()
            if self.row["clip"] == "by hand":
                if self.way != "verb":
                    self.by.unscale_()
                clip_grad_norm_(self.net.parameters(), 0.1)
            self.by.step()
        return self

    def check(self):
        """Checks it against the oracle; returns what all processes must have, to the bit."""
        masters = getattr(self.inner, "masters", {})
        weights = [masters.get(p, p.detach()) for p in self.trained]
        # One process computes the oracle for all.
        if distributed.get_rank() == 0:
            net, expected, skips = trained_by_hand(size(), **self.row)
            torch.testing.assert_close(weights, expected, **CLOSE)
            assert self.by.loss_scale == SCALE / 2**skips
            torch.testing.assert_close(list(self.net.buffers()), list(net.buffers()), **CLOSE)
        return repr(bits([weights, *self.net.parameters(), shown(self.by)]))


def as_one(folder, row):
    with counted() as sent:
        run = Run(row).train()
    assert not sent or "hook" in row
    return run.check()


def flushed(folder):
    """DDP divides before it adds up: in float16 the lowest log2(N) bits are lost, in float32 none.

    Each process has the smallest gradient of float16, and one that is N times as large.
    """
    for row, kept in (("", 0.0), ("hook", 1.0)):
        run, weight = Run(row), torch.tensor([1.0, size()]) * 2.0**-24
        run.net = nn.Linear(1, 2, bias=False).half()
        inner = MasterWeights(INNER["sgd"](run.net.parameters()), grad_dtype=None)
        run.wrap()
        loss = (run.called(torch.ones(1, 1).half()).float() * weight).sum()
        LossScaleOptimizer(inner, initial_scale=1.0).backward(loss)
        assert (run.net.weight.grad * 2.0**24).flatten().tolist() == [kept, size()]


def by_file(run, other, folder):
    parts = [[each.net, each.inner, watched(each.by)] for each in (run, other)]
    saved = through_a_file([part.state_dict() for part in parts[0]])
    for part, state in zip(parts[1], saved, strict=True):
        part.load_state_dict(state)


def by_dcp(run, other, folder):
    # The other has not stepped yet.
    saved, (model, optimizer) = (get_state_dict(r.called, watched(r.by)) for r in (run, other))
    checkpoint.save(dict(zip("mo", saved, strict=True)), checkpoint_id=folder)
    checkpoint.load({"m": model, "o": optimizer}, checkpoint_id=folder)
    states = {"model_state_dict": model, "optim_state_dict": optimizer}
    set_state_dict(other.called, watched(other.by), **states)


def resumed(folder, row, how, step):
    """It continues bit for bit as the run that was saved.

    Without "finds" each new DDP has other buckets in its first step, and adds up in another order.
    """
    run, other = Run(f"{row} finds").train(end=step), Run(f"{row} finds").train(end=0)
    for parameter in other.net.parameters():
        parameter.data.add_(1.0)
    how(run, other, folder / f"{how.__name__}-{step}-{size()}")
    results = [each.train(start=step).check() for each in (run, other)]
    assert results[0] == results[1]
    return results[0]


# Where float16 parameters can have no masters: what the errors advise.


CPU, TP_PLAN = torch.device("cpu"), {"second": ColwiseParallel(), "last": RowwiseParallel()}
POLICY, MIXED = (kind(param_dtype=F16) for kind in (fsdp.MixedPrecisionPolicy, fsdp.MixedPrecision))
ADVISED = {
    "FSDP2": lambda net: fsdp.fully_shard(net, mp_policy=POLICY),
    "FSDP1": lambda net: fsdp.FullyShardedDataParallel(net, device_id=CPU, mixed_precision=MIXED),
    "TP": lambda net: parallelize_module(net, init_device_mesh("cpu", (size(),)), TP_PLAN),
    "ZeRO": DistributedDataParallel,
}


def spread(way, net):
    called = ADVISED[way](net)
    if way != "ZeRO":
        return called, INNER["sgd"](called.parameters())
    # PyTorch's own import of it uses what PyTorch has deprecated.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    given = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    return called, ZeroRedundancyOptimizer(called.parameters(), **given)


ADVICE = r"MixedPrecisionPolicy\(.*FSDP2.*MixedPrecision\(.*FSDP1.*autocast.*parallelism and Zero"


def refused(folder, way):
    """Each call that meets float16 parameters says what to do instead, and that trains."""
    group = {"process_group": distributed.group.WORLD}

    def scales(inner, loss, make):
        run = make(inner, **group)
        run.scale_loss(loss).backward()
        run.unscale_()

    for call in (
        *(functools.partial(scales, make=make) for make in OURS.values()),
        lambda inner, loss: wrapped(inner, **group).backward(loss),
        lambda inner, loss: MasterWeights(inner),
    ):
        called, inner = spread(way, Net().half())
        with pytest.raises((GradientsError, UnsupportedError), match=ADVICE) as raised:
            call(inner, called(torch.ones(4, 8)))
        assert "MasterWeights(" not in str(raised.value)
    called, inner = spread(way, Net())
    optimizer, parts = wrapped(inner, **group), 1 if way == "TP" else size()
    for x in list(batches(parts, 1, None))[distributed.get_rank() % parts :: parts]:
        train_step(optimizer, called(x), "verb")
    torch.testing.assert_close(called(x), trained_by_hand(parts, dtype=F32)[0](x), **CLOSE)
    assert optimizer.steps_skipped == 0


def named(name, case, **settings):
    case = functools.partial(case, **settings)
    case.__name__ = name
    return case


CASES = (
    flushed,
    *(named(f"as_one: {row}", as_one, row=row) for row in ROWS),
    named("resumed: adamw", resumed, row="adamw bad", how=by_file, step=2),
    named("resumed: scaler", resumed, row="scaler bad", how=by_file, step=2),
    named("resumed: DCP", resumed, row="adamw bad", how=by_dcp, step=2),
    # With AdamW, PyTorch counts the step by which it makes a state, for any parameters.
    named("resumed: DCP, at first", resumed, row="twice", how=by_dcp, step=0),
    *(named(f"refused: {way}", refused, way=way) for way in ADVISED),
)
