"""Every optimizer that torch.optim has, in each of its implementations, and several of them."""

import copy
import inspect
import itertools

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp

import lossscale
from frameworks.torch.support import (
    COPIES,
    alone,
    bits,
    parameter,
    parameters,
    scaled,
    scaler,
    snapshot,
    through_a_file,
    train_step,
    watched,
    wrapped,
)
from lossscale import errors
from lossscale.errors import UnsupportedError
from lossscale.torch import GradScaler

STEPS = (torch.inf, 1.0, 0.5, torch.inf, -3.0, torch.nan, 0.75, -torch.inf, 1.25)
_STATEFUL = {"momentum": 0.5, "amsgrad": True, "centered": True, "weight_decay": 0.125}


def cases():
    for name, cls in vars(torch.optim).items():
        if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
            continue
        # LBFGS evaluates a closure within its step, and is refused.
        if cls in (torch.optim.Optimizer, torch.optim.LBFGS):
            continue
        arguments = inspect.signature(cls).parameters
        settings = {key: value for key, value in _STATEFUL.items() if key in arguments}
        flags = [flag for flag in ("foreach", "fused") if flag in arguments]
        yield pytest.param(cls, {**settings, **dict.fromkeys(flags, False)}, id=f"{name}-single")
        for flag in flags:
            off = dict.fromkeys(set(flags) - {flag}, False)
            yield pytest.param(cls, {**settings, **off, flag: True}, id=f"{name}-{flag}")
        # Without momentum some keep a state and others none.
        yield pytest.param(cls, {}, id=f"{name}-defaults")


CASES = list(cases())
FUSED = [case for case in CASES if case.values[1].get("fused")]
SHAPES = ((4, 3), (2, 5))
"""Matrices, because Muon takes no others."""
SCALES = {wrapped: "initial_scale", scaler: "init_scale"}


class Run:
    """An optimizer whose loss has given gradients, plus a little of the parameters themselves."""

    def __init__(self, cls, settings, wrap=wrapped, **arguments):
        self.given = parameters(*SHAPES)
        self.cls, self.evaluations = cls, 0
        self.inner = cls(self.given, lr=0.125, **settings)
        self.optimizer = wrap(self.inner, **{SCALES.get(wrap, "unused"): 2.0**10, **arguments})
        torch.manual_seed(1)
        self.targets = [torch.randn(shape) for shape in SHAPES]

    def backward(self, factor):
        self.optimizer.zero_grad()
        pairs = zip(self.given, self.targets, strict=True)
        loss = sum(((p - t) ** 2).sum() * factor for p, t in pairs)
        self.evaluations += 1
        # By both ways in turn.
        if self.evaluations % 2 and hasattr(self.optimizer, "backward"):
            self.optimizer.backward(loss)
        else:
            scaled(self.optimizer, loss).backward()
        if self.cls is torch.optim.SparseAdam:
            for p in self.given:
                p.grad = p.grad.to_sparse(1)

    def step(self, factor, unscales=False):
        self.backward(factor)
        if unscales:
            self.optimizer.unscale_()
        self.optimizer.step()

    def snapshot(self):
        return snapshot(self.given, self.optimizer)


WAYS = {"host": CASES, "device": FUSED, "scaler": CASES, "scaler, unscaled": CASES}


@pytest.mark.parametrize(
    ("cls", "settings", "way"),
    [
        pytest.param(*case.values, way, id=f"{case.id}-{way}")
        for way, cases in WAYS.items()
        for case in cases
    ],
)
def test_it_trains_as_without_loss_scaling_and_a_skip_changes_no_byte(cls, settings, way):
    has_scaler, plain = way.startswith("scaler"), Run(cls, settings, alone)
    ours = Run(cls, settings, scaler) if has_scaler else Run(cls, settings, decide=way)
    for factor in STEPS:
        before, is_finite = ours.snapshot(), bool(torch.tensor(factor).isfinite())
        ours.step(factor, unscales=way == "scaler, unscaled")
        if is_finite:
            plain.step(factor)
        assert ours.snapshot() == (plain.snapshot() if is_finite else before)
        assert has_scaler or bool(ours.optimizer.last_step_skipped) is not is_finite
    assert not hasattr(ours.inner, "found_inf")
    assert float(ours.optimizer.loss_scale) == 2.0**6
    assert int(watched(ours.optimizer).steps_skipped) == 4


@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_the_device_decides_for_optimizers_alone_that_skip_by_themselves(cls, settings):
    if settings.get("fused"):
        assert cls.__name__ in ("Adam", "AdamW", "SGD", "Adagrad")
        return
    with pytest.raises(UnsupportedError, match=rf"{cls.__name__} .*fused=True"):
        Run(cls, settings, decide="device")


@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_its_state_is_saved_and_loaded_exactly(cls, settings):
    saved = Run(cls, settings, dynamic_growth_steps=3)
    for factor in (1.0, torch.inf, 0.5):
        saved.step(factor)
    loaded = Run(cls, settings, dynamic_growth_steps=3)
    plain = Run(cls, settings, alone)
    for run in (loaded, plain):
        # Once for each: PyTorch's optimizers keep the tensors that they are given.
        file = through_a_file({"model": saved.given, "optimizer": saved.optimizer.state_dict()})
        run.optimizer.load_state_dict(file["optimizer"])
        with torch.no_grad():
            for p, value in zip(run.given, file["model"], strict=True):
                p.copy_(value)
        assert run.snapshot() == saved.snapshot()
    assert bits(loaded.optimizer.state_dict()) == bits(saved.optimizer.state_dict())
    assert loaded.optimizer.iterations == 3
    assert loaded.optimizer.steps_skipped == 1
    for factor in (0.75, 1.0, 2.0):
        for run in (saved, loaded, plain):
            run.step(factor)
        assert loaded.snapshot() == plain.snapshot() == saved.snapshot()
        assert loaded.optimizer.loss_scale == saved.optimizer.loss_scale
    # A plain one hands on the scale that it was given; one that was given none leaves it.
    loaded.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert loaded.snapshot() == plain.snapshot()
    assert float(loaded.optimizer.loss_scale) == 2.0**9
    loaded.optimizer.load_state_dict(cls(plain.given, lr=0.125, **settings).state_dict())
    assert float(loaded.optimizer.loss_scale) == 2.0**9


# Several optimizers: behind one wrapper, and with one gradient scaler.


KINDS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
if hasattr(torch.optim, "Muon"):
    KINDS["Muon"] = lambda p: torch.optim.Muon(p, lr=0.1)

PAIRS = pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(KINDS, 2)))
BAD = [torch.inf, torch.nan]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = torch.nn.Linear(4, 4, bias=False)
        self.other = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.other(self.one(x))


def optimizers(model, pair):
    return [
        KINDS[kind](part.parameters()) for kind, part in zip(pair, model.children(), strict=True)
    ]


def loss_of(model, seed):
    torch.manual_seed(seed)
    return model(torch.randn(3, 4)).square().mean()


def train(model, optimizer, seeds, *, spoil=()):
    """Steps; in those of `spoil` the gradient of the second part has a bad number."""
    for seed in seeds:
        optimizer.zero_grad()
        optimizer.scale_loss(loss_of(model, seed)).backward()
        if seed in spoil:
            model.other.weight.grad[-1, -1] = BAD[seed % 2]
        optimizer.step()


def train_plain(model, parts, seeds, clip_norm=None):
    for seed in seeds:
        for part in parts:
            part.zero_grad()
        loss_of(model, seed).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for part in parts:
            part.step()


@PAIRS
@pytest.mark.parametrize("settings", [{}, {"decide": "device"}, {"clip_norm": 0.01}], ids=str)
def test_all_step_or_none_and_as_the_plain_ones(pair, settings):
    if "decide" in settings and not all("fused" in kind for kind in pair):
        pytest.skip("they do not skip by themselves")
    plain = Model()
    train_plain(plain, optimizers(plain, pair), (0, 2, 4), settings.get("clip_norm"))
    model = Model()
    optimizer = wrapped(optimizers(model, pair), **settings)
    # The first step of a parameter is decided on by the host.
    train(model, optimizer, range(5), spoil=(1, 3))
    if "clip_norm" in settings:
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    else:
        assert bits(model.state_dict()) == bits(plain.state_dict())
    assert (int(optimizer.steps_skipped), int(optimizer.iterations)) == (2, 5)
    assert float(optimizer.loss_scale) == 2.0**13


def copied(how, model, optimizer, pair):
    """Another model and optimizer that go on from a copy."""
    if how in ("deepcopy", "pickle"):
        return COPIES[how]((model, optimizer))
    other = Model()
    other.load_state_dict(model.state_dict())
    made = wrapped(optimizers(other, pair))
    if how == "torch.save":
        made.load_state_dict(through_a_file(optimizer.state_dict()))
    elif how == "by name":
        saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
        dcp.set_optimizer_state_dict(other, made, saved)
    else:
        for part, before in zip(made.optimizers, optimizer.optimizers, strict=True):
            part.load_state_dict(copy.deepcopy(before.state_dict()))
        made.loss_scale_state.load_state_dict(optimizer.loss_scale_state.state_dict())
    return other, made


@PAIRS
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "list", "by name"])
def test_resumed(pair, how):
    model = Model()
    optimizer = wrapped(optimizers(model, pair))
    train(model, optimizer, range(3), spoil=(1,))
    other, resumed = copied(how, model, optimizer, pair)
    for each in ((model, optimizer), (other, resumed)):
        train(*each, range(3, 6), spoil=(4,))
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert resumed.loss_scale_state.state_dict() == optimizer.loss_scale_state.state_dict()
    assert (int(resumed.steps_skipped), float(resumed.loss_scale)) == (2, 2.0**13)


WHICH = "optimizers.i..*0 is SGD, 1 is AdamW"


def test_they_are_seen_one_by_one():
    model = Model()
    sgd, adam = parts = optimizers(model, ("SGD", "AdamW"))
    optimizer = lossscale.LossScaleOptimizer(parts)
    assert type(optimizer) is lossscale.torch.LossScaleOptimizer
    assert list(optimizer) == optimizer.optimizers == parts
    assert len(optimizer) == 2
    single = wrapped(torch.optim.SGD([parameter()], lr=1.0))
    assert single
    with pytest.raises(TypeError, match="'SGD' has no len"):
        len(single)
    assert optimizer.param_groups == [*sgd.param_groups, *adam.param_groups]
    optimizer.param_groups[1]["lr"] = 0.25
    assert adam.param_groups[0]["lr"] == 0.25
    train(model, optimizer, [0])
    assert optimizer.state[model.one.weight] is sgd.state[model.one.weight]
    assert len(optimizer.state) == 2
    # What does not say which of them.
    saved = optimizer.state_dict()
    smaller, before = {**saved, "param_groups": saved["param_groups"][:1]}, bits(saved)
    for misuse, given, error, words in (
        (optimizer.add_param_group, {"params": [parameter()]}, errors.UnsupportedError, WHICH),
        (optimizer.load_state_dict, [{}] * 2, errors.StateDictError, "must be a dictionary"),
        (optimizer.load_state_dict, smaller, errors.ArgumentError, "do not match the optimizers"),
    ):
        with pytest.raises(error, match=words):
            misuse(given)
    assert bits(optimizer.state_dict()) == before


def test_schedules_and_hooks():
    model = Model()
    optimizer = wrapped(parts := optimizers(model, ("SGD", "AdamW fused")))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
    schedules += [torch.optim.lr_scheduler.ExponentialLR(part, 0.5) for part in parts]
    schedules = [lossscale.torch.guard(each, optimizer) for each in schedules]
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("all"))
    parts[0].register_step_post_hook(lambda *_: called.append("SGD"))
    optimizer.register_step_skipped_hook(lambda given: called.append(given.steps_skipped))
    for seed in range(3):
        train(model, optimizer, [seed], spoil=(1,))
        for schedule in schedules:
            schedule.step()
    assert called == ["all", "SGD", 1, "all", "SGD"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5 / 16, 0.1 / 16]


# With one gradient scaler.


@PAIRS
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_those_unscaled_together_are_all_stepped_or_none(pair, clip_norm):
    plain = Model()
    train_plain(plain, optimizers(plain, pair), (0, 2), clip_norm)
    model, scaler = Model(), GradScaler("cpu", init_scale=8.0)
    parts = optimizers(model, pair)
    for seed in range(3):
        for part in parts:
            part.zero_grad()
        scaler.scale(loss_of(model, seed)).backward()
        if seed == 1:
            model.other.weight.grad[0, 0] = torch.nan
        for part in parts:
            scaler.unscale_(part)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for part in parts:
            scaler.step(part)
        scaler.update()
        assert scaler.last_step_skipped is (seed == 1)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert (scaler.get_scale(), scaler.steps_skipped) == (4.0, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_zero_grad_without_arguments_is_called_without(count):
    class Own(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad()

    weights = [parameter() for _ in range(count)]
    inner = [Own([weight], lr=0.5) for weight in weights]
    optimizer = lossscale.LossScaleOptimizer(inner if count > 1 else inner[0])
    for left in (0.5, 0.0):
        train_step(optimizer, sum(weight.sum() for weight in weights), "verb")
        assert all(weight.tolist() == [left, left] for weight in weights)
