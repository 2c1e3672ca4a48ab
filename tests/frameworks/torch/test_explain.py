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

import lossscale
from broken_blocks import FAULTS, INPUT, WEIGHTS, mean_square, mistakes, verdicts
from frameworks.torch.explain_cases import CASES, INF, judged, program
from frameworks.torch.support import bits
from lossscale.monitoring import Cause, Explanation


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


@pytest.mark.filterwarnings("ignore:Step 1 was skipped", "ignore:A skipped step has left")
@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named(name):
    model, (args, kwargs), loss_fn = program(name)
    found = step_on(*monitored(model, CASES[name].scale), lambda: loss_fn(model(*args, **kwargs)))
    assert judged(name, found) == (True, True, True), f"{found.cause}: {found}"


# --- It changes nothing --------------------------------------------------------------------------


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
        self.total = torch.zeros(8)
        self.generator, self.own_random = torch.Generator(), random.Random(3)
        self.own_numpy, self.own_old_numpy = np.random.default_rng(3), np.random.RandomState(3)
        self.array, self.object = np.zeros(2), types.SimpleNamespace(calls=0, seen=[])
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
        noise = random.random() + np.random.randn() + torch.rand((), generator=self.generator)
        noise += self.own_random.random() + self.own_numpy.random() + self.own_old_numpy.rand()
        self.array += 1
        self.object.calls += 1
        self.object.seen.append(self.calls)
        return self.last(hidden) * (1 + noise * torch.rand(()))


def by_wrapper(model, rule, scale_loss):
    optimizer = lossscale.LossScaleOptimizer(torch.optim.AdamW(model.parameters()), rule=rule)

    def step(losses):
        optimizer.zero_grad()
        for loss in losses:
            if scale_loss:
                optimizer.scale_loss(loss()).backward()
            else:
                optimizer.backward(loss())
        optimizer.step()

    return optimizer, step


def by_scaler(model, rule):
    inner = torch.optim.AdamW(model.parameters())
    scaler = lossscale.torch.GradScaler("cpu", rule=rule)

    def step(losses):
        inner.zero_grad()
        for loss in losses:
            scaler.scale(loss()).backward()
        scaler.step(inner)
        scaler.update()

    return scaler, step


WAYS = {
    "backward": lambda model, rule: by_wrapper(model, rule, False),
    "scale_loss": lambda model, rule: by_wrapper(model, rule, True),
    "scaler": by_scaler,
}
FALLING = lossscale.DynamicScale(initial_scale=2.0**24, growth_interval=3)


def trained(way, explain, micro_batches, guarded):
    """Everything that a run of five steps leaves behind, and what was explained."""
    torch.manual_seed(0)
    model, called = Eventful(), []
    watched, step = WAYS[way](model, FALLING)
    model.first.register_forward_hook(lambda *_: called.append("forward"))
    model.last.register_full_backward_hook(lambda *_: called.append("backward"))
    model.first.weight.register_hook(lambda gradient: called.append("gradient"))
    nn.modules.module.register_module_forward_hook(lambda *_: None).remove()
    if guarded:
        lossscale.torch.guard(model, watched)
    random.seed(1)
    np.random.seed(1)
    monitor = lossscale.torch.Monitor(watched, model, explain=explain, on_floor="ignore")
    causes = []

    def loss():
        x = torch.randn(6, 4)
        with torch.autocast("cpu", torch.float16):
            return model(x).float().pow(2).mean()

    for _ in range(5):
        step([loss] * micro_batches)
        monitor.step(1.0)
        causes.append(str(monitor.explanation.cause) if explain else "")
    tensors = {n: bits(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    kept = {n: v for n, v in vars(model).items() if isinstance(v, (int, list, dict, set))}
    plain = {n: repr(v) for n, v in kept.items() if not n.startswith("_")}
    states = random.getstate(), str(np.random.get_state()), bits(torch.get_rng_state())
    own = model.own_random.getstate(), str(model.own_numpy.bit_generator.state)
    own += (str(model.own_old_numpy.get_state()), model.array.tolist(), repr(model.object))
    states += (*own, bits(model.generator.get_state()))
    gradients = [bits(p.grad) if p.grad is not None else None for p in model.parameters()]
    return (tensors, plain, bits(model.total), states, called, gradients), causes


@pytest.mark.parametrize(("micro_batches", "guarded"), [(1, False), (2, True)])
@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same_with_and_without(way, micro_batches, guarded):
    plain, _ = trained(way, 0, micro_batches, guarded)
    found, causes = trained(way, 1000, micro_batches, guarded)
    for one, other in zip(plain, found, strict=True):
        assert one == other
    assert causes[0] == "scale"


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


def of_a_tensor():
    made = torch.zeros(2)
    return made, lambda: setattr(made, "data", made.data + 1)


HOLDERS = {
    "slots": lambda: [Slotted()] * 2,
    "a function": lambda: [counter()] * 2,
    "a list in a list": lambda: (lambda one: (one, lambda: one[0].append(1)))([[]]),
    "bytes": lambda: (lambda one: (one, lambda: one.append(1)))(bytearray()),
    "the data of a tensor": of_a_tensor,
    "the bits of a generator": lambda: (lambda one: (one, one.random_raw))(np.random.PCG64(0)),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_a_forward_pass_writes_to_is_put_back(name):
    left = []
    for explain in (0, 9):
        model, optimizer, monitor = small(explain=explain)
        # The only reference that training has is in the module.
        model.kept, write = HOLDERS[name]()
        model.forward = lambda x, model=model, write=write: (write(), model[1](model[0](x)))[1]
        for _ in range(3):
            step_of(model, optimizer, monitor, ONES, factor=1e9)
        assert not explain or monitor.explanation.cause == Cause.SCALE
        seen = getattr(model.kept, "calls", None), getattr(model.kept, "seen", None)
        left.append((seen, repr(getattr(model.kept, "state", model.kept)).partition(" at ")[0]))
    assert left[0] == left[1]


@pytest.mark.filterwarnings("ignore:Step .* was skipped", "ignore:The loss of step")
def test_a_pass_is_repeated_with_the_numbers_of_python_and_numpy():
    model, optimizer, monitor = small()
    model.forward = lambda x: model[1](
        model[0](x) * (1e6 if random.random() + np.random.rand() > 1 else 1.0)
    )
    found = [step_of(model, optimizer, monitor, ONES) for _ in range(12)]
    assert {str(each.cause) for each in found if each} == {"forward overflow"}


def small(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, *monitored(model, **settings)


def step_of(model, optimizer, monitor, *inputs, factor=1.0):
    losses = [lambda x=x: model(x).float().pow(2).mean() * factor for x in inputs]
    return step_on(optimizer, monitor, *losses)


ONES = torch.ones(2, 4)


@pytest.mark.filterwarnings("ignore:Step .* was skipped", "ignore:The loss of step")
def test_a_model_may_be_compiled_before_and_after():
    model, optimizer, monitor = small()
    assert step_of(model, optimizer, monitor, ONES * INF).cause == Cause.BATCH
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = step_of(compiled, optimizer, monitor, ONES * INF)
    assert found.cause in (Cause.UNKNOWN, Cause.BATCH)
    step_of(compiled, optimizer, monitor, ONES)
    assert not optimizer.last_step_skipped
    model.compile(backend="eager", fullgraph=True)
    found = step_of(model, optimizer, monitor, ONES * INF)
    assert "compiled" in found.text
    monitor.close()


@pytest.mark.filterwarnings("ignore:Step .* was skipped", "ignore:The loss of step")
def test_after_that_many_skips_the_hooks_are_gone():
    model, optimizer, monitor = small(explain=2)
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    assert hooks == (1, 1)
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


@pytest.mark.filterwarnings("ignore:Step .* was skipped")
def test_of_several_micro_batches_the_first_that_failed_is_named():
    model, optimizer, monitor = small()
    found = step_of(model, optimizer, monitor, ONES, ONES * INF, ONES * INF)
    assert found.cause == Cause.BATCH
    assert "In call 2 of 3 of the model" in found.text


@pytest.mark.filterwarnings("ignore:Step .* was skipped", "ignore:The loss of step")
def test_a_monitor_may_be_called_after_each_micro_batch():
    model, optimizer, monitor = small()
    for x in (ONES * INF, ONES):
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().pow(2).mean()
        optimizer.backward(loss)
        monitor.step(loss)
    optimizer.step()
    monitor.step(loss)
    assert monitor.explanation.cause == Cause.BATCH


@pytest.mark.filterwarnings("ignore:The loss of step")
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (10, "need more than explain_bytes=10 of Monitor."),
        (10 * 2**15, "explain_bytes=327680 of Monitor, and the others are finite"),
    ],
)
def test_more_bytes_than_the_limit_are_not_held(limit, words):
    model, optimizer, monitor = small(explain_bytes=limit)
    found = step_of(model, optimizer, monitor, *[ONES] * 20, ONES * INF)
    assert found.cause == Cause.UNKNOWN
    assert words in found.text
    assert not monitor._explainer.calls._calls


def test_the_logits_beside_a_loss_are_not_differentiated_twice():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            logits = self.linear(x)
            return {"loss": logits.float().logsumexp(-1).mean() * 1e6, "logits": logits}

    torch.manual_seed(0)
    model = WithLoss()
    found = step_on(*monitored(model), lambda: model(ONES)["loss"])
    assert (found.cause, found.operation) == (Cause.SCALE, "backward of _to_copy")
    # That of the bias, which is the sum over both rows.
    largest = model(ONES)["logits"].softmax(-1).max().item() * 1e6 * 2**15
    assert found.halvings == math.ceil(math.log2(largest / 65504))


@pytest.mark.filterwarnings("ignore:Step 2 was skipped")
def test_masked_outputs_are_not_a_fault():
    """The actions that a policy may not take have a logit of minus infinity."""
    model, optimizer, monitor = small()
    model.forward = lambda x: model[0](x).masked_fill(torch.arange(4) == 1, -INF)
    for factor, cause in ((1e9, Cause.SCALE), (INF, Cause.LOSS)):
        found = step_on(
            optimizer,
            monitor,
            lambda factor=factor: -model(ONES).float().log_softmax(-1)[:, 0].mean() * factor,
        )
        assert found.cause == cause


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("parts", "was not called in this step as model"),
        ("weights", "another optimizer has changed the weights"),
        ("inputs", "arguments of the model were written to"),
        ("state", "returns something else"),
        ("gradient", "is finite when it is repeated"),
        ("raises", "cannot be repeated"),
        ("generator", "cannot pickle 'generator' object"),
    ],
)
def test_what_cannot_be_repeated_is_unknown_and_says_why(change, why):
    model, optimizer, monitor = small()
    x, calls = ONES * (1 if change in ("state", "gradient") else INF), []

    def forward(x):
        calls.append(x)
        y = model[1](model[0](x))
        if change == "state" and len(calls) == 1:
            return y * INF
        if change == "raises" and len(calls) > 1:
            raise ValueError("only once")
        return y

    if change in ("state", "raises"):
        model.forward = forward
    if change == "generator":
        model.batches = (x for _ in range(3))
    with torch.autocast("cpu", torch.float16):
        output = forward(x) if change == "parts" else model(x)
    optimizer.backward(output.float().pow(2).mean())
    if change == "weights":
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    if change == "inputs":
        x.zero_()
    if change == "gradient":
        optimizer.scale_loss(model[0].weight.sum() * INF).backward()
    optimizer.step()
    monitor.step()
    assert optimizer.last_step_skipped
    assert monitor.explanation.cause == Cause.UNKNOWN
    assert why in monitor.explanation.text


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


@pytest.mark.filterwarnings("ignore:Step .* was skipped", "ignore:The loss of step")
def test_arguments_in_a_dataclass_and_a_state_that_the_model_keeps_are_named():
    model, optimizer, monitor = small()
    model.forward = lambda batch: model[1](model[0](batch.x)) + model.state["h"][0]
    model.state = {"h": [torch.zeros(1)]}
    found = step_of(model, optimizer, monitor, Batch(ONES * INF))
    assert (found.cause, found.operation) == (Cause.BATCH, "batch.x")
    model.state["h"][0] = torch.tensor([math.nan])
    found = step_of(model, optimizer, monitor, Batch(ONES))
    assert (found.cause, found.module) == (Cause.WEIGHTS, "state.h.0")


def test_copies_and_files_of_a_model_have_no_recorder():
    model, optimizer, monitor = small()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(ONES)
        step_of(model, optimizer, monitor, ONES)
    monitor.close()


# --- Where it is said ----------------------------------------------------------------------------


def test_an_explanation_is_in_the_record_the_file_and_a_warning(tmp_path):
    model, optimizer, monitor = small(path=tmp_path / "records.jsonl")
    with pytest.warns(lossscale.LossScaleWarning, match=r"Step 2 was skipped\. The argument input"):
        [step_of(model, optimizer, monitor, x) for x in (ONES, ONES * INF, ONES, ONES * INF)]
    monitor.close()
    records = lossscale.monitoring.read_records(tmp_path / "records.jsonl")
    assert [record.explanation is not None for record in records] == [False, True, False, True]
    assert records[3].explanation == monitor.explanation
    saved = records[1].to_dict()["explanation"]
    assert saved["cause"] == "batch"
    assert saved["text"] == records[1].explanation.text
    assert records[1].reason == "loss"


def test_a_text_begins_with_a_capital_unless_a_name_does():
    for reason, text in (("the pass", "The pass."), ("t (add) fails", "t (add) fails.")):
        assert Explanation(Cause.SCALE, reason, operation="add", module="t").text == text


def test_a_record_between_samples_has_the_explanation_of_its_step():
    model, optimizer, monitor = small(every=100)
    with pytest.warns(lossscale.LossScaleWarning, match="Step 2 was skipped"):
        [step_of(model, optimizer, monitor, x) for x in (ONES, ONES * INF, ONES)]
    records = []
    monitor._recorder.settings = dataclasses.replace(
        monitor._recorder.settings, log=lambda record: records.append(record)
    )
    monitor.close()
    assert [record["step"] for record in records] == [2, 3]
    assert records[0]["explanation"]["cause"] == "batch"


def test_the_warning_at_the_lowest_scale_names_explain_and_diagnose():
    for explain, words in ((0, "explain=20"), (1, "The argument input")):
        model, optimizer, monitor = small(scale=1.0, explain=explain)
        optimizer = lossscale.LossScaleOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), initial_scale=1.0
        )
        monitor = lossscale.torch.Monitor(optimizer, model, explain=explain)
        x = ONES * INF
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().pow(2).mean()
        optimizer.backward(loss)
        optimizer.step()
        with pytest.warns(lossscale.LossScaleWarning, match=words):
            monitor.step()


def test_arguments_that_cannot_be_used():
    model, optimizer, monitor = small()
    monitor.close()
    with pytest.raises(lossscale.errors.ArgumentError, match="`explain` must be an integer"):
        lossscale.torch.Monitor(optimizer, model, explain=True)
    with pytest.raises(TypeError, match="`explain` needs the model"):
        lossscale.torch.Monitor(optimizer, explain=20)
    with pytest.raises(lossscale.errors.ArgumentError, match="`explain_bytes`"):
        lossscale.torch.Monitor(optimizer, model, explain=1, explain_bytes=0)


# --- The function for one batch ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize("name", CASES)
def test_one_batch_is_explained_like_a_step(name):
    model, (args, kwargs), loss_fn = program(name)
    before = {n: bits(t) for n, t in (*model.named_parameters(), *model.named_buffers())}

    def loss_of(model, batch):
        return loss_fn(model(*batch[0], **batch[1]))

    found = lossscale.torch.explain(model, loss_of, (args, kwargs), scale=CASES[name].scale)
    assert {n: bits(t) for n, t in (*model.named_parameters(), *model.named_buffers())} == before
    assert all(p.grad is None for p in model.parameters())
    expected = CASES[name]
    if expected.causes == "loss":
        assert str(found.cause) in ("loss", "singular")
        assert "explain_cases.py" in found.text
    elif expected.operations:
        assert judged(name, found)[1:] == (True, True) or found.cause == Cause.BATCH
    if expected.causes != "loss":
        assert judged(name, found)[0]


SHARED = "abs arange exp log matmul mean rsqrt softmax sqrt sum tanh where"
NUMPY = types.SimpleNamespace(
    **{name: getattr(torch, name) for name in SHARED.split()},
    inf=INF,
    maximum=torch.clamp,
    transpose=torch.t,
)


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.gain = function, nn.Parameter(torch.tensor(WEIGHTS["gain"]))

    def forward(self, h):
        return self.function(NUMPY, h, self.gain.to(h.dtype))


class Layers(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up, self.block = nn.Linear(8, 16, bias=False), Block(function)
        self.head = nn.Linear(16, 2, bias=False)
        for layer, name in ((self.up, "up"), (self.head, "head")):
            layer.weight.data = torch.tensor(WEIGHTS[name].T.copy())

    def forward(self, x):
        return self.head(self.block(self.up(x)))


@pytest.mark.filterwarnings("ignore:Step 1 was skipped", "ignore:The loss of step")
@pytest.mark.parametrize("name", FAULTS)
def test_a_block_is_named_in_training_and_for_one_batch(name):
    fault = FAULTS[name]
    model, x = Layers(fault.block), torch.tensor(INPUT * np.float32(fault.size))

    def loss_fn(model, x):
        return (fault.loss or mean_square)(NUMPY, model(x).float())

    found = lossscale.torch.explain(model, loss_fn, x, scale=fault.scale)
    assert not mistakes(name, found), found.text
    report = lossscale.torch.diagnose(model, loss_fn, [x])
    # What float32 does not mend is not measured.
    assert report.verdict in verdicts(name), report
    # What is hidden skips nothing.
    scale = 2.0**30 if fault.is_hidden else fault.scale
    skipped = step_on(*monitored(model, scale), lambda: loss_fn(model, x))
    if fault.is_hidden:
        assert skipped.cause == Cause.SCALE
        assert f"Besides, {found.reason}" in skipped.text
        return
    # The loss function is not a part of the model.
    wrong = mistakes(name, skipped)
    assert wrong == (["operation"] if fault.loss else []), skipped.text


def test_only_the_given_parameters_are_differentiated():
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def loss_fn(model, x):
        return ((model[0](x) * 0).sqrt() + model[1](x)).float().mean()

    for number, cause in enumerate((Cause.SINGULAR, Cause.UNKNOWN)):
        given = {"parameters": model[number].parameters()}
        assert lossscale.torch.explain(model, loss_fn, ONES, **given).cause == cause


def test_a_finite_batch_is_unknown_and_mistakes_are_named():
    model = nn.Linear(4, 1)
    found = lossscale.torch.explain(model, lambda model, x: model(x).mean(), ONES)
    assert found.cause == Cause.UNKNOWN
    assert "finite at a scale of 32768" in found.text
    with pytest.raises(TypeError, match="one element"):
        lossscale.torch.explain(model, lambda model, x: model(x), ONES)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        lossscale.torch.explain(lambda x: x, model, ONES)
