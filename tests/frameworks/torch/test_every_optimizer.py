"""Every optimizer that torch.optim has, in each of its implementations, found by looking."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frameworks.torch.support import bits, parameters, scaled, scaler, snapshot, wrapped
from lossscale.errors import UnsupportedError

STEPS = (torch.inf, 1.0, 0.5, torch.inf, -3.0, torch.nan, 0.75, -torch.inf, 1.25)
_STATEFUL = {"momentum": 0.5, "amsgrad": True, "centered": True, "weight_decay": 0.125}


def cases():
    for name, cls in vars(torch.optim).items():
        if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
            continue
        if cls is torch.optim.Optimizer:
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
        if cls is torch.optim.LBFGS:
            yield pytest.param(cls, {"line_search_fn": "strong_wolfe"}, id=f"{name}-wolfe")


CASES = list(cases())
FUSED = [case for case in CASES if case.values[1].get("fused")]
SHAPES = ((4, 3), (2, 5))
"""Matrices, because Muon takes no others."""
SCALES = {wrapped: "initial_scale", scaler: "init_scale"}


def alone(inner, **arguments):
    return inner


class Run:
    """An optimizer whose loss has given gradients, plus a little of the parameters themselves."""

    def __init__(self, cls, settings, wrap=wrapped, **arguments):
        self.given = parameters(*SHAPES)
        self.cls, self.evaluations = cls, 0
        inner = cls(self.given, lr=0.125, **settings)
        self.optimizer = wrap(inner, **{SCALES.get(wrap, "unused"): 2.0**10, **arguments})
        torch.manual_seed(1)
        self.targets = [torch.randn(shape) for shape in SHAPES]

    def closure(self, factor):
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
        return loss.detach()

    def step(self, factor):
        if self.cls is torch.optim.LBFGS:
            self.optimizer.step(lambda: self.closure(factor))
        else:
            self.closure(factor)
            self.optimizer.step()

    def snapshot(self):
        return snapshot(self.given, self.optimizer)


@pytest.mark.parametrize(
    ("cls", "settings", "decide"),
    [
        pytest.param(*case.values, decide, id=f"{case.id}-{decide}")
        for decide, cases in (("host", CASES), ("device", FUSED))
        for case in cases
    ],
)
def test_it_trains_as_without_loss_scaling_and_a_skip_changes_no_byte(cls, settings, decide):
    ours, plain = Run(cls, settings, decide=decide), Run(cls, settings, alone)
    for factor in STEPS:
        before, is_finite = ours.snapshot(), bool(torch.tensor(factor).isfinite())
        ours.step(factor)
        if is_finite:
            plain.step(factor)
        assert ours.snapshot() == (plain.snapshot() if is_finite else before)
        assert bool(ours.optimizer.last_step_skipped) is not is_finite
    assert not hasattr(ours.optimizer.inner_optimizer, "found_inf")
    assert int(ours.optimizer.steps_skipped) == 4
    # A closure whose loss is not finite is not evaluated again at another scale.
    assert float(ours.optimizer.loss_scale) == 2.0**6


# LBFGS needs a closure, which a scaler cannot give it.
OF_SCALERS = [case for case in CASES if case.values[0] is not torch.optim.LBFGS]


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize(("cls", "settings"), OF_SCALERS)
def test_with_a_scaler_it_trains_as_without_one(cls, settings, unscales):
    ours, plain = Run(cls, settings, scaler), Run(cls, settings, alone)
    for factor in STEPS:
        before, is_finite = ours.snapshot(), bool(torch.tensor(factor).isfinite())
        ours.closure(factor)
        if unscales:
            ours.optimizer.unscale()
        ours.optimizer.step()
        if is_finite:
            plain.step(factor)
        assert ours.snapshot() == (plain.snapshot() if is_finite else before)
    assert ours.optimizer.shown()[0] == 2.0**6


@pytest.mark.parametrize(
    ("cls", "settings"), [case for case in CASES if not case.values[1].get("fused")]
)
def test_the_device_decides_for_optimizers_alone_that_skip_by_themselves(cls, settings):
    with pytest.raises(UnsupportedError, match=rf"{cls.__name__} .*fused=True"):
        Run(cls, settings, decide="device")


@pytest.mark.parametrize(("cls", "settings"), FUSED)
def test_the_device_decides_without_the_host(cls, settings):
    """Once each parameter has its state, nothing is read by us; torch's single ones read a step."""

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Reads.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    def reads(run):
        Reads.count = 0
        run.closure(1.0)
        with Reads():
            run.optimizer.step()
        return Reads.count

    runs = [Run(cls, settings, decide="device"), Run(cls, settings, alone)]
    for run in runs:
        run.step(1.0)
    ours, plain = map(reads, runs)
    assert ours == plain


@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_its_state_is_saved_and_loaded_exactly(cls, settings, tmp_path):
    saved = Run(cls, settings, dynamic_growth_steps=3)
    for factor in (1.0, torch.inf, 0.5):
        saved.step(factor)
    torch.save(
        {"model": saved.given, "optimizer": saved.optimizer.state_dict()}, tmp_path / "file.pt"
    )
    loaded = Run(cls, settings, dynamic_growth_steps=3)
    plain = Run(cls, settings, alone)
    for run in (loaded, plain):
        # Once for each: PyTorch's optimizers keep the tensors that they are given.
        file = torch.load(tmp_path / "file.pt", weights_only=True)
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
    loaded.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert loaded.snapshot() == plain.snapshot()


def test_the_fused_ones_are_those_that_are_expected():
    assert {case.values[0].__name__ for case in FUSED} == {"Adam", "AdamW", "SGD", "Adagrad"}
    for case in FUSED:
        cls, settings = case.values
        assert cls(parameters((2, 2)), lr=0.1, **settings)._step_supports_amp_scaling
