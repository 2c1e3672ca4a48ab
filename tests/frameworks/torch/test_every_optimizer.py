"""Every optimizer that torch.optim has, in each of its implementations, found by looking."""

import inspect

import pytest
import torch

from frameworks.torch.support import (
    Reads,
    alone,
    bits,
    parameters,
    scaled,
    scaler,
    snapshot,
    through_a_file,
    wrapped,
)
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


class Run:
    """An optimizer whose loss has given gradients, plus a little of the parameters themselves."""

    def __init__(self, cls, settings, wrap=wrapped, **arguments):
        self.given = parameters(*SHAPES)
        self.cls, self.evaluations = cls, 0
        self.inner = cls(self.given, lr=0.125, **settings)
        self.optimizer = wrap(self.inner, **{SCALES.get(wrap, "unused"): 2.0**10, **arguments})
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

    def step(self, factor, unscales=False):
        if self.cls is torch.optim.LBFGS:
            self.optimizer.step(lambda: self.closure(factor))
            return
        self.closure(factor)
        if unscales:
            self.optimizer.unscale()
        self.optimizer.step()

    def snapshot(self):
        return snapshot(self.given, self.optimizer)


# LBFGS needs a closure, which a scaler cannot give it.
OF_SCALERS = [case for case in CASES if case.values[0] is not torch.optim.LBFGS]
WAYS = {"host": CASES, "device": FUSED, "scaler": OF_SCALERS, "scaler, unscaled": OF_SCALERS}


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
    # A closure whose loss is not finite is not evaluated again at another scale.
    if has_scaler:
        assert (ours.optimizer.shown()[0], ours.optimizer.scaler.steps_skipped) == (2.0**6, 4)
    else:
        assert float(ours.optimizer.loss_scale) == 2.0**6
        assert int(ours.optimizer.steps_skipped) == 4


@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_the_device_decides_without_the_host_for_optimizers_alone_that_skip_by_themselves(
    cls, settings
):
    """Once each parameter has its state, nothing is read by us; torch's single ones read a step."""

    def reads(run):
        run.step(1.0)
        run.closure(1.0)
        with Reads() as found:
            run.optimizer.step()
        return found.count

    if settings.get("fused"):
        assert cls.__name__ in ("Adam", "AdamW", "SGD", "Adagrad")
        assert reads(Run(cls, settings, decide="device")) == reads(Run(cls, settings, alone))
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
    loaded.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert loaded.snapshot() == plain.snapshot()
