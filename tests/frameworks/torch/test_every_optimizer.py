"""Every optimizer that torch.optim has, in each of its implementations, found by looking."""

import inspect

import pytest
import torch

from frameworks.torch.support import bits, parameters, snapshot, wrapped

STEPS = (1.0, 0.5, torch.inf, -3.0, torch.nan, 0.75, -torch.inf, 1.25)
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
        if cls is torch.optim.LBFGS:
            yield pytest.param(cls, {"line_search_fn": "strong_wolfe"}, id=f"{name}-wolfe")


CASES = list(cases())
SHAPES = ((4, 3), (2, 5))
"""Matrices, because Muon takes no others."""


class Run:
    """An optimizer whose loss has given gradients, plus a little of the parameters themselves."""

    def __init__(self, cls, settings, wrap, **arguments):
        self.given = parameters(*SHAPES)
        self.sparse = cls is torch.optim.SparseAdam
        self.evaluates = cls is torch.optim.LBFGS
        inner = cls(self.given, lr=0.125, **settings)
        self.optimizer = wrapped(inner, initial_scale=2.0**10, **arguments) if wrap else inner
        torch.manual_seed(1)
        self.targets = [torch.randn(shape) for shape in SHAPES]

    def loss(self, factor):
        return sum(
            (((p - t) ** 2).sum() * factor) for p, t in zip(self.given, self.targets, strict=True)
        )

    def closure(self, factor):
        self.optimizer.zero_grad()
        loss = self.loss(factor)
        scaled = self.optimizer.scale_loss(loss) if self.wraps else loss
        scaled.backward()
        if self.sparse:
            for p in self.given:
                p.grad = p.grad.to_sparse(1)
        return loss.detach()

    @property
    def wraps(self):
        return hasattr(self.optimizer, "scale_loss")

    def step(self, factor):
        if self.evaluates:
            self.optimizer.step(lambda: self.closure(factor))
        else:
            self.closure(factor)
            self.optimizer.step()


@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_it_trains_as_without_loss_scaling_and_a_skip_changes_no_byte(cls, settings):
    scaled, plain = Run(cls, settings, True), Run(cls, settings, False)
    skipped = 0
    for factor in STEPS:
        before = snapshot(scaled.given, scaled.optimizer)
        scaled.step(factor)
        if torch.tensor(factor).isfinite():
            plain.step(factor)
            assert snapshot(scaled.given, scaled.optimizer) == snapshot(
                plain.given, plain.optimizer
            )
            assert not scaled.optimizer.last_step_skipped
        else:
            skipped += 1
            assert snapshot(scaled.given, scaled.optimizer) == before
            assert scaled.optimizer.last_step_skipped
    assert scaled.optimizer.steps_skipped == skipped == 3
    # A closure whose loss is not finite is not evaluated again at another scale.
    assert float(scaled.optimizer.loss_scale) == 2.0 ** (10 - skipped)


@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_its_state_is_saved_and_loaded_exactly(cls, settings, tmp_path):
    saved = Run(cls, settings, True, dynamic_growth_steps=3)
    for factor in (1.0, torch.inf, 0.5):
        saved.step(factor)
    torch.save(
        {"model": saved.given, "optimizer": saved.optimizer.state_dict()}, tmp_path / "file.pt"
    )
    loaded = Run(cls, settings, True, dynamic_growth_steps=3)
    plain = Run(cls, settings, False)
    for run in (loaded, plain):
        # Once for each: PyTorch's optimizers keep the tensors that they are given.
        file = torch.load(tmp_path / "file.pt", weights_only=True)
        run.optimizer.load_state_dict(file["optimizer"])
        with torch.no_grad():
            for p, value in zip(run.given, file["model"], strict=True):
                p.copy_(value)
    for run in (loaded, plain):
        assert snapshot(run.given, run.optimizer) == snapshot(saved.given, saved.optimizer)
    assert bits(loaded.optimizer.state_dict()) == bits(saved.optimizer.state_dict())
    assert loaded.optimizer.iterations == 3
    assert loaded.optimizer.steps_skipped == 1
    for factor in (0.75, 1.0, 2.0):
        for run in (saved, loaded, plain):
            run.step(factor)
        assert snapshot(loaded.given, loaded.optimizer) == snapshot(saved.given, saved.optimizer)
        assert snapshot(plain.given, plain.optimizer) == snapshot(saved.given, saved.optimizer)
        assert loaded.optimizer.loss_scale == saved.optimizer.loss_scale
    loaded.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert bits(loaded.optimizer.state_dict()["state"]) == bits(
        plain.optimizer.state_dict()["state"]
    )


FUSED = [case for case in CASES if case.values[1].get("fused")]


@pytest.mark.parametrize(("cls", "settings"), FUSED)
def test_a_fused_one_skips_by_itself_where_the_device_decides(cls, settings):
    scaled, plain = Run(cls, settings, True, decide="device"), Run(cls, settings, False)
    for factor in (torch.inf, *STEPS):
        before = snapshot(scaled.given, scaled.optimizer)
        scaled.step(factor)
        if torch.tensor(factor).isfinite():
            plain.step(factor)
            before = snapshot(plain.given, plain.optimizer)
        assert snapshot(scaled.given, scaled.optimizer) == before
    assert not hasattr(scaled.optimizer.inner_optimizer, "found_inf")
    assert int(scaled.optimizer.steps_skipped) == 4
    assert float(scaled.optimizer.loss_scale) == 2.0**6


def test_the_fused_ones_are_those_that_are_known():
    assert {case.values[0].__name__ for case in FUSED} == {"Adam", "AdamW", "SGD", "Adagrad"}
    for case in FUSED:
        cls, settings = case.values
        assert cls(parameters((2, 2)), lr=0.1, **settings)._step_supports_amp_scaling
