"""Float16 models in several processes: rows of ways to train them, and one oracle for all.

The oracle has float32 copies of the weights made by hand, and runs the batches of all processes one
after another. `cases_of_processes.main` runs the rows.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from frameworks.torch.support import WithScaler, Wrapper, bits, derive, through_a_file
from lossscale.errors import GradientsError, UnsupportedError
from lossscale.torch import GradScaler, LossScaleOptimizer, MasterWeights

F16, F32 = torch.float16, torch.float32
STEPS, SCALE, CLOSE = 4, 2.0**10, {"rtol": 0, "atol": 5e-4}
INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
}
DEFAULTS = {"kind": "", "way": "verb", "inner": "sgd", "dtype": F16, "passes": 1, "bad": None}
DEFAULTS |= {"clip": None, "more": {}, "ddp": {}, "hook": None, "waits": True, "comes_last": True}


class Net(torch.nn.Module):
    """A network of a kind, whose parameters have a dtype."""

    def __init__(self, kind="", dtype=F32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.extra = (torch.nn.Linear(8, 8) for _ in range(3))
        self.last, self.kind = torch.nn.Linear(8, 1), kind
        if kind == "tied":
            self.second.weight = self.first.weight
        if kind == "LoRA":
            self.requires_grad_(False).extra.requires_grad_()
        self.to(dtype)
        self.norm = torch.nn.BatchNorm1d(8) if kind == "norm" else torch.nn.Identity()

    def forward(self, x):
        with torch.autocast("cpu", F16, enabled=self.first.weight.dtype == F32):
            hidden = self.norm(self.first(x.to(self.first.weight.dtype)))
            # A part that some processes use in some steps.
            if self.kind != "unused" or x[0, 0] > 0:
                hidden = hidden + self.extra(hidden)
            return self.last(self.second(hidden.tanh()).tanh()).float().square().mean()


def batches(size, passes, bad):
    """Those of all steps, micro-batches and processes, in this order; a bad one is the last's."""
    numbers = torch.Generator().manual_seed(0)
    for place in itertools.product(range(STEPS), range(passes), range(size)):
        x = torch.randn(4, 8, dtype=F32, generator=numbers)
        yield x * torch.inf if place == (*(bad or ()), size - 1) else x


@functools.cache
def trained_by_hand(size, kind="", inner="sgd", dtype=F16, passes=1, bad=None, clips=False):
    """The float32 weights, the buffers and the number of steps skipped of one process."""
    net, skipped, given = Net(kind, dtype), 0, batches(size, passes, bad)
    narrow = [p for p in net.parameters() if p.requires_grad]
    wide = [p.detach().float().requires_grad_() for p in narrow]
    inner = INNER[inner](wide)
    for _ in range(STEPS):
        inner.zero_grad()
        for _, number in itertools.product(range(passes), range(size)):
            buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
            loss = net(next(given)) * SCALE / passes / size
            found = torch.autograd.grad(loss, narrow, allow_unused=True)
            if number:
                # Those of process 0 are sent to all.
                net.load_state_dict(buffers, strict=False)
            for weight, gradient in zip(wide, found, strict=True):
                if gradient is not None:
                    before = 0 if weight.grad is None else weight.grad
                    weight.grad = before + gradient.float() / SCALE
        if not all(w.grad is None or w.grad.isfinite().all() for w in wide):
            skipped += 1
            continue
        if clips:
            clip_grad_norm_(wide, 0.1)
        inner.step()
        for parameter, weight in zip(narrow, wide, strict=True):
            parameter.data.copy_(weight)
    return [w.detach() for w in wide], list(net.buffers()), skipped


class Run:
    """A model in one of the processes, and what trains it as a row says."""

    def __init__(self, **row):
        self.row = row = DEFAULTS | row
        self.net = Net(row["kind"], row["dtype"])
        if row["comes_last"]:
            self._wrap()
        self.trained = [p for p in self.net.parameters() if p.requires_grad]
        self.inner = INNER[row["inner"]](self.trained)
        if row["dtype"] != F32:
            self.inner = MasterWeights(self.inner, grad_dtype=None)
        if row["way"] == "scaler":
            self.optimizer = WithScaler(self.inner, GradScaler("cpu", init_scale=SCALE))
            self.parts = [self.net, self.inner, self.optimizer.scaler]
        else:
            more = {"initial_scale": SCALE, "clip_norm": 0.1 if row["clip"] == "norm" else None}
            self.optimizer = LossScaleOptimizer(self.inner, **more, **row["more"])
            self.parts = [self.net, self.optimizer]
        self.by_name = self.optimizer if row["way"] == "scaler" else Wrapper(self.optimizer)
        if not row["comes_last"]:
            self._wrap()

    def _wrap(self):
        self.called = DistributedDataParallel(self.net, **self.row["ddp"])
        if self.row["hook"]:
            self.called.register_comm_hook(None, self.row["hook"])

    def train(self, start=0, end=STEPS):
        passes, size = self.row["passes"], distributed.get_world_size()
        given = list(batches(size, passes, self.row["bad"]))[distributed.get_rank() :: size]
        for step in range(start, end):
            self.optimizer.zero_grad()
            for each in range(passes):
                alone = self.row["waits"] and each < passes - 1
                with self.called.no_sync() if alone else contextlib.nullcontext():
                    loss = self.called(given[step * passes + each]) / passes
                    derive(self.optimizer, loss, self.row["way"])
            if self.row["clip"] == "hand":
                if self.row["way"] != "verb":
                    self.by_name.unscale()
                clip_grad_norm_(self.net.parameters(), 0.1)
            self.optimizer.step()
        return self

    def weights(self):
        masters = getattr(self.inner, "masters", {})
        return [masters.get(p, p.detach()) for p in self.trained]

    def check(self):
        """Checks it against the oracle; returns what all processes must have, to the bit."""
        same = {name: self.row[name] for name in ("kind", "inner", "dtype", "passes", "bad")}
        weights, buffers, skipped = trained_by_hand(
            distributed.get_world_size(), **same, clips=bool(self.row["clip"])
        )
        torch.testing.assert_close(self.weights(), weights, **CLOSE)
        assert self.by_name.shown()[0] == SCALE / 2**skipped
        if distributed.get_rank() == 0:
            torch.testing.assert_close(list(self.net.buffers()), buffers, **CLOSE)
        return repr(bits([self.weights(), *self.net.parameters(), self.by_name.shown()]))


def in_float32(_, bucket):
    """The communication hook of docs/float16_models.md."""
    total = distributed.all_reduce(bucket.buffer().float(), async_op=True).get_future()
    mean = total.then(lambda f: f.value()[0] / distributed.get_world_size())
    return mean.then(lambda f: bucket.buffer().copy_(f.value()))


ROWS = {
    "hook": {"hook": in_float32},
    "adamw": {"inner": "adamw", "comes_last": False},
    "fused": {"inner": "fused", "way": "scale_loss"},
    "fused_scaler": {"inner": "fused", "way": "scaler"},
    "device": {"inner": "fused", "more": {"decide": "device"}, "bad": (1, 0)},
    "device_scale_loss": {"inner": "fused", "more": {"decide": "device"}, "way": "scale_loss"},
    "clip_norm": {"clip": "norm", "bad": (1, 0)},
    "clip_norm_fused": {"clip": "norm", "inner": "fused", "way": "scale_loss"},
    "clip_norm_device": {"clip": "norm", "inner": "fused", "more": {"decide": "device"}},
    "clip_by_hand": {"clip": "hand"},
    "clip_by_hand_scale_loss": {"clip": "hand", "way": "scale_loss", "passes": 2},
    "clip_by_hand_scaler": {"clip": "hand", "way": "scaler", "bad": (1, 0)},
    "unused": {"kind": "unused", "ddp": {"find_unused_parameters": True}},
    "unused_scale_loss": {
        "kind": "unused",
        "ddp": {"find_unused_parameters": True},
        "way": "scale_loss",
        "passes": 2,
    },
    "static": {"ddp": {"static_graph": True}, "bad": (1, 0)},
    "static_scale_loss": {"ddp": {"static_graph": True}, "way": "scale_loss"},
    "views": {"ddp": {"gradient_as_bucket_view": True}, "passes": 2, "comes_last": False},
    "views_scale_loss": {"ddp": {"gradient_as_bucket_view": True}, "way": "scale_loss"},
    "views_scaler": {"ddp": {"gradient_as_bucket_view": True}, "way": "scaler", "passes": 2},
    **{kind: {"kind": kind} for kind in ("norm", "tied", "LoRA")},
    "norm_scale_loss": {"kind": "norm", "way": "scale_loss", "passes": 2},
    "bfloat16": {"dtype": torch.bfloat16, "inner": "adamw", "passes": 2},
    "bfloat16_scaler": {"dtype": torch.bfloat16, "way": "scaler", "bad": (1, 0)},
    "float32": {"dtype": F32, "passes": 3, "bad": (1, 0)},
    "float32_scaler": {"dtype": F32, "way": "scaler", "passes": 3, "bad": (1, 0)},
}
for _way, _waits in itertools.product(("verb", "scale_loss", "unscaled", "scaler"), (True, False)):
    _row = {"way": _way, "waits": _waits}
    ROWS[f"{_way}{'_no_sync' if _waits else ''}"] = _row | {"passes": 3}
    # The first of two micro-batches.
    ROWS[f"{_way}{'_no_sync' if _waits else ''}_bad"] = _row | {"passes": 2, "bad": (2, 0)}


def as_one(folder, **row):
    return Run(**row).train().check()


def flushed(folder):
    """DDP divides before it adds up in float16: the lowest log2(N) bits are lost; in float32 none.

    Each process has a gradient of the smallest float16 number, and one that is N times as large.
    """
    size, found = distributed.get_world_size(), {}
    for hook in (None, in_float32):
        net = torch.nn.Linear(1, 2, bias=False).half()
        called = DistributedDataParallel(net)
        if hook:
            called.register_comm_hook(None, hook)
        optimizer = LossScaleOptimizer(
            MasterWeights(INNER["sgd"](net.parameters()), grad_dtype=None), initial_scale=1.0
        )
        factors = torch.tensor([2.0**-24, size * 2.0**-24])
        optimizer.backward((called(torch.ones(1, 1).half()).float() * factors).sum())
        found[hook] = (net.weight.grad.flatten() * 2.0**24).tolist()
    assert found == {None: [0.0, size], in_float32: [1.0, size]}


# Saved and continued: bit for bit as the run that went on.


def by_file(run, other, folder):
    saved = through_a_file([part.state_dict() for part in run.parts])
    for part, state in zip(other.parts, saved, strict=True):
        part.load_state_dict(state)


def by_distributed_checkpoint(run, other, folder):
    keys = "model", "optimizer"
    saved = dict(zip(keys, get_state_dict(run.called, run.optimizer), strict=True))
    checkpoint.save(saved, checkpoint_id=folder)
    # The optimizer has not stepped yet.
    loaded = dict(zip(keys, get_state_dict(other.called, other.optimizer), strict=True))
    checkpoint.load(loaded, checkpoint_id=folder)
    set_state_dict(
        *(other.called, other.optimizer),
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )


def resumed(folder, how, step, **row):
    # Otherwise each new DDP finds other buckets after a step, and adds up in another order.
    row["ddp"] = {"find_unused_parameters": True}
    run, other = Run(**row).train(end=step), Run(**row)
    with torch.no_grad():
        for parameter in other.net.parameters():
            parameter.add_(1.0)
    how(run, other, folder / f"{how.__name__}-{step}-{distributed.get_world_size()}")
    results = [each.train(start=step).check() for each in (run, other)]
    assert results[0] == results[1]
    return results[0]


SAVED = {
    "adamw": (by_file, 2, {"inner": "adamw", "bad": (1, 0)}),
    "scaler": (by_file, 2, {"way": "scaler", "bad": (1, 0)}),
    "at_start": (by_file, 0, {"inner": "adamw"}),
    "distributed": (by_distributed_checkpoint, 2, {"inner": "adamw", "bad": (1, 0)}),
    # Of AdamW PyTorch would count the step by which it makes a state, with any parameters.
    "distributed_at_start": (by_distributed_checkpoint, 0, {"kind": "norm", "passes": 2}),
}


# Where float16 parameters can have no masters, and what the errors advise instead.


def by_fsdp2(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    return fully_shard(net, mp_policy=policy), INNER["sgd"](net.parameters())


def by_fsdp1(net):
    where = {"device_id": torch.device("cpu"), "use_orig_params": True}
    mixed = MixedPrecision(param_dtype=torch.float16)
    called = FullyShardedDataParallel(net, **where, mixed_precision=mixed)
    return called, INNER["sgd"](called.parameters())


def by_tensor_parallelism(net):
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    parallelize_module(net, mesh, {"second": ColwiseParallel(), "last": RowwiseParallel()})
    return net, INNER["sgd"](net.parameters())


def by_zero(net):
    # PyTorch's own import of it uses what PyTorch has deprecated.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    inner = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    return DistributedDataParallel(net), ZeroRedundancyOptimizer(net.parameters(), **inner)


ADVICE = (
    "MixedPrecisionPolicy(param_dtype=torch.float16) with FSDP2",
    "MixedPrecision(param_dtype=torch.float16) with FSDP1",
    "torch.autocast(device, torch.float16) with tensor parallelism and ZeroRedundancyOptimizer",
)


def refused(folder, make):
    """Each way to train float16 parameters says what to do, and that trains."""
    group = {"process_group": distributed.group.WORLD}

    def scales(inner, loss):
        optimizer = LossScaleOptimizer(inner, **group)
        optimizer.scale_loss(loss).backward()
        optimizer.step()

    def by_scaler(inner, loss):
        scaler = GradScaler("cpu", **group)
        scaler.scale(loss).backward()
        scaler.unscale_(inner)

    for way in (
        *(scales, by_scaler, lambda inner, _: MasterWeights(inner)),
        lambda inner, loss: LossScaleOptimizer(inner, **group).backward(loss),
    ):
        called, inner = make(Net().half())
        with pytest.raises((GradientsError, UnsupportedError)) as raised:
            way(inner, called(torch.ones(4, 8)))
        assert not [words for words in ADVICE if words not in str(raised.value)], raised.value
        assert "MasterWeights(" not in str(raised.value)
    size = 1 if make is by_tensor_parallelism else distributed.get_world_size()
    net = Net()
    called, inner = make(net)
    optimizer = LossScaleOptimizer(inner, initial_scale=SCALE, **group)
    for x in list(batches(size, 1, None))[distributed.get_rank() % size :: size]:
        optimizer.zero_grad()
        optimizer.backward(called(x))
        optimizer.step()
    assert optimizer.steps_skipped == 0
    whole = contextlib.nullcontext()
    if make is by_fsdp1:
        whole = FullyShardedDataParallel.summon_full_params(called)
    with whole:
        found = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
        found = [p.detach().clone() for p in found]
    torch.testing.assert_close(found, trained_by_hand(size, dtype=F32)[0], **CLOSE)


def _named(name, case):
    case.__name__ = name
    return case


CASES = (
    flushed,
    *(_named(f"as_one_{name}", functools.partial(as_one, **row)) for name, row in ROWS.items()),
    *(
        _named(f"resumed_{name}", functools.partial(resumed, how=how, step=step, **row))
        for name, (how, step, row) in SAVED.items()
    ),
    *(
        _named(f"refused_{make.__name__}", functools.partial(refused, make=make))
        for make in (by_fsdp2, by_fsdp1, by_tensor_parallelism, by_zero)
    ),
)
