"""Why a step was skipped: the operation, by name."""

import contextlib
import copy
import dataclasses
import functools
import math
import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float16_faults
import lossscale
from float16_faults import AWAY, FAULTS, NOTHING, SHARED
from frameworks.torch.support import DEVICE, bits
from lossscale.explain.origins import Call, Evaluation
from lossscale.explain.text import Failure
from lossscale.monitoring import Cause, Explanation

pytestmark = pytest.mark.usefixtures("on_the_device")
explain = lossscale.torch.explain
INF = math.inf
ONES = torch.ones(2, 4, device=DEVICE)
UNLIKE = torch.tensor([[1.0] * 4, [0.0] * 4], device=DEVICE)
BROKEN = ONES * INF


def square(model, x):
    return model(x).float().pow(2).mean()


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def values(model):
    return bits([*model.parameters(), *model.buffers()])


# --- Faults ---------------------------------------------------------------------------------------

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
# it rounds a divisor without dimensions to float16; its CTC loss may be that of cuDNN.
NOT_ON_CUDA = {
    "a sum that overflows in some rows",
    "a mean of which the sum overflows",
    "a power",
    "a sigmoid whose power overflows",
    "the inverse of a small number",
    "derivative of a small root",
    "a long label",
    "scale: (backward of Divided) overflows",
}


def on_this_device(names):
    return [name for name in names if DEVICE == "cpu" or name not in NOT_ON_CUDA]


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

    float16_faults.check(
        fault,
        lambda scale: explain(model, loss_fn, x, scale=scale),
        lambda: lossscale.torch.diagnose(model, loss_fn, [x]),
    )
    assert values(model) == before
    assert all(p.grad is None for p in model.parameters())
    # The loss function is not a part of the model.
    if fault.block is float16_faults.plain and "loss" in fault.causes:
        assert "line " in explain(model, loss_fn, x).text


def ctc(_, x):
    label, length = torch.ones(1, len(x) + 1, dtype=torch.int64), torch.tensor([len(x)])
    return functional.ctc_loss(x.float()[:, None].log_softmax(-1), label, length, length + 1)


IGNORED = "whose targets are all ignored, a mean over nothing"
UNNAMED = torch.full((2,), -100, device=DEVICE)
ADVICE = float16_faults.ADVICE | {
    "a long label": ("zero_infinity=True", ctc),
    "no class": (IGNORED, lambda _, x: functional.cross_entropy(x.float(), UNNAMED)),
    "no number": (NOTHING, lambda _, x: functional.mse_loss(x[:0], x[:0])),
    "a variance of 0": (AWAY, lambda _, x: functional.layer_norm(x, (3,), eps=0.0)),
    "a norm of 0": (AWAY, lambda _, x: torch._weight_norm(x, x[:, :1] + 1)),
    "the logarithm in 0 * log(0)": (AWAY, lambda _, x: torch.xlogy(x + 1, x)),
    "the inverse of a small number": (AWAY, lambda _, x: (x + 1e-4).reciprocal()),
    "a count of 0": (AWAY, lambda _, x: x / (x > 0).sum()),
    "another function": ("check its input", lambda _, x: x.lgamma()),
}


@pytest.mark.parametrize("name", on_this_device(ADVICE))
def test_what_is_advised_fits_the_operation(name):
    advice, function = ADVICE[name]
    model, x = nn.Linear(4, 3, bias=False), torch.ones(2, 4)
    found = explain(model, lambda model, x: function(NUMPY, model(x) * 0).float().sum(), x)
    float16_faults.check_advice(advice, found)


# --- It changes nothing --------------------------------------------------------------------------


class Eventful(nn.Module):
    """A forward pass that draws, counts and writes to tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(8, 1)
        self.renormed, self.calls = nn.Embedding(3, 8, max_norm=0.5), 0
        self.register_buffer("codes", torch.zeros(8))
        self.state, self.generator = torch.zeros(2), torch.Generator()

    def forward(self, x):
        hidden = self.norm(self.first(x))
        hidden = self.dropout(self.spectral(hidden)) + self.old_spectral(hidden)
        hidden = checkpoint(torch.tanh, hidden, use_reentrant=False)
        hidden = hidden + self.renormed(torch.arange(6) % 3).to(hidden.dtype)
        self.calls += 1
        noise = random.random() + np.random.randn() + torch.rand(())
        noise = noise + torch.rand((), generator=self.generator, device="cpu").to(DEVICE)
        with torch.no_grad():
            self.codes = self.codes + 1
            self.state.add_(1)
        return self.last(hidden) * (1 + noise)


def around_it(model):
    """What is kept outside of the tensors of a model, and its `.grad` as they are."""
    generators = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    autocast = torch.is_autocast_enabled(DEVICE), torch.autocast.__enter__
    modules = [(id(m), sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()]
    parameters = [(id(p.grad), p.requires_grad) for p in model.parameters()]
    return generators, autocast, modules, parameters, [m.training for m in model.modules()]


@pytest.mark.parametrize("ends", ["well", "by an exception"])
@pytest.mark.parametrize("name", ["explain", "diagnose"])
def test_what_a_loss_function_does_to_a_model_is_put_back(name, ends):
    model = Eventful()
    square(model, torch.ones(6, 4)).backward()
    model.norm.eval()
    model.first.weight.grad, calls, called = None, [], []
    model.first.register_forward_hook(lambda *_: called.append("forward"))
    model.last.register_full_backward_hook(lambda *_: called.append("backward"))

    def loss_fn(model, x):
        calls.append((model.training, model.norm.training))
        model.eval()
        model.zero_grad(set_to_none=x.sum() > 0)
        model.first.bias.grad = torch.ones(8)
        x.mul_(0.5)
        with torch.no_grad():
            model.last.weight.mul_(2)
        loss = (model(x) * INF).float().sum()
        if ends != "well":
            raise KeyboardInterrupt
        return loss

    def kept():
        # A tensor or a generator that is a plain attribute is not seen.
        gradients = bits([p.grad for p in model.parameters()])
        return values(model), gradients, model.calls, around_it(model)

    before = kept()
    for batch in (torch.ones(6, 4), -torch.ones(6, 4)):
        given = batch.clone()
        with contextlib.nullcontext() if ends == "well" else pytest.raises(KeyboardInterrupt):
            if name == "explain":
                assert explain(model, loss_fn, given).cause != Cause.UNKNOWN
            else:
                lossscale.torch.diagnose(model, loss_fn, [given])
        assert torch.equal(given, batch)
        assert kept() == before
    assert set(calls) == {(True, False)}
    # A diagnosis trains, and an explanation only repeats what training has done.
    assert name == "diagnose" or called == []


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_may_be_compiled_traced_and_copied():
    model = two_layers()
    torch.jit.trace(model, ONES)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert explain(compiled, square, BROKEN).cause == Cause.BATCH
    assert explain(model, lambda _, x: square(compiled, x), BROKEN).cause == Cause.BATCH
    compiled(ONES)
    copy.deepcopy(model)(ONES)
    model.compile(backend="eager")
    assert explain(model, square, BROKEN).cause == Cause.BATCH
    model(ONES)


# --- Arguments -----------------------------------------------------------------------------------


def test_arguments_that_cannot_be_used():
    model = two_layers()
    for call, words in (
        (lambda: explain(model[0], lambda m, x: m(x), ONES), "one element"),
        (lambda: explain(lambda x: x, model, ONES), r"must be a torch\.nn\.Module"),
        (lambda: explain(model, 3, ONES), "`loss_fn` must be a function"),
        (lambda: explain(model, square, ONES, scale=2.0**130), "scale"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()
    of_other = {"parameters": model[1].parameters()}
    found = explain(model, lambda model, x: square(model[0], x), ONES, **of_other)
    frozen = explain(model.requires_grad_(False), square, ONES)
    assert all("no trained parameter" in each.text for each in (found, frozen))
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
        assert explain(model, loss_fn, ONES, **given).cause == cause
    assert not model.training


@pytest.mark.parametrize(
    ("dtype", "cause"), [(torch.float16, "forward overflow"), (torch.float32, "unknown")]
)
def test_a_float16_model_is_explained_without_autocast(dtype, cause):
    model = nn.Linear(4, 4).to(dtype)

    def of_products(model, x):
        # Autocast multiplies 20 * 20 * 20 * 20 in float32.
        return (model(x) * 0 + 20).prod(1).float().mean()

    assert explain(model, of_products, ONES.to(dtype), scale=1.0).cause == cause


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


class Through(nn.Module):
    """Two layers, with a function of activations and a buffer between them."""

    def __init__(self, function, buffer=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 1), function
        self.register_buffer("bias", torch.tensor(buffer, device=DEVICE))

    def forward(self, x):
        return self.last(self.function(self.first(x), self.bias))


class Recurrent(nn.Module):
    """Calls itself; its state is an attribute."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), factor
        self.state = {"h": [torch.tensor([0.0], device=DEVICE)]}

    def forward(self, x):
        for factor in (1.0, self.factor, 1.0):
            x = self.layer(x).tanh() * factor
        return x + self.state["h"][0]


def attention(x, bias):
    """Changes the part of a result that is finite."""
    weights = (x + bias).softmax(-1).clone()
    weights[:1].mul_(2)
    return weights


def with_norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def with_broken_state():
    model = Recurrent()
    model.state["h"][0].fill_(math.nan)
    return model


def times(factor):
    return lambda model, x: square(model, x) * factor


def masked(model, x):
    """The actions that a policy may not take have a logit of minus infinity."""
    logits = (model[0](x) * 1e-3 * 1e3).masked_fill(torch.arange(4, device=DEVICE) == 1, -INF)
    return logits.float().log_softmax(-1)[:, 0].mean()


def distance_to_infinity(model, x):
    return (model(x).float() - INF).pow(2).mean()


def checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False).float().sum() * 1e9


def with_weights_in_one_storage():
    model = two_layers()
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat, model.parameters())
    model[0].weight.data[0] = 1e6
    return model


def with_a_float16_part():
    return nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 1))


def float16_loss(model, x):
    return (model(x).float().abs() * 4e4).sum().half()


# By the cause and words of the text: a model, a loss function, a batch.
PROGRAMS = {
    "unknown: no trained parameter has a gradient": (
        *(two_layers, lambda m, x: m(x).detach().float().sum(), ONES),
    ),
    "unknown: finite at a scale of 1": (two_layers, masked, ONES, 1.0),
    "batch: The argument batch.x of the model": (
        *(two_layers, lambda m, batch: square(m, batch.x), Batch(BROKEN)),
    ),
    "weights: state.h.0 of the model": (with_broken_state, square, ONES),
    "singular: makes NaN of infinities": (
        *(functools.partial(Through, attention, [[0.0], [-INF]]), square, ONES),
    ),
    "forward overflow: The result of Through (mul) reaches": (
        *(functools.partial(Through, lambda x, bias: x.float() * 1e7), square, ONES),
    ),
    "forward overflow: and 0 (_to_copy) casts it to float16": (with_norm, square, UNLIKE * 1e6),
    "forward overflow: Recurrent (mul) overflows": (
        *(functools.partial(Recurrent, 1e6), square, ONES),
    ),
    "forward overflow: parameter 0.weight reaches": (with_weights_in_one_storage, square, ONES),
    "forward overflow: float16_loss, line ": (two_layers, float16_loss, ONES * 9),
    "singular: (backward of Divided) has no finite result": (
        *(functools.partial(Through, Divided.apply), square, ONES),
    ),
    "singular: or compute what Through takes in float32": (
        *(functools.partial(Through, lambda x, bias: (x.float() * bias).log()), square, ONES),
    ),
    # It adds a small number, which is no epsilon.
    "singular: keep its input away from 0": (
        *(two_layers, lambda m, x: (m(x) * 0).float().sqrt().sum() + square(m, x) / 1e9, ONES),
    ),
    # Also a part of the loss that has no gradient.
    "singular: line ": (two_layers, lambda m, x: square(m, x) + (x.sum() * 0).log(), ONES),
    "loss: distance_to_infinity, line ": (two_layers, distance_to_infinity, ONES),
    "scale: ": (with_a_float16_part, square, ONES, 2.0**40),
    # Its statistics are not finite after it, too.
    "scale: square, line ": (with_norm, times(1e9), UNLIKE),
    "scale: (backward of Divided) overflows": (
        *(functools.partial(Through, Divided.apply, 3e-9), square, ONES, 2.0**4),
    ),
    "scale: at a low one, that pass is finite": (two_layers, checkpointed, ONES),
}


@pytest.mark.parametrize("name", on_this_device(PROGRAMS))
def test_a_program_is_explained(name):
    make, loss_fn, batch, *scale = PROGRAMS[name]
    cause, words = name.split(": ", 1)
    model = make()
    before = values(model)
    found = explain(model, loss_fn, batch, **({"scale": scale[0]} if scale else {}))
    assert (found.cause, words in found.text) == (cause, True), found.text
    assert "_parameters" not in found.text
    assert "_buffers" not in found.text
    assert values(model) == before


def filled(x):
    """A tensor that is written in parts, of which only some are wrong."""
    out = torch.empty_like(x)
    out[:, :2] = x[:, :2] * 2
    out[:, 2:] = 1
    return out


HIDDEN = {
    "ReLU": nn.ReLU(inplace=True),
    "mul_": lambda x: x.mul_(2),
    "a part": filled,
    "views": lambda x: x.reshape(2, 2, 2).transpose(1, 2).reshape(2, 4),
    "checkpoint": lambda x: checkpoint(torch.abs, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_an_overflow_is_followed_to_the_operation_that_makes_it_finite(name):
    def loss_fn(model, x):
        h = HIDDEN[name](model[0](x).abs() * 1000 * 1000)
        return model[1](torch.tanh(h)).float().square().mean()

    found = explain(two_layers(), loss_fn, ONES, scale=16.0)
    assert (found.cause, found.operation) == (Cause.UNKNOWN, "mul")
    assert "is right before a tanh, and wrong in a norm" in found.text


def test_a_pass_that_draws_other_random_numbers_may_be_finite_and_the_text_says_so():
    def loss_fn(model, x):
        return square(model, x) * (1e6 if torch.rand(()) > 0.5 else 1.0)

    model, texts = two_layers(), {}
    for seed in range(8):
        torch.manual_seed(seed)
        found = explain(model, loss_fn, ONES, scale=2.0**15)
        texts[str(found.cause)] = found.text
    assert set(texts) == {"scale", "unknown"}
    assert "with other random numbers or weights, as a step may have had" in texts["unknown"]


def test_a_divisor_that_float16_rounds_to_0():
    """CUDA does so with a divisor without dimensions, a CPU does not."""
    call = Call("div", "div", "block", True, lambda: [np.zeros(2)])
    given = np.zeros(2, np.float16), np.float32(3e-9)
    results = [np.full(2, math.nan, np.float16)]
    (origin,) = Evaluation().origins(call, [(each, None) for each in given], results)
    assert (origin.failure, origin.operation) == (Failure.ZERO, "div")


def test_an_overflow_before_an_exception_of_the_program_is_named(monkeypatch):
    def checked(model, x):
        y = model(x)
        if not y.isfinite().all():
            raise FloatingPointError
        return y.float().mean()

    found = explain(nn.Linear(4, 4), checked, ONES * 6e4 * 9)
    assert found.cause == Cause.FORWARD_OVERFLOW
    with pytest.raises(ZeroDivisionError):
        explain(nn.Linear(4, 4), lambda model, x: model(x).mean() / (1 // 0), ONES)
    monkeypatch.setattr(torch.Tensor, "isinf", lambda _: 1 // 0)
    with pytest.raises(lossscale.LossScaleError, match="itself failed"):
        explain(nn.Linear(4, 4), checked, ONES * 6e4 * 9)


def test_a_forward_pass_that_accelerate_has_prepared():
    operations = pytest.importorskip("accelerate.utils.operations")
    model = two_layers()
    casting = torch.autocast(DEVICE, torch.float16)(model.forward.__func__)
    prepared = operations.convert_outputs_to_fp32(casting)
    model.forward = types.MethodType(prepared, model)
    assert explain(model, square, BROKEN).cause == Cause.BATCH
    assert model.forward.__func__ is prepared


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_model_is_unknown_before_anything_runs():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 1))
    found = explain(model, lambda model, x: 1 / 0, ONES)
    assert (found.cause, "ScriptModule" in found.text) == (Cause.UNKNOWN, True)
