"""Why a step was skipped: the operation, by name."""

import copy
import dataclasses
import functools
import math
import pickle
import queue
import random
import sys
import threading
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import broken_blocks
import lossscale
from broken_blocks import FAULTS, SHARED
from frameworks.torch.support import DEVICE, OURS, bits
from lossscale.monitoring import Cause, Explanation
from lossscale.monitoring.origins import Call, Evaluation
from lossscale.torch import isolation
from lossscale.torch import monitor as monitor_module

pytestmark = [
    pytest.mark.usefixtures("on_the_device"),
    pytest.mark.filterwarnings(
        "ignore:Step .* was", "ignore:The loss of step", "ignore:A skipped step has left"
    ),
]
INF = math.inf
ONES = torch.ones(2, 4, device=DEVICE)
UNLIKE = torch.tensor([[1.0] * 4, [0.0] * 4], device=DEVICE)
BROKEN = ONES * INF


def square(model, x):
    return model(x).float().pow(2).mean()


def distance_to_infinity(model, x):
    return (model(x).float() - INF).pow(2).mean()


def times(factor):
    return lambda model, x: square(model, x) * factor


class Program:
    """A model that is trained with a monitor, and whose forward pass may be replaced."""

    def __init__(self, model=None, scale=2.0**15, rule=None, **settings):
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        rule = rule or lossscale.FixedScale(scale, skip_nonfinite=True)
        self.optimizer = lossscale.LossScaleOptimizer(inner, rule=rule)
        settings = {"on_floor": "ignore", **settings}
        self.monitor = lossscale.torch.Monitor(self.optimizer, self.model, **settings)
        self.calls = 0

    def plain(self, x):
        return self.model[1](self.model[0](x))

    def backward(self, x, loss=square):
        self.loss, self.batch = loss, x
        with torch.autocast(DEVICE, torch.float16):
            value = loss(self.model, x)
        self.optimizer.backward(value)
        return value

    def step(self, *inputs, loss=square, forward=None, before=lambda: None):
        """Takes a step; returns the explanation, and None if it was not skipped."""

        def counted(x):
            self.calls += 1
            return forward(x)

        if forward:
            self.model.forward = counted
        for x in inputs:
            value = self.backward(x, loss)
        before()
        self.optimizer.step()
        self.monitor.step(value)
        self.optimizer.zero_grad()
        if not self.optimizer.last_step_skipped:
            return None
        scale = self.monitor.last_record.scale
        return lossscale.torch.explain(self.model, self.loss, self.batch, scale=scale)


# --- Faults, in training and in one batch --------------------------------------------------------

NUMPY = types.SimpleNamespace(
    **{name: getattr(torch, name) for name in SHARED.split() if hasattr(torch, name)}, inf=INF
)
NUMPY.maximum, NUMPY.transpose = torch.clamp, torch.t


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.function, self.gain = fault.block, nn.Parameter(torch.tensor(fault.weights["gain"]))

    def forward(self, h):
        return self.function(NUMPY, h, self.gain.to(h.dtype))


# Its autocast computes powers, sums and reciprocals in float32, its kernels round otherwise, and
# it rounds a divisor without dimensions to float16.
NOT_ON_CUDA = {
    "a sum that overflows in some rows",
    "a mean of which the sum overflows",
    "a power",
    "a sigmoid whose power overflows",
    "the inverse of a small number",
    "scale: 1 of their gradients, in float16, overflow",
    "scale: (backward of Divided) overflows",
}


def on_this_device(names):
    return [name for name in names if DEVICE == "cpu" or name not in NOT_ON_CUDA]


def values(model):
    return bits([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("name", on_this_device(FAULTS))
def test_a_block_is_named(name):
    fault = FAULTS[name]
    model, x = nn.Sequential(), torch.tensor(fault.batch)
    model.add_module("up", nn.Linear(8, 16, bias=False))
    model.add_module("block", Block(fault))
    model.add_module("head", nn.Linear(16, 2, bias=False))
    for key in ("up", "head"):
        model.get_submodule(key).weight.data = torch.tensor(fault.weights[key].T.copy())
    before = values(model)

    def loss_fn(model, x):
        return fault.loss(NUMPY, model(x).float())

    def explain(scale):
        return lossscale.torch.explain(model, loss_fn, x, scale=scale)

    def explain_in_training(scale):
        return Program(model, scale).step(x, loss=loss_fn)

    broken_blocks.check(fault, explain, lambda: lossscale.torch.diagnose(model, loss_fn, [x]))
    assert values(model) == before
    assert all(p.grad is None for p in model.parameters())
    if fault.is_hidden:
        # Such a step is not skipped.
        assert f"Besides, {explain(1.0).reason}" in explain_in_training(2.0**30).text
        return
    # The loss function is not a part of the model.
    is_in_the_loss = fault.block is broken_blocks.plain and "loss" in fault.causes
    assert not is_in_the_loss or "line " in explain(fault.scale).text
    wrong = broken_blocks.mistakes(fault, explain_in_training(fault.scale))
    assert wrong == ["operation"] * is_in_the_loss


# --- It changes nothing --------------------------------------------------------------------------


def counter():
    calls = 0

    def write(seen=[]):  # noqa: B006
        nonlocal calls
        calls += 1
        seen.append(calls)
        write.calls = calls, list(seen)
        return later if calls < 0 else write.calls

    if calls:
        later = None
    return write


def write_to_data(tensor):
    tensor.data = tensor.data + 1
    return tensor.tolist()


GENERATOR = torch.Generator()
# How a state of a model is made, and how it is changed, which returns what it is then.
STATES = {
    "nested": (lambda: {"deep": [[], set()]}, lambda it: it["deep"][0].append(1) or repr(it)),
    "bytes": (bytearray, lambda it: it.append(1) or repr(it)),
    "object": (types.SimpleNamespace, lambda it: vars(it).update({repr(it): 1}) or repr(it)),
    "function": (counter, lambda it: it()),
    "array": (lambda: np.zeros(2), lambda it: it.__iadd__(1).tolist()),
    "tensor": (lambda: torch.zeros(2), lambda it: it.add_(1).tolist()),
    "data": (lambda: torch.zeros(2), write_to_data),
    "raw": (lambda: np.random.PCG64(0), lambda it: it.random_raw()),
}
GENERATORS = {
    "torch": (torch.Generator, lambda it: torch.rand((), generator=it, device="cpu").item()),
    "python": (lambda: random.Random(3), lambda it: it.random()),
    "numpy": (lambda: np.random.default_rng(3), lambda it: it.random()),
    "old": (lambda: np.random.RandomState(3), lambda it: it.rand()),
    "of the program": (
        lambda: None,
        lambda it: torch.rand((), generator=GENERATOR, device="cpu").item(),
    ),
}


class Eventful(nn.Module):
    """A forward pass that draws, counts, appends and writes wherever a module can."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(8, 1)
        self.renormed, self.calls = nn.Embedding(3, 8, max_norm=0.5), 0
        self.register_buffer("codes", torch.zeros(8))
        # Of the references to its list, only one is in the module.
        one = [[]]
        self.lists, self.append = one, lambda: one[0].append(1)
        for name, (make, _) in (STATES | GENERATORS).items():
            setattr(self, name, make())

    def forward(self, x):
        hidden = self.norm(self.first(x))
        hidden = self.dropout(self.spectral(hidden)) + self.old_spectral(hidden)
        hidden = checkpoint(torch.tanh, hidden, use_reentrant=False)
        hidden = hidden + self.renormed(torch.arange(6) % 3).to(hidden.dtype)
        self.calls += 1
        self.append()
        noise = random.random() + np.random.randn() + sum(self.changed(GENERATORS))
        with torch.no_grad():
            self.codes = self.codes + 1
            self.changed(STATES)
        return self.last(hidden) * (1 + noise * torch.rand(()))

    def changed(self, states):
        return [change(getattr(self, name)) for name, (_, change) in states.items()]

    def left(self):
        """What its states are, after one more change."""
        return repr((self.calls, self.lists, self.changed(STATES | GENERATORS)))


def trained(way, explain, micro_batches, guarded):
    """Everything that a run of five steps leaves behind, and what was explained."""
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(1)
    GENERATOR.manual_seed(1)
    model, called, causes = Eventful(), [], []
    rule = lossscale.DynamicScale(initial_scale=2.0**24, growth_interval=3)
    trainer = OURS[way](torch.optim.AdamW(model.parameters()), rule=rule)
    watched = trainer.watched
    model.first.register_forward_hook(lambda *_: called.append("forward"))
    model.last.register_full_backward_hook(lambda *_: called.append("backward"))
    model.first.weight.register_hook(lambda gradient: called.append("gradient"))
    if guarded:
        lossscale.torch.guard(model, watched)
    monitor = lossscale.torch.Monitor(watched, model, explain=explain, on_floor="ignore")
    for _ in range(5):
        trainer.zero_grad()
        for _ in range(micro_batches):
            with torch.autocast(DEVICE, torch.float16):
                loss = square(model, torch.randn(6, 4))
            trainer.scale_loss(loss).backward()
        trainer.step()
        monitor.step(1.0)
        causes.append(str(monitor.explanation.cause) if explain else "")
    states = repr((random.getstate(), np.random.get_state())), bits(torch.get_rng_state())
    gradients = bits([p.grad for p in model.parameters()])
    return (values(model), model.left(), states, called, gradients), causes


@pytest.mark.parametrize(
    ("way", "micro_batches", "guarded"),
    [("wrapper", 1, False), ("wrapper", 2, True), ("scaler", 2, False), ("scaler", 1, True)],
)
def test_training_is_the_same_with_and_without(way, micro_batches, guarded):
    plain, _ = trained(way, 0, micro_batches, guarded)
    found, causes = trained(way, 1000, micro_batches, guarded)
    for one, other in zip(plain, found, strict=True):
        assert one == other
    assert causes[0] == "scale"


def test_a_pass_is_repeated_with_the_numbers_of_python_and_numpy():
    program = Program()

    def forward(x):
        return program.plain(x) * (1e6 if random.random() + np.random.rand() > 1 else 1.0)

    found = [program.step(ONES, forward=forward) for _ in range(12)]
    assert {str(each.cause) for each in found if each} == {"forward overflow"}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_may_be_compiled_before_and_after_traced_and_copied():
    program = Program()
    torch.jit.trace(program.model, ONES)
    assert program.step(BROKEN).cause == Cause.BATCH
    compiled = torch.compile(program.model, backend="eager", fullgraph=True)
    found = program.step(BROKEN, loss=lambda _, x: square(compiled, x))
    assert found.cause in (Cause.UNKNOWN, Cause.BATCH)
    assert program.step(ONES, loss=lambda _, x: square(compiled, x)) is None
    for other in (copy.deepcopy(program.model), pickle.loads(pickle.dumps(program.model))):
        other(ONES)
        program.step(ONES)
    program.model.compile(backend="eager", fullgraph=True)
    assert "compiled" in program.step(BROKEN).text
    program.monitor.close()


# --- How many, and where it is said --------------------------------------------------------------


def test_after_that_many_skips_the_hooks_are_gone():
    program = Program(explain=2)
    hooks = program.model._forward_hooks, program.model._forward_pre_hooks
    assert list(map(len, hooks)) == [1, 1]
    for number in range(4):
        program.step(BROKEN)
        assert (program.monitor.last_record.explanation is not None) == (number < 2)
    assert list(map(len, hooks)) == [0, 0]


def test_single_skips_because_of_the_scale_count_five_times():
    program = Program(explain=7)
    for number in range(12):
        found = program.step(ONES, loss=times(1e9))
        assert found.cause == Cause.SCALE
        assert program.monitor.last_record.explanation is found
        if number < 11:
            program.step(ONES)
    assert program.model._forward_hooks
    # In a row they count.
    for _ in range(3):
        program.step(ONES, loss=times(1e9))
    assert not program.model._forward_hooks


def test_an_explanation_is_in_the_record_the_file_and_a_warning(tmp_path):
    # Also of a step between those that are sampled.
    program = Program(path=tmp_path / "records.jsonl", every=2)
    with pytest.warns(lossscale.LossScaleWarning, match=r"Step 2 was skipped\. The argument input"):
        [program.step(x) for x in (ONES, BROKEN, BROKEN, ONES)]
    program.monitor.close()
    records = lossscale.monitoring.read_records(tmp_path / "records.jsonl")
    assert [bool(record.explanation) for record in records] == [False, True, True, False]
    assert records[2].explanation == program.monitor.explanation
    saved = records[1].to_dict()["explanation"]
    assert (saved["cause"], saved["text"]) == ("batch", records[1].explanation.text)
    assert records[1].reason == "loss"


@pytest.mark.parametrize(("explain", "words"), [(0, "explain=20"), (1, "The argument input")])
def test_the_warning_at_the_lowest_scale_names_explain_and_diagnose(explain, words):
    rule = lossscale.DynamicScale(initial_scale=1.0)
    program = Program(rule=rule, explain=explain, on_floor="warn")
    program.optimizer.backward(square(program.model, BROKEN))
    program.optimizer.step()
    with pytest.warns(lossscale.LossScaleWarning, match=words):
        program.monitor.step()


def test_arguments_that_cannot_be_used():
    program = Program()
    model, explain = program.model, lossscale.torch.explain
    program.monitor.close()
    watched = functools.partial(lossscale.torch.Monitor, program.optimizer)
    for call, words in (
        (lambda: watched(model, explain=True), "`explain` must be an integer"),
        (lambda: watched(explain=20), "`explain` needs the model"),
        (lambda: watched(model, explain=1, explain_bytes=0), "`explain_bytes`"),
        (lambda: explain(model[0], lambda m, x: m(x), ONES), "one element"),
        (lambda: explain(lambda x: x, model, ONES), r"must be a torch\.nn\.Module"),
        (lambda: explain(model, square, ONES, scale=2.0**130), "scale"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()
    found = explain(model, square, ONES)
    assert found.cause == Cause.UNKNOWN
    assert "finite at a scale of 32768" in found.text
    found = explain(model, lambda m, x: square(m, x).detach(), ONES)
    assert "no trained parameter" in found.text
    found = explain(model, distance_to_infinity, ONES)
    assert found.cause == Cause.LOSS
    assert "distance_to_infinity, line " in found.text
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


class Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, divisor):
        ctx.save_for_backward(divisor)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.saved_tensors[0], None


def through(p, function, buffer=0.0):
    """A step with a function of activations and a buffer."""
    p.model.register_buffer("bias", torch.tensor(buffer))
    return p.step(ONES, forward=lambda x: p.model[1](function(p.model[0](x), p.model.bias)))


def masked(p, factor):
    """The actions that a policy may not take have a logit of minus infinity."""

    def forward(x):
        return (p.model[0](x) * 1e-3 * 1e3).masked_fill(torch.arange(4) == 1, -INF)

    def loss(model, x):
        return model(x).float().log_softmax(-1)[:, 0].mean() * factor

    return p.step(ONES, forward=forward, loss=loss)


def attention(x, bias):
    """Changes the part of a result that is finite."""
    weights = (x + bias).softmax(-1).clone()
    weights[:1].mul_(2)
    return weights


def with_norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def with_two_outputs_of_one_operation(p):
    def forward(x):
        mean, deviation = p.model[0](x).chunk(2, -1)
        return mean * 2, mean, deviation

    def loss(model, x):
        decoded, mean, deviation = model(x)
        nothing = deviation.float().sum() * 0
        return decoded.float().sum() + mean.float().sum() + nothing / nothing

    return p.step(ONES, forward=forward, loss=loss)


def with_state(p):
    p.model.state = {"h": [torch.tensor([math.nan])]}
    return p.step(ONES, forward=lambda x: p.plain(x) + p.model.state["h"][0])


def test_the_first_hook_of_a_process_and_an_optimizer_that_skips_before(monkeypatch):
    """A generator and a discriminator with one scaler: the generator's skip is explained."""
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = lossscale.torch.GradScaler(DEVICE)
    models[0].weight.data.fill_(2)
    with lossscale.torch.Monitor(scaler, models[0], explain=20) as monitor:
        with torch.autocast(DEVICE, torch.float16):
            fake = models[0](ONES * 6e4)
            losses = [models[1](each).float().mean() for each in (fake.detach(), fake)]
        for loss, optimizer in zip(losses, optimizers[::-1], strict=True):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        scaler.update()
        monitor.step(losses[0])
    found = monitor.explanation
    assert (found.cause, found.operation) == (Cause.FORWARD_OVERFLOW, "addmm")


def filled(x):
    """A tensor that is written in parts, of which only some are wrong."""
    out = torch.empty_like(x)
    out[:, :2] = x[:, :2] * 2
    out[:, 2:] = 1
    return out


FOLLOWED = {
    "ReLU": nn.ReLU(inplace=True),
    "mul_": lambda x: x.mul_(2),
    "a part": filled,
    "views": lambda x: x.reshape(2, 2, 2).transpose(1, 2).reshape(2, 4),
    "matmul": lambda x: (x[None] @ torch.ones(1, 4, 4, dtype=x.dtype))[0],
    "checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    "dropout": lambda x: nn.functional.dropout(x, 0.1),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_an_overflow_that_is_hidden_is_followed_to_the_loss(name):
    def loss_fn(model, x):
        h = model[0](x) * 1000
        # 0 in float16.
        y = h / (h * h).sum(-1, keepdim=True).sqrt()
        return (model[1](FOLLOWED[name](y)).float() - 1).square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    found = lossscale.torch.explain(model, loss_fn, ONES, scale=16.0)
    assert (found.cause, found.operation) == (Cause.FORWARD_OVERFLOW, "mul")
    assert "and a later operation hides it" in found.text


def test_an_overflow_that_makes_no_loss_wrong_is_not_named():
    def loss_fn(model, x):
        h = (model[0](x) * 1000).square()
        noisy = torch.tanh(h + 0.1 * torch.randn_like(h)).clone()
        noisy[:, 0] = 0
        return model[1](noisy).float().square().mean()

    found = lossscale.torch.explain(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), loss_fn, ONES)
    assert found.cause == Cause.UNKNOWN


def test_the_modules_of_a_container_are_called():
    class Module(nn.Module):
        """As Lightning's, whose loop calls another method."""

        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleDict({"actor": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})

        def training_step(self, x):
            return self.nets["critic"](self.nets["actor"](x) * 1e6).float().sum()

    found = Program(Module()).step(ONES, loss=lambda model, x: model.training_step(x))
    assert (found.cause, found.module) == (Cause.BATCH, "")
    assert "In call 2 of 2 of the model, the argument input" in found.text
    found = Program(Module()).step(ONES * 6e4 * 2, loss=lambda model, x: model.training_step(x))
    assert found.cause == Cause.FORWARD_OVERFLOW
    assert "nets.actor (" in found.text


def test_parameters_in_one_storage_have_their_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat, model.parameters())
    model[0].weight.data[0] = 1e6
    assert "parameter 0.weight reaches" in lossscale.torch.explain(model, square, ONES).text


def test_a_parameter_that_a_model_returns_keeps_no_hooks():
    p = Program()
    for _ in range(3):
        p.step(
            ONES, forward=lambda x: (p.plain(x), p.model[0].weight), loss=lambda m, x: m(x)[0].sum()
        )
    assert not p.model[0].weight._backward_hooks


class Divides(nn.Module):
    """Its backward pass divides by a number; it returns what it computes on the way, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x, divisor=1.0):
        if divisor is None:
            return self.other(x) / 0, x
        hidden = Divided.apply(self.first(x), torch.tensor(divisor))
        return self.last(hidden), hidden


def calls(loss, train=lambda model: model.parameters()):
    """Explains a step whose loss calls `Divides` as often as it likes."""
    program = Program(Divides())
    program.optimizer.param_groups[0]["params"] = list(train(program.model))
    return program.step(ONES, loss=lambda model, x: loss(model, x).float().sum())


def recurrent(model, x):
    for divisor in (1.0, 0.0, 1.0):
        x = model(x, divisor)[0].tanh()
    return x


def beside(model, x):
    """Most of the gradient reaches the inner output directly."""
    outer, inner = model(x)
    return outer.float().sum() * 1e-3 + inner.float().sum() * 1.9


# The last one is not near overflow.
GAINS = torch.tensor([[10.0, 10.0, 10.0, 1e-4], [1e-4] * 4], device=DEVICE)
MANY = (*[ONES] * 20, BROKEN)
TAKEN: queue.Queue[float] = queue.Queue()
TAKEN.put(0.0)
PERMITS, EVENT = threading.Semaphore(2), threading.Event()


# By the cause and words of the text.
PROGRAMS = {
    "unknown: need more than explain_bytes=10 of": lambda p: Program(explain_bytes=10).step(*MANY),
    "unknown: =327680 of Monitor, and the others are finite": lambda p: Program(
        explain_bytes=10 * 2**15
    ).step(*MANY),
    "unknown: not called in this step": lambda p: p.step(
        BROKEN, loss=lambda _, x: p.plain(x).sum()
    ),
    "unknown: another optimizer has changed the weights": lambda p: p.step(
        BROKEN, before=torch.optim.SGD(p.model.parameters(), lr=0.0).step
    ),
    "unknown: were written to": lambda p: p.step(x := BROKEN.clone(), before=x.zero_),
    "unknown: returns something else": lambda p: p.step(
        ONES, forward=lambda x: p.plain(x) / (p.calls - 1)
    ),
    "unknown: is finite when it is repeated": lambda p: p.step(
        ONES, before=lambda: p.optimizer.backward(p.model[0].weight.sum() * 1e36)
    ),
    "unknown: cannot be repeated (ZeroDivisionError: ": lambda p: p.step(
        BROKEN, forward=lambda x: p.plain(x) / (1 // (2 - p.calls))
    ),
    "unknown: cannot pickle 'generator' object": lambda p: p.step(
        BROKEN, before=lambda: setattr(p.model, "batches", iter(x for x in ONES))
    ),
    "unknown: takes from a queue": lambda p: p.step(
        BROKEN, before=lambda: TAKEN.put(0.0), forward=lambda x: p.plain(x) + TAKEN.get()
    ),
    "unknown: takes from a queue, or what": lambda p: p.step(
        BROKEN, forward=lambda x: p.plain(x) if PERMITS.acquire() else None
    ),
    "unknown: waits for another thread": lambda p: (
        EVENT.set()
        or p.step(BROKEN, before=EVENT.clear, forward=lambda x: p.plain(x) * EVENT.wait())
    ),
    "unknown: cannot be repeated (SystemExit": lambda p: p.step(
        BROKEN, forward=lambda x: sys.exit() if p.calls > 1 else p.plain(x)
    ),
    "batch: In call 2 of 3 of the model": lambda p: p.step(ONES, BROKEN, BROKEN),
    # A monitor may be told of each part of a batch.
    "batch: In call 1 of 2 of the model": lambda p: (
        p.monitor.step(p.backward(BROKEN)) or p.step(ONES)
    ),
    "forward overflow: Sequential (mul) overflows": lambda p: p.step(
        ONES,
        forward=lambda x: torch.distributions.Normal((p.plain(x) * 1e6).float(), 1.0),
        loss=lambda m, x: m(x).mean.sum(),
    ),
    "batch: The argument x.x": lambda p: p.step(Batch(BROKEN), forward=lambda x: p.plain(x.x)),
    "weights: state.h.0 of the model": with_state,
    "weights: bias of the model": lambda p: through(p, torch.add, math.nan),
    "singular: makes NaN of infinities": lambda p: through(p, attention, [[0.0], [-INF]]),
    # Whose statistics are not finite then.
    # As CUDA's autocast computes powers and sums.
    "forward overflow: The result of Sequential (mul) reaches": lambda p: through(
        p, lambda x, bias: x.float() * 1e7
    ),
    "forward overflow: A number reaches 1e+06": lambda _: Program(with_norm()).step(UNLIKE * 1e6),
    "singular: (backward of Divided) has no finite result for 0": lambda p: through(
        p, Divided.apply
    ),
    "loss: is nan, and 0 infinities and 2 NaN reach them from it": lambda p: p.step(
        ONES, loss=lambda m, x: (nothing := square(m, x) * 0) / nothing
    ),
    "loss: the loss is nan, and 0 infinities and 4 NaN": with_two_outputs_of_one_operation,
    "loss: finite, but the loss is inf": lambda p: p.step(ONES, loss=distance_to_infinity),
    "loss: The outputs of the model are finite": lambda p: masked(p, INF),
    "scale: (backward of Divided) overflows": lambda p: through(
        Program(scale=2.0**4), Divided.apply, 3e-9
    ),
    "scale: of their gradients, in float16, overflow": lambda p: masked(p, 1e9),
    # One of several outputs of an operation gets no gradient.
    "scale: at a loss scale of 32768, 1 of their": lambda p: p.step(
        ONES, forward=lambda x: p.plain(x).chunk(2), loss=lambda m, x: m(x)[0].float().mean() * 1e9
    ),
    "scale: at a loss scale of 32768, 3 of their": lambda p: p.step(
        ONES, forward=p.model[0], loss=lambda m, x: (m(x).float() * GAINS).sum()
    ),
    "singular: or compute what Sequential takes in float32": lambda p: through(
        p, lambda x, bias: (x.float() * bias).log()
    ),
    "singular: (div) divides by 0": lambda p: through(p, lambda x, bias: x / (x > 1e9).sum()),
    "scale: The forward pass is finite": lambda p: masked(p, 1.0),
    # That of the other output nearly does.
    "scale: 1 of their gradients, in float16, overflow": lambda p: p.step(
        UNLIKE, loss=times(2.5 / p.plain(UNLIKE).abs().max().item())
    ),
    "scale: no lower; DynamicScale(min_scale=2**-24) does": lambda _: Program(
        rule=lossscale.DynamicScale(initial_scale=1.0)
    ).step(ONES, loss=times(1e8)),
    "scale: a rule with such a scale, as DynamicScale(min_scale=0.25)": lambda _: through(
        Program(rule=lossscale.DynamicScale(initial_scale=1.0)), Divided.apply, 1e-6
    ),
    # The worst of several calls, also if another one fails first.
    "singular: In call 2 of 2 of the model, Divides (backward of Divided)": lambda _: calls(
        lambda m, x: m(x)[0].float() * 1e5 + m(x, 0.0)[0]
    ),
    "scale: In call 2 of 2 of the model, the forward pass is finite; at a": lambda _: calls(
        lambda m, x: m(x, 0.5)[0] + m(x, 1e-3)[0]
    ),
    "singular: In call 2 of 3 of the model, Divides (backward of Divided)": lambda _: calls(
        recurrent
    ),
    "forward overflow: In call 2 of 2 of the model, first": lambda _: calls(
        lambda m, x: m(x, 0.0)[0] + m(x * 6e4)[0]
    ),
    # Outputs that depend on each other.
    "scale: first (backward of addmm) overflows": lambda _: calls(beside),
    "scale: 8 of their gradients, in float16, overflow": lambda _: calls(
        lambda m, x: m(x)[0].float() * 1e-3 + m(x)[1].float() * 9
    ),
    # How many are needed is not known of outputs in float16.
    "scale: In call 2 of 2 of the model, the outputs": lambda _: calls(
        lambda m, x: m(x)[0].float() * 1.1 + m(x)[0].float() * 9
    ),
    "scale: The outputs of the model are finite; at": lambda p: p.step(
        ONES, loss=lambda m, x: checkpoint(m, x, use_reentrant=False).float().sum() * 1e9
    ),
    # What the optimizer does not train.
    "scale: last (backward of addmm) overflows": lambda _: calls(
        lambda m, x: m(x, 0.0)[0], lambda m: m.last.parameters()
    ),
    "scale: In call 2 of 2 of the model, the forward pass is finite": lambda _: calls(
        lambda m, x: m(x, None)[0].float().nan_to_num(0, 0, 0) + m(x)[0],
        lambda m: m.last.parameters(),
    ),
}


def test_a_divisor_that_float16_rounds_to_0():
    """CUDA does so with a divisor without dimensions, a CPU does not."""
    call = Call("div", "div", "block", True, False, lambda change: [np.zeros(2)])
    given = np.zeros(2, np.float16), np.float32(3e-9)
    results = [np.full(2, math.nan, np.float16)]
    (origin,) = Evaluation(lambda value: "").origins(call, given, [None, None], results)
    assert (origin.failed.meets_zero, origin.failed.largest_result) == (True, None)


@pytest.mark.parametrize("name", on_this_device(PROGRAMS))
def test_a_program_is_explained(name, monkeypatch):
    program, (cause, words) = Program(), name.split(": ", 1)
    found = PROGRAMS[name](program)
    assert (found.cause, words in found.text) == (cause, True), found.text
    assert not program.monitor._explainer.calls._calls


def test_a_batch_is_explained_within_inference_mode():
    model = with_norm()
    before = values(model)
    with torch.inference_mode():
        found = lossscale.torch.explain(model, square, UNLIKE * 1e6)
    assert found.cause == Cause.FORWARD_OVERFLOW
    assert values(model) == before


def test_the_logits_beside_a_loss_are_not_differentiated_twice():
    class WithLoss(nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            return {"loss": logits.float().logsumexp(-1).mean() * 1e6, "logits": logits}

    torch.manual_seed(0)
    model = WithLoss(4, 3)
    found = Program(model).step(ONES, loss=lambda model, x: model(x)["loss"])
    assert (found.cause, found.operation) == (Cause.SCALE, "backward of _to_copy")
    # That of the bias, which is the sum over both rows.
    largest = model(ONES)["logits"].softmax(-1).max().item() * 1e6 * 2**15
    assert found.halvings == math.ceil(math.log2(largest / 65504))


def test_a_batch_of_gradients_is_computed_beside_a_monitor():
    model = nn.Linear(4, 2)
    optimizer = lossscale.LossScaleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with lossscale.torch.Monitor(optimizer, model, explain=20):
        torch.autograd.grad(
            model(ONES[0]), model.weight, torch.eye(2), is_grads_batched=True, retain_graph=True
        )


def test_a_model_of_which_a_part_is_in_float16_is_explained_under_autocast():
    model = nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 1))
    found = lossscale.torch.explain(model, square, ONES, scale=2.0**40)
    assert found.cause == Cause.SCALE


def test_only_a_number_of_the_program_is_called_an_epsilon():
    def loss_fn(model, x):
        y = model(x).float()
        return (y * 0).sqrt().mean() + y.mean().abs() * 1e-9

    found = lossscale.torch.explain(nn.Linear(4, 1), loss_fn, ONES)
    assert (found.cause, found.operation) == (Cause.SINGULAR, "backward of sqrt")
    assert "is 0 in float16" not in found.text


# --- Losses that are not finite ------------------------------------------------------------------


class Normed(nn.Module):
    """Divides by the norm of each row; the gradients of a row of zeros are 0."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        h = self.linear(x).relu()
        return h / h.norm(dim=-1, keepdim=True)


class Penalized(nn.Module):
    """Returns a penalty beside what is trained, without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x), (x.sum() * 0).log()


def linear():
    return nn.Linear(4, 4)


OF_THE_LOSS = (Cause.LOSS, "", "")
IN_FLOAT16 = "Compute the loss in float32, it is in float16; else check"
# The model, the loss and the batch; what is named, whether the step is skipped, and words.
LOSSES = {
    "a norm of 0": (Normed, square, UNLIKE, (Cause.SINGULAR, "div", "Normed"), False, "divides by"),
    "a part of the loss without gradients": (
        *(linear, lambda model, x: square(model, x) + x.sum().mul(0).log(), ONES),
        *(
            OF_THE_LOSS,
            False,
            "outputs of the model are finite, but the loss is -inf. Check the targ",
        ),
    ),
    "an output without gradients": (
        *(Penalized, lambda model, x: sum(each.float().mean() for each in model(x)), ONES),
        *((Cause.SINGULAR, "log", "Penalized"), False, "takes the logarithm of 0"),
    ),
    "a loss in float16": (
        *(linear, lambda model, x: (model(x).float().abs() * 4e4).sum().half(), ONES * 9),
        *(OF_THE_LOSS, True, IN_FLOAT16),
    ),
    "a loss in float16, before its mean": (
        *(linear, lambda model, x: (model(x).float().abs() * 4e4).half(), ONES * 9),
        *(OF_THE_LOSS, True, IN_FLOAT16),
    ),
    "a batch": (linear, square, BROKEN, (Cause.BATCH, "input", ""), True, "argument"),
}


def trained_by(verb, make, loss, batch, *, explain, passes_loss=True, every=1, steps=2):
    """Trains, and returns the records, the messages and the weights."""
    torch.manual_seed(0)
    model, records = make(), []
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = OURS["scaler" if verb == "scale" else "wrapper"](inner, rule=lossscale.DynamicScale(1024))
    settings = {"explain": explain, "every": every, "log": records.append}
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        lossscale.torch.Monitor(run.watched, model, **settings) as monitor,
    ):
        for number in range(steps):
            inner.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                value = loss(model, batch if number in (0, steps - 1) else ONES)
            if verb == "backward":
                run.watched.backward(value.sum())
            else:
                run.scale_loss(value).sum().backward()
            run.step()
            monitor.step(value.detach().sum() if passes_loss else None)
    return records, [str(each.message) for each in caught], bits(list(model.parameters()))


@pytest.mark.parametrize("verb", ["backward", "scale_loss", "scale"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_finite_is_explained(name, verb):
    make, loss, batch, named, skipped, words = LOSSES[name]
    if name.endswith("mean") and verb == "backward":
        pytest.skip("it takes one number")
    records, messages, after = trained_by(verb, make, loss, batch, explain=20, passes_loss=False)
    for record in records:
        found = Explanation.from_dict(record["explanation"])
        assert (found.cause, found.operation, found.module) == named, found.text
        assert record["skipped"] == skipped
        assert words in found.text
        assert "normal" not in found.text
    event = "Step 1 was skipped" if skipped else "Step 1 was applied, and its loss is"
    assert sum(event in each and words in each for each in messages) == 1
    assert after == trained_by(verb, make, loss, batch, explain=0)[2]


@pytest.mark.parametrize("every", [1, 3])
def test_a_loss_that_comes_after_the_decision_is_explained_as_far_as_it_is_known(
    every, monkeypatch
):
    known = monitor_module._Losses.known

    def late(self):
        is_deciding = sys._getframe(1).f_code.co_name == "decided"
        return None if is_deciding else known(self)

    monkeypatch.setattr(monitor_module._Losses, "known", late)
    make, loss, batch, *_ = LOSSES["a norm of 0"]
    records, messages, _ = trained_by(
        "backward", make, loss, batch, explain=20, every=every, steps=5
    )
    found = [r["explanation"]["text"] for r in records if r["explanation"]]
    assert len(found) == 2
    assert all("known only after the step had changed the weights" in each for each in found)
    assert "The loss of step 1 is nan" in messages[0]


def test_large_weights_and_divisors_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].weight.data.fill_(2e4)
    found = lossscale.torch.explain(model, square, ONES * 3)
    ratio = float(found.text.partition("the result is ")[2].split()[0])
    hidden = model[0](ONES * 3)
    assert ratio == pytest.approx(
        abs(model[1](hidden)).max().item() / hidden.abs().max().item(), rel=0.01
    )
    assert "make 1.weight smaller" in found.advice
    found = lossscale.torch.explain(
        nn.Linear(4, 4), lambda model, x: (model(x) / 1e-6).float().mean(), ONES * 3
    )
    assert "(div) divides by 1e-06 and overflows" in found.text
    least = float(found.advice.rpartition("divide by ")[2].split()[0])
    assert 1e-6 < least < 1e-3
    assert "epsilon" not in found.text


def test_an_overflow_before_an_exception_of_the_program_is_named():
    def checked(model, x):
        y = model(x)
        if not y.isfinite().all():
            raise FloatingPointError
        return y.float().mean()

    found = lossscale.torch.explain(nn.Linear(4, 4), checked, ONES * 6e4 * 9)
    assert found.cause == Cause.FORWARD_OVERFLOW
    with pytest.raises(ZeroDivisionError):
        lossscale.torch.explain(nn.Linear(4, 4), lambda model, x: model(x).mean() / (1 // 0), ONES)


def test_a_forward_pass_that_accelerate_has_prepared_is_repeated():
    operations = pytest.importorskip("accelerate.utils.operations")
    program = Program()
    casting = torch.autocast(DEVICE, torch.float16)(program.model.forward.__func__)
    prepared = operations.convert_outputs_to_fp32(casting)
    program.model.forward = types.MethodType(prepared, program.model)
    assert program.step(BROKEN).cause == Cause.BATCH
    assert program.model.forward.__func__ is prepared
