"""What a monitor records of a loop, beside what is computed by hand."""

import contextlib
import copy
import math
import pickle

import pytest
import torch

import lossscale
from frameworks.torch.support import OURS, bits, parameter, sgd, shown, train_step, watched
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleWarning
from records import column

Monitor = lossscale.torch.Monitor


class Loop:
    """A loop of two parameters, whose gradients are given."""

    def __init__(self, how="wrapper"):
        self.a, self.b = parameter(2), parameter(3)
        self.named = [("layer.a", self.a), ("layer.b", self.b)]
        inner = sgd(self.a, self.b, lr=0.5, momentum=0.9)
        self.run = OURS[how](inner)
        self.inner, self.watched = inner, watched(self.run)

    def step(self, slope):
        loss = self.a.sum() + (self.b * torch.tensor([slope, 1.0, 0.0])).sum()
        train_step(self.run, loss)
        return 0.25 if slope == torch.inf else loss

    def kept(self):
        return bits([self.a, self.b, shown(self.run), self.inner.state_dict()["state"]])


@pytest.mark.parametrize("how", OURS)
def test_a_monitor_changes_nothing_and_finds_what_was_cleared_early(how):
    """What it records is in tests/conformance/test_monitors.py."""
    loop, plain = Loop(how), Loop(how)
    with Monitor(loop.watched, loop.named) as monitor:
        for slope in (1.0, torch.inf, torch.nan, 3.0):
            loss = loop.step(slope)
            loop.inner.zero_grad()
            said = pytest.warns(LossScaleWarning, match="loss of step 3 is nan")
            with said if slope != slope else contextlib.nullcontext():
                monitor.step(loss)
            plain.step(slope)
            names = [each.name for each in monitor.last_record.nonfinite]
            assert names == ["layer.b"] * (not math.isfinite(slope))
    assert loop.kept() == plain.kept()


def test_optimizers_that_share_a_scaler_are_one_step():
    scaler = lossscale.torch.GradScaler("cpu", init_scale=8.0)
    weights = [parameter(), parameter()]
    optimizers = [sgd(weight, lr=0.5) for weight in weights]
    named = list(zip(("first", "second"), weights, strict=True))
    with Monitor(scaler, named) as monitor:
        for slopes in ((torch.inf, torch.nan), (1.0, torch.inf), (1.0, 1.0)):
            total = sum((w * slope).sum() for w, slope in zip(weights, slopes, strict=True))
            scaler.scale(total).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            monitor.step(0.5)
            record = monitor.last_record
            wanted = [n for n, s in zip(("first", "second"), slopes, strict=True) if s != 1]
            assert [tensor.name for tensor in record.nonfinite] == wanted
            assert record.skipped == bool(wanted)
    assert (record.step, record.steps_skipped, record.next_scale) == (3, 2, 2.0)


def test_parameters_without_a_name_are_numbered():
    loop = Loop()
    with Monitor(loop.watched) as monitor:
        monitor.step(loop.step(torch.inf))
    assert str(monitor.last_record.nonfinite[0]) == "param_groups[0]['params'][1] (1 inf)"


@pytest.mark.parametrize("how", ["wrapper", "scaler"])
def test_what_is_watched_can_be_copied_and_is_let_go(how, tmp_path):
    """Calls without a step, and steps without gradients, are none."""
    loop = Loop(how)
    with Monitor(loop.watched, loop.named, tmp_path / "run.jsonl") as monitor:
        with pytest.raises(ArgumentError, match="already watches"):
            Monitor(loop.watched, loop.named)
        copies = [copy.deepcopy(loop.watched), pickle.loads(pickle.dumps(loop.watched))]
        assert all(not made._observers.have_monitor for made in copies)
        if how == "wrapper":
            loop.inner.zero_grad()
            loop.run.step()
        assert monitor.step() is None
        assert monitor.step(loop.step(1.0)).step == 1
        # As with accumulated gradients.
        assert monitor.step() is None
    assert column(tmp_path / "run.jsonl", "step") == [1]
    monitor.close()
    assert not loop.watched._observers.have_monitor
    Monitor(loop.watched, loop.named).close()


def test_mistakes_have_one_sentence():
    loop, scaler = Loop(), lossscale.torch.GradScaler
    for wrong in (loop.inner, torch.amp.GradScaler("cpu"), torch.nn.Linear(2, 1)):
        words = rf"Monitor\(optimizer, model\) watches.*{type(wrong).__name__}"
        with pytest.raises(ArgumentTypeError, match=words):
            Monitor(wrong, loop.named)
    for arguments, settings, words in (
        ((scaler("cpu"),), {}, "needs the model"),
        ((scaler("cpu", enabled=False), loop.named), {}, "disabled"),
        ((loop.watched, "model"), {}, "Expected a module, or"),
        ((loop.watched, loop.named), {"every": 0}, "`every`"),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
            Monitor(*arguments, **settings)
    monitor = Monitor(loop.watched, loop.named)
    with pytest.raises(ArgumentError, match="one element"):
        monitor.step(torch.ones(2))
    monitor.close()
    with pytest.raises(ArgumentError, match="This Monitor is closed"):
        monitor.step(0.5)
