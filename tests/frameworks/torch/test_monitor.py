"""What a monitor records of a loop, beside what is computed by hand."""

import contextlib
import copy
import math
import pickle
import re
import warnings

import pytest
import torch

import lossscale
from frameworks.torch.modules import batches_of, loss_fn, model_of
from frameworks.torch.support import bits
from histories import TrainingHistory
from lossscale.errors import (
    ArgumentError,
    ArgumentTypeError,
    LossScaleWarning,
    TrainingHaltedError,
)
from lossscale.diagnosis.torch import TorchRun as new_run

Monitor = lossscale.torch.Monitor
HOWS = ["wrapper", "fused", "clipping", "device", "scaler", "scaler, fused"]
SLOPES = (1.0, torch.inf, 2.0, torch.nan, 3.0, 1.0)
"""Of the loss on each step: what multiplies the gradient of `b`."""


def expected_warning(slope):
    if slope == slope:
        return contextlib.nullcontext()
    return pytest.warns(LossScaleWarning, match="loss of step 4 is nan")


class Loop:
    """A loop of two parameters, whose gradients are given."""

    def __init__(self, how="wrapper", initial=8.0):
        self.a = torch.nn.Parameter(torch.ones(2))
        self.b = torch.nn.Parameter(torch.ones(3))
        self.named = [("layer.a", self.a), ("layer.b", self.b)]
        fused = how in ("fused", "device", "scaler, fused")
        self.inner = torch.optim.SGD([self.a, self.b], lr=0.5, momentum=0.9, fused=fused)
        self.is_scaler = how.startswith("scaler")
        rule = lossscale.DynamicScale(initial, growth_interval=2)
        if self.is_scaler:
            self.watched = lossscale.torch.GradScaler("cpu", rule=rule)
        else:
            settings = {"decide": "device"} if how == "device" else {}
            if how == "clipping":
                settings["clip_norm"] = 1e3
            self.watched = lossscale.torch.LossScaleOptimizer(self.inner, rule=rule, **settings)

    def step(self, slope):
        loss = self.a.sum() + (self.b * torch.tensor([slope, 1.0, 0.0])).sum()
        self.inner.zero_grad()
        if self.is_scaler:
            self.watched.scale(loss).backward()
            self.watched.step(self.inner)
            self.watched.update()
        else:
            self.watched.scale_loss(loss).backward()
            self.watched.step()
        return 0.25 if slope == torch.inf else loss

    def kept(self):
        scale = self.watched.get_scale() if self.is_scaler else float(self.watched.loss_scale)
        return bits([self.a, self.b, scale, self.inner.state_dict()["state"]])


@pytest.mark.parametrize("how", HOWS)
def test_a_history_tells_what_happened_on_every_step(how, tmp_path):
    loop, plain = Loop(how), Loop(how)
    with Monitor(loop.watched, loop.named, tmp_path / "run.jsonl") as monitor:
        for slope in SLOPES:
            loss = loop.step(slope)
            with expected_warning(slope):
                monitor.step(loss)
            plain.step(slope)
            # Whoever clears the gradients early loses nothing.
            loop.inner.zero_grad()
    assert loop.kept() == plain.kept()
    history = TrainingHistory.read(tmp_path / "run.jsonl")
    records = history.records
    assert history.steps == [1, 2, 3, 4, 5, 6]
    assert history.scales == [8.0, 8.0, 4.0, 4.0, 2.0, 2.0]
    assert [record.next_scale for record in records] == [8.0, 4.0, 4.0, 2.0, 2.0, 4.0]
    assert [record.step for record in records if record.skipped] == [2, 4]
    assert [str(record.reason) for record in records if record.skipped] == ["overflow", "loss"]
    bad = [[(t.name, t.infs, t.nans) for t in record.nonfinite] for record in records]
    assert bad[1] == [("layer.b", 1, 0)]
    assert bad[3] == [("layer.b", 0, 1)]
    assert not any(bad[number] for number in (0, 2, 4, 5))
    assert records[-1].steps_skipped == 2


@pytest.mark.parametrize("how", ["wrapper", "scaler"])
def test_what_is_skipped_between_two_samples_is_recorded(how, tmp_path):
    loop = Loop(how)
    with Monitor(loop.watched, loop.named, tmp_path / "run.jsonl", every=4) as monitor:
        for slope in (1.0, torch.inf, 1.0, 1.0, 1.0, 1.0):
            monitor.step(loop.step(slope))
    history = TrainingHistory.read(tmp_path / "run.jsonl")
    assert history.steps == [1, 2, 4, 6]
    assert history.records[1].skipped
    assert history.records[1].scale == 8.0
    assert [str(tensor) for tensor in history.records[1].nonfinite] == ["layer.b (1 inf)"]
    assert history.records[-1].loss is not None


@pytest.mark.parametrize("how", ["wrapper", "scaler"])
def test_a_run_that_is_resumed_goes_on_in_its_file(how, tmp_path):
    path, first = tmp_path / "run.jsonl", Loop(how)
    with Monitor(first.watched, first.named, path) as monitor:
        for slope in (1.0, torch.inf):
            monitor.step(first.step(slope))
    again = Loop(how)
    again.watched.load_state_dict(first.watched.state_dict())
    before = {"steps_before": 2} if how == "scaler" else {}
    with Monitor(again.watched, again.named, path, append=True, **before) as monitor:
        monitor.step(again.step(torch.inf))
    history = TrainingHistory.read(path)
    assert history.steps == [1, 2, 3]
    assert history.scales == [8.0, 8.0, 4.0]
    assert history.records[-1].steps_skipped == 2


def test_optimizers_that_share_a_scaler_are_one_step():
    scaler = lossscale.torch.GradScaler("cpu", init_scale=8.0)
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    named = [("first", weights[0]), ("second", weights[1])]
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


def test_lbfgs_is_watched():
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.LBFGS([weight], max_iter=3))

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        optimizer.scale_loss(loss).backward()
        return loss

    with Monitor(optimizer) as monitor:
        monitor.step(optimizer.step(closure))
    assert (monitor.last_record.step, monitor.last_record.scale) == (1, 2.0**15)


def test_parameters_without_names_are_numbered():
    loop = Loop()
    with Monitor(loop.watched) as monitor:
        monitor.step(loop.step(torch.inf))
    assert str(monitor.last_record.nonfinite[0]) == "param_groups[0]['params'][1] (1 inf)"


def test_alarms_warn_and_end_training(tmp_path):
    loop = Loop(initial=1.0)
    path = tmp_path / "run.jsonl"
    monitor = Monitor(loop.watched, loop.named, path, max_consecutive_skips=2)
    with pytest.warns(LossScaleWarning, match=r"layer\.b"):
        monitor.step(loop.step(torch.inf))
    with pytest.raises(TrainingHaltedError, match="2 steps in a row"):
        monitor.step(loop.step(torch.inf))
    monitor.close()
    assert TrainingHistory.read(path).steps == [1, 2]


def test_steps_without_gradients_are_none(tmp_path):
    loop = Loop()
    with Monitor(loop.watched, loop.named, tmp_path / "run.jsonl") as monitor:
        loop.inner.zero_grad()
        loop.watched.step()
        monitor.step()
        monitor.step(loop.step(1.0))
        monitor.step()
    assert TrainingHistory.read(tmp_path / "run.jsonl").steps == [1]


@pytest.mark.parametrize("how", ["wrapper", "scaler"])
def test_what_is_watched_can_be_copied_and_is_let_go(how):
    loop = Loop(how)
    monitor = Monitor(loop.watched, loop.named)
    with pytest.raises(ArgumentError, match="watched already"):
        Monitor(loop.watched, loop.named)
    copies = [copy.deepcopy(loop.watched), pickle.loads(pickle.dumps(loop.watched))]
    assert all("_watcher" not in vars(made) for made in copies)
    monitor.close()
    monitor.close()
    assert "_watcher" not in vars(loop.watched)
    Monitor(loop.watched, loop.named).close()


def test_tensorboard_gets_what_the_file_gets(tmp_path):
    pytest.importorskip("tensorboardX")
    loop = Loop()
    with Monitor(loop.watched, loop.named, tensorboard=tmp_path / "board") as m:
        m.step(loop.step(1.0))
    assert list((tmp_path / "board").iterdir())


def test_gradients_are_measured_at_the_scale_in_use(tmp_path):
    model, batches = model_of("layer norm"), batches_of("layer norm", 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = lossscale.torch.LossScaleOptimizer(inner, rule=lossscale.FixedScale(4.0))
    path = tmp_path / "run.jsonl"
    settings = {"every": 100, "measure_every": 4, "loss_fn": loss_fn, "data": batches[0]}
    with Monitor(optimizer, model, path, **settings) as monitor:
        assert monitor.wrong_at() is None
        for _ in range(5):
            optimizer.zero_grad()
            optimizer.scale_loss(loss_fn(model, batches[0])).backward()
            optimizer.step()
            before = bits([model.state_dict(), [p.grad for p in model.parameters()]])
            monitor.step(0.5)
            assert bits([model.state_dict(), [p.grad for p in model.parameters()]]) == before
        run = new_run(model, loss_fn)
        assert monitor.wrong_at() == wrong_at(run, batches[0], 4.0)["loss"]
    records = TrainingHistory.read(path).records
    found = [(r.step, r.wrong is not None) for r in records]
    assert found == [(1, True), (4, True), (5, False)]
    assert records[1].wrong == monitor.wrong_at()


class Six(torch.nn.Module):
    """Layers whose forward pass ends in one of the ways below."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.wide = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 1)
        with torch.no_grad():
            self.wide.weight.copy_(torch.eye(4) * 6e4)

    def forward(self, x):
        hidden = self.first(x)
        if self.kind in ("forward", "tanh"):
            hidden = self.wide(10 * hidden)
        if self.kind == "tanh":
            # The derivative of the square is infinite, times 0.
            hidden = torch.tanh(hidden * hidden)
        return self.head(hidden)


def six_loss(model, x):
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    if model.kind == "loss":
        large = out * 1e3 + 3e4
        return (large * large).mean()
    if model.kind == "backward":
        return out.float().mean() * 1e9
    if model.kind == "log":
        return torch.log(out.float() * 0).mean()
    return out.float().square().mean()


SIX = [
    ("forward", r"cannot help: wide \(linear\) gives inf in float16, on the batch of step 3\."),
    ("tanh", r"cannot help: wide \(linear\) gives inf in float16, on the batch of step 3\."),
    ("loss", r"cannot help: .*gives inf in float16, on the batch of step 3\."),
    ("nan", r"cannot help: first \(linear\) is not finite, in float32 too, on the batch of step 3"),
    ("log", r"cannot help: Six \(log\) is not finite, in float32 too, on the batch of step 3"),
    ("backward", r"at the lowest loss scale, 1, .* DynamicScale\(min_scale=2\.0\*\*-24\)"),
]


def watched_six(kind, *, with_batch=True, steps=8):
    torch.manual_seed(1)
    model, x = Six(kind), torch.randn(8, 4)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = lossscale.torch.LossScaleOptimizer(inner, initial_scale=16.0)
    bad = x * float("nan") if kind == "nan" else x
    with (
        warnings.catch_warnings(record=True) as said,
        Monitor(optimizer, model, loss_fn=six_loss, data=x) as monitor,
    ):
        warnings.simplefilter("always", LossScaleWarning)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = six_loss(model, bad)
            optimizer.scale_loss(loss).backward()
            optimizer.step()
            monitor.step(loss, batch=bad if with_batch else None)
    assert int(optimizer.steps_skipped) == steps
    return [str(each.message) for each in said if each.category is LossScaleWarning]


@pytest.mark.parametrize(("kind", "words"), SIX, ids=[kind for kind, _ in SIX])
def test_what_is_not_the_scale_is_named(kind, words):
    said = watched_six(kind)
    assert re.search(words, said[-1]), said
    # Before it there is at most what the loss said at once.
    assert [line for line in said[:-1] if "The loss of step 1 is" not in line] == []
    assert any("cannot help" in line for line in said) == (kind != "backward")


def test_a_batch_that_was_not_given_is_not_taken_for_the_one_that_failed():
    assert (
        "the batch `data`, not that of the skipped step"
        in watched_six("forward", with_batch=False)[-1]
    )
    # That of `data` is good.
    assert not any("cannot help" in line for line in watched_six("nan", with_batch=False))


def test_a_batch_that_cannot_be_measured_does_not_keep_another_from_being_looked_at():
    torch.manual_seed(1)
    model, x = Six("nan"), torch.randn(8, 4)
    optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    settings = {"measure_every": 1, "loss_fn": six_loss}
    for data, words in (
        (x[:, :3], "mat1 and mat2"),
        (x * math.nan, "the loss is not"),
    ):
        with (
            warnings.catch_warnings(record=True) as said,
            Monitor(optimizer, model, data=data, **settings) as monitor,
        ):
            warnings.simplefilter("always", LossScaleWarning)
            for _ in range(4):
                optimizer.zero_grad()
                loss = six_loss(model, x * math.nan)
                optimizer.scale_loss(loss).backward()
                optimizer.step()
                monitor.step(loss, batch=x * math.nan)
            with pytest.raises((RuntimeError, ValueError), match=words):
                monitor.wrong_at()
        messages = [str(each.message) for each in said if each.category is LossScaleWarning]
        assert sum("not measured any more" in line and words in line for line in messages) == 1
        assert "first (linear) is not finite, in float32 too" in messages[-1]


def test_a_model_that_does_not_run_in_float16_trains_on():
    model, batches = model_of("linear"), batches_of("linear", 1)
    optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def only_wide(model, batch):
        if torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("no kernel")
        return loss_fn(model, batch)

    settings = {"measure_every": 1, "loss_fn": only_wide, "data": batches[0]}
    with Monitor(optimizer, model, **settings) as monitor:
        optimizer.scale_loss(loss_fn(model, batches[0])).backward()
        optimizer.step()
        with pytest.warns(LossScaleWarning, match="any more, .* NotImplementedError: no kernel"):
            monitor.step(0.5)
        optimizer.scale_loss(loss_fn(model, batches[0])).backward()
        optimizer.step()
        monitor.step(0.5)
    assert monitor.last_record.step == 2


def test_mistakes_have_one_sentence():
    loop = Loop()
    with pytest.raises(ArgumentTypeError, match=r"Wrap it: lossscale\.torch\.LossScaleOptimizer"):
        Monitor(loop.inner, loop.named)
    with pytest.raises(ArgumentTypeError, match="takes the place of PyTorch's"):
        Monitor(torch.amp.GradScaler("cpu"), loop.named)
    with pytest.raises(ArgumentTypeError, match=r"comes second: Monitor\(optimizer, model\)"):
        Monitor(torch.nn.Linear(2, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    with pytest.raises(ArgumentTypeError, match="give Monitor the model"):
        Monitor(lossscale.torch.GradScaler("cpu"))
    with pytest.raises(ArgumentError, match="disabled"):
        Monitor(lossscale.torch.GradScaler("cpu", enabled=False), loop.named)
    with pytest.raises(ArgumentTypeError, match="Parameters are named by"):
        Monitor(loop.watched, "model")
    with pytest.raises(ArgumentError, match="`every`"):
        Monitor(loop.watched, loop.named, every=0)
    with pytest.raises(ArgumentError, match="needs `data`"):
        Monitor(loop.watched, loop.named, measure_every=2)
    with pytest.raises(ArgumentError, match="needs `loss_fn`"):
        Monitor(loop.watched, loop.named, data=torch.ones(2))
    with pytest.raises(ArgumentTypeError, match=r"must be a torch\.nn\.Module"):
        Monitor(loop.watched, loop.named, loss_fn=loss_fn)
    monitor = Monitor(loop.watched, loop.named)
    with pytest.raises(ArgumentError, match="one element"):
        monitor.step(torch.ones(2))


def test_it_is_shown_in_one_line():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = lossscale.LossScaleOptimizer(torch.optim.SGD([parameter], lr=0.1), initial_scale=8)
    with Monitor(optimizer) as monitor:
        assert repr(monitor) == "<Monitor: no step was sampled yet>"
        optimizer.scale_loss(parameter.sum() * torch.inf).backward()
        optimizer.step()
        monitor.step(1.0)
    assert repr(monitor) == "<Monitor: at step 1 loss scale 4, 1 steps skipped>"


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        ((), {"evry": 3}, "A monitor has no argument `evry`: did you mean `every`?"),
        ((), {"histograms": True}, "A monitor has no argument `histograms`: it takes path, every"),
        (("run.jsonl",), {}, "The file of a history is path='run.jsonl'."),
    ],
)
def test_what_a_monitor_does_not_take_is_answered_with_what_to_write(arguments, keywords, said):
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = lossscale.LossScaleOptimizer(torch.optim.SGD([parameter], lr=0.1))
    with pytest.raises(ArgumentTypeError) as raised:
        Monitor(optimizer, *arguments, **keywords)
    assert said in str(raised.value)
