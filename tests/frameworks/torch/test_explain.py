"""Why a step was skipped: the operation, by name."""

import copy
import dataclasses
import math
import pickle
import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import broken_blocks
import lossscale
from broken_blocks import FAULTS, SHARED
from frameworks.torch.explain_cases import CASES, INF, mistakes, program
from frameworks.torch.support import bits
from lossscale.monitoring import Cause, Explanation

pytestmark = pytest.mark.filterwarnings(
    "ignore:Step .* was skipped", "ignore:The loss of step", "ignore:A skipped step has left"
)


@pytest.fixture(autouse=True)
def _without_onednn():
    """It has no float16 GRU."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def monitored(model, scale=2.0**15, explain=20, **settings):
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = lossscale.LossScaleOptimizer(inner, rule=lossscale.FixedScale(scale, True))
    settings = {"explain": explain, "on_floor": "ignore", **settings}
    return optimizer, lossscale.torch.Monitor(optimizer, model, **settings)


def step_on(optimizer, monitor, *losses):
    """Takes a step; returns the explanation, and None if the step was not skipped."""
    optimizer.zero_grad()
    for compute in losses:
        with torch.autocast("cpu", torch.float16):
            loss = compute()
        optimizer.backward(loss)
    optimizer.step()
    monitor.step(loss)
    return monitor.explanation if optimizer.last_step_skipped else None


def small(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, *monitored(model, **settings)


def step_of(model, optimizer, monitor, *inputs, factor=1.0):
    losses = [lambda x=x: model(x).float().pow(2).mean() * factor for x in inputs]
    return step_on(optimizer, monitor, *losses)


ONES = torch.ones(2, 4)


# --- Faults, in training and in one batch --------------------------------------------------------


def values(model):
    return {n: bits(t) for n, t in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named(name):
    model, given, loss_fn = program(name)
    before, scale = values(model), CASES[name].scale
    found = lossscale.torch.explain(model, lambda m, x: loss_fn(m(**x)), given, scale=scale)
    assert values(model) == before
    assert all(p.grad is None for p in model.parameters())
    if CASES[name].causes == "loss":
        assert str(found.cause) in ("loss", "singular")
        assert "explain_cases.py" in found.text
    else:
        # An argument of the loss function is a part of the batch.
        assert not mistakes(name, found) or found.cause == Cause.BATCH
    found = step_on(*monitored(model, scale), lambda: loss_fn(model(**given)))
    assert not mistakes(name, found), f"{found.cause}: {found}"


NUMPY = types.SimpleNamespace(
    **{name: getattr(torch, name) for name in SHARED.split() if hasattr(torch, name)},
    inf=INF,
)
NUMPY.maximum, NUMPY.transpose = torch.clamp, torch.t


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.function, self.gain = fault.block, nn.Parameter(torch.tensor(fault.weights["gain"]))

    def forward(self, h):
        return self.function(NUMPY, h, self.gain.to(h.dtype))


@pytest.mark.parametrize("name", FAULTS)
def test_a_block_is_named(name):
    fault = FAULTS[name]
    up, head = nn.Linear(8, 16, bias=False), nn.Linear(16, 2, bias=False)
    for layer, key in ((up, "up"), (head, "head")):
        layer.weight.data = torch.tensor(fault.weights[key].T.copy())
    model, x = nn.Sequential(), torch.tensor(fault.batch)
    for key, layer in (("up", up), ("block", Block(fault)), ("head", head)):
        model.add_module(key, layer)

    def loss_fn(model, x):
        return fault.loss(NUMPY, model(x).float())

    def explain(scale):
        return lossscale.torch.explain(model, loss_fn, x, scale=scale)

    def explain_in_training(scale):
        return step_on(*monitored(model, scale), lambda: loss_fn(model, x))

    broken_blocks.check(name, explain, lambda: lossscale.torch.diagnose(model, loss_fn, [x]))
    if fault.is_hidden:
        # Such a step is not skipped.
        assert f"Besides, {explain(1.0).reason}" in explain_in_training(2.0**30).text
    else:
        # The loss function is not a part of the model.
        wrong = broken_blocks.mistakes(name, explain_in_training(fault.scale))
        assert wrong == ["operation"] * ("loss" in fault.causes)


# --- It changes nothing --------------------------------------------------------------------------


GENERATOR = torch.Generator()


class Slotted:
    __slots__ = ("calls", "seen")

    def __init__(self):
        self.calls, self.seen = 0, []

    def __call__(self):
        self.calls += 1
        self.seen.append(self.calls)


def counter():
    calls = 0

    def write(seen=[]):  # noqa: B006
        nonlocal calls
        calls += 1
        seen.append(calls)
        write.calls = calls, list(seen)
        return later if calls < 0 else None

    if calls:
        later = None
    return write


class Eventful(nn.Module):
    """A forward pass that draws, counts, appends and writes wherever a module can."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(8, 1)
        self.renormed = nn.Embedding(3, 8, max_norm=0.5)
        self.calls, self.sizes, self.by_name, self.own_hooks = 0, [], {"deep": [[], {}]}, set()
        self.total, self.numbers = torch.zeros(8), torch.zeros(2)
        self.generator, self.random = torch.Generator(), random.Random(3)
        self.numpy, self.old_numpy = np.random.default_rng(3), np.random.RandomState(3)
        self.array, self.object = np.zeros(2), types.SimpleNamespace(calls=0, seen=[])
        self.slots, self.function, self.bytes = Slotted(), counter(), bytearray()
        # Only one of the references that training has to it is in the module.
        one = [[]]
        self.lists, self.append = one, lambda: one[0].append(1)
        self.bit_generator = np.random.PCG64(0)
        self.register_buffer("codes", torch.zeros(8))

    def forward(self, x):
        hidden = self.norm(self.first(x))
        hidden = self.dropout(self.spectral(hidden)) + self.old_spectral(hidden)
        hidden = checkpoint(torch.tanh, hidden, use_reentrant=False)
        hidden = hidden + self.renormed(torch.arange(6) % 3).to(hidden.dtype)
        self.calls += 1
        self.sizes.append(len(x))
        self.by_name["deep"][0].append(self.calls)
        self.by_name["deep"][1][self.calls] = True
        self.own_hooks.add(self.calls)
        with torch.no_grad():
            self.total += hidden.float().nan_to_num(0, 0, 0).mean(0)
            self.codes = self.codes + 1
        self.numbers.data = self.numbers.data + 1
        noise = random.random() + np.random.randn() + torch.rand((), generator=self.generator)
        noise += torch.rand((), generator=GENERATOR)
        noise += self.random.random() + self.numpy.random() + self.old_numpy.rand()
        self.array += 1
        self.object.calls += 1
        self.object.seen.append(self.calls)
        self.slots()
        self.function()
        self.bytes.append(1)
        self.append()
        self.bit_generator.random_raw()
        return self.last(hidden) * (1 + noise * torch.rand(()))

    def left(self):
        """All that it has written."""
        kept = (
            *(self.calls, self.sizes, self.by_name, self.own_hooks, self.object, self.bytes),
            *(self.slots.calls, self.slots.seen, self.function.calls, self.lists),
            *(self.array.tolist(), self.numbers.tolist(), self.total.tolist()),
            *(self.random.getstate(), self.numpy.bit_generator.state, self.old_numpy.get_state()),
            *(self.bit_generator.state, bits(self.generator.get_state())),
            bits(GENERATOR.get_state()),
        )
        return repr(kept)


def trained(way, explain, micro_batches, guarded):
    """Everything that a run of five steps leaves behind, and what was explained."""
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(1)
    GENERATOR.manual_seed(1)
    model, called = Eventful(), []
    rule = lossscale.DynamicScale(initial_scale=2.0**24, growth_interval=3)
    inner = torch.optim.AdamW(model.parameters())
    if way == "scale":
        watched = lossscale.torch.GradScaler("cpu", rule=rule)
    else:
        watched = lossscale.LossScaleOptimizer(inner, rule=rule)
    model.first.register_forward_hook(lambda *_: called.append("forward"))
    model.last.register_full_backward_hook(lambda *_: called.append("backward"))
    model.first.weight.register_hook(lambda gradient: called.append("gradient"))
    if guarded:
        lossscale.torch.guard(model, watched)
    monitor = lossscale.torch.Monitor(watched, model, explain=explain, on_floor="ignore")
    causes = []
    for _ in range(5):
        (inner if way == "scale" else watched).zero_grad()
        for _ in range(micro_batches):
            x = torch.randn(6, 4)
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().pow(2).mean()
            if way == "backward":
                watched.backward(loss)
            else:
                getattr(watched, way)(loss).backward()
        watched.step(*[inner] * (way == "scale"))
        if way == "scale":
            watched.update()
        monitor.step(1.0)
        causes.append(str(monitor.explanation.cause) if explain else "")
    states = repr((random.getstate(), np.random.get_state())), bits(torch.get_rng_state())
    gradients = [bits(p.grad) if p.grad is not None else None for p in model.parameters()]
    return (values(model), model.left(), states, called, gradients), causes


@pytest.mark.parametrize(
    ("way", "micro_batches", "guarded"),
    [("backward", 1, False), ("scale_loss", 2, True), ("scale", 2, False), ("scale", 1, True)],
)
def test_training_is_the_same_with_and_without(way, micro_batches, guarded):
    plain, _ = trained(way, 0, micro_batches, guarded)
    found, causes = trained(way, 1000, micro_batches, guarded)
    for one, other in zip(plain, found, strict=True):
        assert one == other
    assert causes[0] == "scale"


def test_a_pass_is_repeated_with_the_numbers_of_python_and_numpy():
    model, optimizer, monitor = small()
    model.forward = lambda x: model[1](
        model[0](x) * (1e6 if random.random() + np.random.rand() > 1 else 1.0)
    )
    found = [step_of(model, optimizer, monitor, ONES) for _ in range(12)]
    assert {str(each.cause) for each in found if each} == {"forward overflow"}


def test_a_model_may_be_compiled_before_and_after_and_copied():
    model, optimizer, monitor = small()
    assert step_of(model, optimizer, monitor, ONES * INF).cause == Cause.BATCH
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = step_of(compiled, optimizer, monitor, ONES * INF)
    assert found.cause in (Cause.UNKNOWN, Cause.BATCH)
    step_of(compiled, optimizer, monitor, ONES)
    assert not optimizer.last_step_skipped
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(ONES)
        step_of(model, optimizer, monitor, ONES)
    model.compile(backend="eager", fullgraph=True)
    assert "compiled" in step_of(model, optimizer, monitor, ONES * INF).text
    monitor.close()


# --- How many, and where it is said --------------------------------------------------------------


def test_after_that_many_skips_the_hooks_are_gone():
    model, optimizer, monitor = small(explain=2)
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == (1, 1)
    for number in range(4):
        step_of(model, optimizer, monitor, ONES * INF)
        assert (monitor.last_record.explanation is not None) == (number < 2)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_single_skips_because_of_the_scale_count_five_times():
    model, optimizer, monitor = small(explain=7)
    for number in range(12):
        found = step_of(model, optimizer, monitor, ONES, factor=1e9)
        assert found.cause == Cause.SCALE
        assert monitor.last_record.explanation is found
        if number < 11:
            step_of(model, optimizer, monitor, ONES)
    assert model._forward_hooks
    # In a row they count.
    for _ in range(3):
        step_of(model, optimizer, monitor, ONES, factor=1e9)
    assert not model._forward_hooks


def test_an_explanation_is_in_the_record_the_file_and_a_warning(tmp_path):
    model, optimizer, monitor = small(path=tmp_path / "records.jsonl")
    with pytest.warns(lossscale.LossScaleWarning, match=r"Step 2 was skipped\. The argument input"):
        [step_of(model, optimizer, monitor, x) for x in (ONES, ONES * INF, ONES, ONES * INF)]
    monitor.close()
    records = lossscale.monitoring.read_records(tmp_path / "records.jsonl")
    assert [record.explanation is not None for record in records] == [False, True, False, True]
    assert records[3].explanation == monitor.explanation
    saved = records[1].to_dict()["explanation"]
    assert (saved["cause"], saved["text"]) == ("batch", records[1].explanation.text)
    assert records[1].reason == "loss"


def test_a_record_between_samples_has_the_explanation_of_its_step():
    records = []
    model, optimizer, monitor = small(every=100, log=records.append)
    [step_of(model, optimizer, monitor, x) for x in (ONES, ONES * INF, ONES)]
    monitor.close()
    assert [record["step"] for record in records][-2:] == [2, 3]
    assert records[-2]["explanation"]["cause"] == "batch"


@pytest.mark.parametrize(("explain", "words"), [(0, "explain=20"), (1, "The argument input")])
def test_the_warning_at_the_lowest_scale_names_explain_and_diagnose(explain, words):
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = lossscale.LossScaleOptimizer(inner, initial_scale=1.0)
    monitor = lossscale.torch.Monitor(optimizer, model, explain=explain)
    with torch.autocast("cpu", torch.float16):
        optimizer.backward(model(ONES * INF).float().mean())
    optimizer.step()
    with pytest.warns(lossscale.LossScaleWarning, match=words):
        monitor.step()


def test_arguments_that_cannot_be_used():
    model, optimizer, monitor = small()
    monitor.close()
    for settings, words in (
        ({"model": model, "explain": True}, "`explain` must be an integer"),
        ({"explain": 20}, "`explain` needs the model"),
        ({"model": model, "explain": 1, "explain_bytes": 0}, "`explain_bytes`"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            lossscale.torch.Monitor(optimizer, **settings)
    for call, words in (
        (lambda: lossscale.torch.explain(model[0], lambda m, x: m(x), ONES), "one element"),
        (lambda: lossscale.torch.explain(lambda x: x, model, ONES), r"must be a torch\.nn\.Module"),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    found = lossscale.torch.explain(model, lambda model, x: model(x).mean(), ONES)
    assert found.cause == Cause.UNKNOWN
    assert "finite at a scale of 32768" in found.text
    for reason, text in (("the pass", "The pass."), ("t (add) fails", "t (add) fails.")):
        assert Explanation(Cause.SCALE, reason, operation="add", module="t").text == text


def test_only_the_given_parameters_are_differentiated():
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def loss_fn(model, x):
        assert model.training
        return ((model[0](x) * 0).sqrt() + model[1](x)).float().mean()

    model.eval()
    for number, cause in enumerate((Cause.SINGULAR, Cause.UNKNOWN)):
        given = {"parameters": model[number].parameters()}
        assert lossscale.torch.explain(model, loss_fn, ONES, **given).cause == cause
    assert not model.training


# --- Programs of which each has an explanation of its own ----------------------------------------


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class Program:
    """A model with a monitor, whose forward pass may be replaced."""

    def __init__(self, **settings):
        self.model, self.optimizer, self.monitor = small(**settings)
        self.calls = 0

    def plain(self, x):
        return self.model[1](self.model[0](x))

    def replaced(self, forward):
        def counted(x):
            self.calls += 1
            return forward(x)

        self.model.forward = counted
        return self

    def backward(self, x, called=None, factor=1.0):
        with torch.autocast("cpu", torch.float16):
            y = (called or self.model)(x).float()
            # Outputs may be masked.
            loss = (y.log_softmax(-1)[:, 0] if y.shape[1] > 1 else y.pow(2)).mean() * factor
        self.optimizer.backward(loss)
        return loss

    def takes(self, *inputs, before_the_step=lambda: None, **how):
        for x in inputs:
            loss = self.backward(x, **how)
        before_the_step()
        self.optimizer.step()
        self.monitor.step(loss)
        assert self.optimizer.last_step_skipped
        return self


BROKEN, UNLIKE = ONES * INF, torch.tensor([[1.0] * 4, [0.0] * 4])


def with_state(program):
    program.model.state = {"h": [torch.tensor([math.nan])]}
    return program.replaced(lambda x: program.plain(x) + program.model.state["h"][0]).takes(ONES)


def with_a_generator(program):
    program.model.batches = (x for x in ONES)
    return program.takes(BROKEN)


def masked(program):
    """The actions that a policy may not take have a logit of minus infinity."""
    return program.replaced(
        lambda x: (program.model[0](x) * 1e-3 * 1e3).masked_fill(torch.arange(4) == 1, -INF)
    )


UNKNOWN = {
    "need more than explain_bytes=10 of Monitor.": lambda p: Program(explain_bytes=10).takes(
        *[ONES] * 20, BROKEN
    ),
    "explain_bytes=327680 of Monitor, and the others are finite": lambda p: Program(
        explain_bytes=10 * 2**15
    ).takes(*[ONES] * 20, BROKEN),
    "was not called in this step as model": lambda p: p.takes(BROKEN, called=p.plain),
    "another optimizer has changed the weights": lambda p: p.takes(
        BROKEN, before_the_step=torch.optim.SGD(p.model.parameters(), lr=0.0).step
    ),
    "arguments of the model were written to": lambda p: p.takes(
        x := BROKEN.clone(), before_the_step=x.zero_
    ),
    "returns something else": lambda p: p.replaced(
        lambda x: p.plain(x) * (INF if p.calls == 1 else 1)
    ).takes(ONES),
    "is finite when it is repeated": lambda p: p.takes(
        ONES,
        before_the_step=lambda: p.optimizer.scale_loss(p.model[0].weight.sum() * INF).backward(),
    ),
    "cannot be repeated (ZeroDivisionError: ": lambda p: p.replaced(
        lambda x: p.plain(x) / (1 // (2 - p.calls))
    ).takes(BROKEN),
    "cannot pickle 'generator' object": with_a_generator,
}
PROGRAMS = {words: (Cause.UNKNOWN, program) for words, program in UNKNOWN.items()} | {
    "In call 2 of 3 of the model": (Cause.BATCH, lambda p: p.takes(ONES, BROKEN, BROKEN)),
    "In call 1 of 2 of the model": (
        Cause.BATCH,
        # Some call the monitor after each micro-batch.
        lambda p: (p.monitor.step(p.backward(BROKEN)), p.takes(ONES))[1],
    ),
    "The argument x.x": (
        Cause.BATCH,
        lambda p: p.replaced(lambda x: p.plain(x.x)).takes(Batch(BROKEN)),
    ),
    # One of several outputs of an operation gets no gradient.
    "at a loss scale of 32768, 1 of their": (
        Cause.SCALE,
        lambda p: p.replaced(lambda x: p.plain(x).chunk(2)).takes(
            ONES, called=lambda x: p.model(x)[0], factor=1e9
        ),
    ),
    "state.h.0 of the model": (Cause.WEIGHTS, with_state),
    "The outputs of the model are finite": (
        Cause.LOSS,
        lambda p: masked(p).takes(ONES, factor=INF),
    ),
    "of their gradients, in float16, overflow": (
        Cause.SCALE,
        lambda p: masked(p).takes(ONES, factor=1e9),
    ),
    "The forward pass is finite": (Cause.SCALE, lambda p: masked(p).takes(ONES)),
    "1 of their gradients, in float16, overflow": (
        Cause.SCALE,
        # The other one is near the largest number.
        lambda p: p.takes(UNLIKE, factor=2.5 / p.plain(UNLIKE).abs().max().item()),
    ),
}


@pytest.mark.parametrize("words", PROGRAMS)
def test_a_program_is_explained(words):
    cause, run = PROGRAMS[words]
    program = run(Program())
    assert program.monitor.explanation.cause == cause
    assert words in program.monitor.explanation.text
    assert not program.monitor._explainer.calls._calls


def test_the_logits_beside_a_loss_are_not_differentiated_twice():
    class WithLoss(nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            return {"loss": logits.float().logsumexp(-1).mean() * 1e6, "logits": logits}

    torch.manual_seed(0)
    model = WithLoss(4, 3)
    found = step_on(*monitored(model), lambda: model(ONES)["loss"])
    assert (found.cause, found.operation) == (Cause.SCALE, "backward of _to_copy")
    # That of the bias, which is the sum over both rows.
    largest = model(ONES)["logits"].softmax(-1).max().item() * 1e6 * 2**15
    assert found.halvings == math.ceil(math.log2(largest / 65504))
