"""Passes of a model of PyTorch beside what is computed by hand, and the report on it."""

import copy
import random

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lossscale
from frameworks.torch.modules import LOSES, MODELS, batches_of, kernels_of, loss_fn, model_of
from frameworks.torch.support import bits
from lossscale.diagnosis.torch import TorchGradientFunction
from lossscale.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.torch.scaling import stored

diagnose = lossscale.torch.diagnose


def said(report):
    """The text of a report in one line."""
    return " ".join(str(report).split())


def gradients_by_hand(model, batch, scale, *, wide):
    """The gradients of the scaled loss as training has them, by `backward` of a copy."""
    model = copy.deepcopy(model)
    state, make = torch.get_rng_state(), torch.autocast
    with pytest.MonkeyPatch.context() as patch:
        # A model that switches it on by itself is measured in float16 too.
        patch.setattr(
            torch,
            "autocast",
            lambda device, dtype=None, enabled=True: make(
                device, torch.float16, enabled=enabled and not wide
            ),
        )
        with torch.autocast("cpu"):
            loss = loss_fn(model, batch)
    (loss * scale).backward()
    torch.set_rng_state(state)
    pairs = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
    return {name: None if g is None else stored(g).numpy() for name, g in pairs}


@pytest.mark.parametrize("kind", MODELS)
def test_a_pass_has_the_gradients_of_training_and_the_report_says_what_it_loses(kind):
    model, batches = model_of(kind), batches_of(kind)
    run = TorchGradientFunction(model, loss_fn)
    with kernels_of(kind):
        for half, scale in ((False, 1.0), (True, 1.0), (True, 2.0**9)):
            wanted = gradients_by_hand(model, batches[0], scale, wide=not half)
            found = run(batches[0], scale, half).gradients
            assert list(found) == list(wanted)
            for name, gradient in wanted.items():
                np.testing.assert_array_equal(found[name], gradient)
        report = diagnose(model, loss_fn, batches)
    measurement = report.measurement
    assert "PyTorch, cpu, autocast to float16" in said(report)
    # There float16 loses less than 10 % of each gradient.
    if kind == "casts by itself":
        assert (report.verdict, report.rule) == ("not needed", None)
        return
    assert report.verdict == "needed"
    assert measurement.lowest_exponent > 0
    beyond = 2.0 ** (measurement.highest_exponent + 1)
    with kernels_of(kind):
        found = [gradients_by_hand(model, batch, beyond, wide=False) for batch in batches]
    assert not all(np.isfinite(g).all() for each in found for g in each.values())


def test_an_operation_of_the_forward_pass_that_overflows_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

    def loss(model, batch):
        return (model[0](batch) * 1e6).float().mean()

    report = diagnose(model, loss, [torch.ones(2, 4)])
    assert report.verdict == "cannot help"
    assert "mul overflows in the forward pass: its input reaches" in said(report)


class Norm(torch.nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)


def normed(eps, size):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), Norm(eps), torch.nn.Linear(4, 1))
    return model, lambda model, batch: (model(batch * size).float() - 1).square().mean()


def in_the_loss(function):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    return model, lambda model, batch: function(model(batch)).float().mean()


BROKEN = {
    "an epsilon that is 0 in float16": (
        normed(1e-8, 1e-4),
        "cannot help: 1 (rsqrt) divides by a square root of 0",
        "the epsilon 1e-08 is 0 in float16",
    ),
    "an epsilon of 0": (normed(0.0, 0.0), "float32 already: 1 (rsqrt) divides by", "away from 0"),
    "a gradient of 0 / 0": (
        in_the_loss(lambda x: (x.half() ** 2 * 2.0**-22).sqrt()),
        "cannot help: in the loss function, line",
        "epsilon",
    ),
    "a cast in the loss function": (
        in_the_loss(lambda x: (x * 1e6).half()),
        "cannot help: in the loss function, line",
        "or train in bfloat16",
    ),
    "a row that is masked as a whole": (
        in_the_loss(lambda x: x.masked_fill(x < 1e9, -np.inf).softmax(1)),
        "masked as a whole",
        "mask with a finite number",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_no_scale_helps_has_its_operation_and_its_advice(name):
    (model, loss), reason, advice = BROKEN[name]
    report = diagnose(model, loss, [torch.randn(6, 4, generator=torch.manual_seed(0))])
    assert report.rule is None
    assert ("not finite in float32 already" in said(report)) == (report.verdict == "unknown")
    assert reason in said(report)
    assert advice in said(report)


def test_a_loss_is_judged_by_what_it_trains():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(6, 1), "b": torch.nn.Linear(6, 1)})

    def loss(model, batch):
        return (model["b"](batch) + model["a"](batch)).float().mean() / 2**30

    report = diagnose(model, loss, batches_of("linear", 2), parameters=model["b"].parameters())
    assert [g.name for g in report.measurement.gradients] == ["b.weight", "b.bias"]
    with pytest.raises(ArgumentError, match="The loss depends on no trainable parameter"):
        diagnose(model, loss, batches_of("linear", 1), parameters=[])


def test_no_more_batches_are_taken_than_asked_for():
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield torch.ones(2, 6)

    report = diagnose(model_of("linear"), loss_fn, endless(), max_batches=3)
    assert report.measurement.batches == len(taken) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_16_bits_is_measured_as_it_is_beside_a_wide_copy(dtype):
    model = model_of("linear").to(dtype)
    batches = [batch.to(dtype) for batch in batches_of("linear", 1)]
    before = bits(model.state_dict())
    report = diagnose(model, loss_fn, batches)
    assert bits(model.state_dict()) == before
    assert report.verdict == "needed"
    wide = copy.deepcopy(model).float()
    loss_fn(wide, batches[0].float()).backward()
    found = {name: p.grad for name, p in wide.named_parameters()}
    for gradient in report.measurement.gradients:
        assert gradient.largest == pytest.approx(float(found[gradient.name].abs().max()))


def test_a_loss_that_casts_to_float16_itself_is_measured_beside_a_high_scale():
    model, batches = model_of("linear").half(), batches_of("linear", 2)
    report = diagnose(model, lambda model, batch: loss_fn(model, batch.half()) / 2**8, batches)
    assert report.verdict == "needed"
    assert report.rule.min_scale > 2**6


def test_random_numbers_are_drawn_alike_in_both_precisions():
    drawn = []

    def loss(model, batch):
        found = model(batch)
        drawn.append(found.dtype)
        noise = torch.rand_like(found) + torch.randn(found.shape, dtype=found.dtype)
        return (found * noise).float().mean() / 2**14

    report = diagnose(model_of("linear"), loss, batches_of("linear", 1))
    assert {torch.float16, torch.float32} <= set(drawn)
    assert max(min(g.errors.values()) for g in report.measurement.gradients) < 2e-3


def compiled_around(model):
    return torch.compile(model, backend="eager")


def compiled_within(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


def compiled_in_place(model):
    model[0].compile(backend="eager")
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [compiled_around, compiled_within, compiled_in_place])
@pytest.mark.parametrize("has_stance", [True, False])
def test_a_compiled_model_has_the_names_of_the_one_inside(compiled, has_stance, monkeypatch):
    # PyTorch 2.4 and 2.5 have none.
    if not has_stance:
        monkeypatch.delattr(torch.compiler, "set_stance", raising=False)
    model = compiled(model_of("linear"))
    before = [dict(vars(module)) for module in model.modules()]
    report = diagnose(model, loss_fn, batches_of("linear", 1))
    found = report.measurement
    assert report.model == "Sequential"
    assert "0.weight" in {each.name for each in found.gradients}
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_within_the_model_change_nothing(reentrant):
    model, batches = model_of("batch norm"), batches_of("batch norm", 1)

    def loss(model, batch):
        inside = checkpoint(model[:3], batch.requires_grad_(), use_reentrant=reentrant)
        return (model[3:](inside).float() ** 2).mean() * LOSES

    expected = diagnose(model, lambda m, b: loss_fn(m, b), batches).measurement.gradients
    assert diagnose(model, loss, batches).measurement.gradients == expected


class Ensemble(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(3, 1, 6))

    def forward(self, x):
        return torch.vmap(lambda weight: torch.nn.functional.linear(x, weight))(self.weights)


class Nested(torch.nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.layer, self.layout = torch.nn.Linear(6, 1), layout

    def forward(self, x):
        nested = torch.nested.nested_tensor([x[:1], x[1:]], layout=self.layout)
        return torch.cat(self.layer(nested).unbind())


WITHIN = {
    "an ensemble": (Ensemble, lambda m, b: m(b)),
    "a jacobian": (
        lambda: torch.nn.Linear(6, 1),
        lambda m, b: torch.func.jacrev(m)(b[0]).sum() * m(b),
    ),
    "nested": (lambda: Nested(torch.strided), lambda m, b: m(b)),
    "jagged": (lambda: Nested(torch.jagged), lambda m, b: m(b)),
    "scripted": (
        lambda: torch.jit.script(torch.nn.Linear(6, 1)),
        lambda m, b: m(b),
    ),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|torch.jit)")
@pytest.mark.parametrize("case", WITHIN)
def test_functions_of_functions_nested_tensors_and_scripts_are_measured(case):
    torch.manual_seed(0)
    make, call = WITHIN[case]
    model, batches = make(), [torch.randn(4, 6)]
    report = diagnose(model, lambda m, b: (call(m, b).float() ** 2).mean(), batches)
    assert report.verdict == "not needed"
    report = diagnose(model, lambda m, b: torch.tanh(call(m, b * 1e6).float()).mean(), batches)
    assert report.verdict == "cannot help"


# --- What a diagnosis leaves behind: nothing ----------------------------------------------------


class Counting(torch.nn.Module):
    """Counts its calls, replaces a buffer, and draws from every generator there is."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.calls = 0
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().mean((0, 1))
        self.cache = x
        return self.inner(x) * torch.rand(()) * np.random.rand() * random.random()


def everything(model):
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return (
        bits({name: (tensor, tensor.grad) for name, tensor in model.named_parameters()}),
        bits(dict(model.named_buffers())),
        [(id(tensor), tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())],
        [(id(m), m.training, sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()],
        [part.tolist() if hasattr(part, "tolist") else str(part) for part in generators],
        (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.autocast.__enter__,
        ),
    )


@pytest.mark.parametrize("kind", [*MODELS, "counting"])
@pytest.mark.parametrize("ends", ["well", "by an exception"])
def test_nothing_is_left_behind(kind, ends):
    model = Counting() if kind == "counting" else model_of(kind)
    batches = batches_of("linear" if kind == "counting" else kind, 1)
    model.train(kind != "batch norm")
    loss_fn(model, batches[0]).backward()
    before, data = everything(model), bits(batches)
    calls = []

    def loss(model, batch):
        calls.append(model.training)
        if ends != "well" and len(calls) > 2:
            raise KeyboardInterrupt
        return loss_fn(model, batch.mul_(2))

    try:
        with kernels_of(kind):
            diagnose(model, loss, batches)
    except KeyboardInterrupt:
        assert ends != "well"
    assert everything(model) == before
    assert bits(batches) == data
    assert all(calls)
    assert len(calls) > 2
    if kind == "counting":
        assert model.calls == 1


def test_a_scripted_model_keeps_its_mode():
    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.ReLU())).eval()
    diagnose(model, loss_fn, batches_of("linear", 1))
    assert not any(module.training for module in model.modules())


def test_modes_within_a_model_in_training_are_kept():
    model = model_of("batch norm")
    model[1].eval()
    seen = set()

    def loss(model, batch):
        seen.add((model.training, model[1].training))
        return loss_fn(model, batch)

    diagnose(model, loss, batches_of("batch norm", 1))
    assert seen == {(True, False)}


@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_it_finds_the_same_wherever_it_is_asked(around):
    model, batches = model_of("linear"), batches_of("linear", 1)
    expected = diagnose(model, loss_fn, batches)
    with around():
        assert diagnose(model, loss_fn, batches) == expected


# --- Mistakes -----------------------------------------------------------------------------------

LINEAR, ONE = torch.nn.Linear(6, 1), [torch.ones(2, 6)]
DIAGNOSE = lossscale.diagnosis.diagnose
MISTAKES = {
    "no loss": (lambda: diagnose(LINEAR, lambda m, b: None, ONE), "a NoneType. Return the loss"),
    "detached": (
        lambda: diagnose(LINEAR, lambda m, b: m(b).mean().detach(), ONE),
        "depends on no trainable parameter",
    ),
    "no parameter": (
        lambda: diagnose(torch.nn.ReLU(), lambda m, b: m(b).mean(), ONE),
        "depends on no trainable parameter",
    ),
    "one batch": (lambda: diagnose(LINEAR, loss_fn, ONE[0]), r"one batch is \[batch\]"),
    "in turn": (lambda: diagnose(loss_fn, LINEAR, ONE), r"must be a torch\.nn\.Module"),
    "no function": (
        lambda: diagnose(LINEAR, torch.ones(()), ONE),
        "`loss_fn` must be a function",
    ),
    "of Keras": (
        lambda: DIAGNOSE(LINEAR, ONE),
        r"lossscale\.torch\.diagnose\(model, loss_fn",
    ),
    "meta": (
        lambda: diagnose(torch.nn.Linear(6, 1, device="meta"), loss_fn, ONE),
        "nor models on the meta device",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises((ArgumentError, ArgumentTypeError, UnsupportedError), match=message):
        call()
