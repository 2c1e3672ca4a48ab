"""Passes of a model of PyTorch beside what is computed by hand, the report, what is left behind."""

import contextlib
import copy
import functools
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lossscale
from frameworks.torch.support import bits
from lossscale.diagnosis.torch import TorchGradientFunction, explain
from lossscale.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.torch.scaling import stored

diagnose = lossscale.torch.diagnose


# Small models of many kinds, each with a loss on a batch that float16 loses something of.

LOSES = 2.0**-17
"""What a loss is multiplied by, as a mean over so many more outputs would."""


class Cubed(torch.autograd.Function):
    """A function with a derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * slope


class Through(nn.Module):
    """A layer, and how it is called."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


def _casts_by_itself(layer, x):
    """In float16 whatever it is told to."""
    with torch.autocast("cpu", enabled=False):
        return (x.half() @ layer.weight.T.half()).to(x.dtype)


def _own_autocast(layers, x):
    """Switches automatic casting on by itself, and off for a part."""
    first, second = layers
    with torch.autocast("cpu", torch.bfloat16):
        x = first(x)
        with torch.autocast("cpu", enabled=False):
            return second(x.to(second.weight.dtype))


def _two(*sizes):
    return nn.ModuleList(nn.Linear(6, size) for size in sizes)


class Tied(nn.Module):
    """One table for what goes in and what comes out."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens):
        return self.out(self.table(tokens))


def _frozen():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    model[0].weight.requires_grad_(False)
    return model


def _embedded(**settings):
    return nn.Sequential(nn.Embedding(9, 6, **settings), nn.Linear(6, 4))


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    "embedding": _embedded,
    "sparse embedding": lambda: _embedded(sparse=True),
    "embedding that writes": lambda: _embedded(max_norm=0.5),
    "lstm": lambda: Through(nn.LSTM(6, 5), lambda layer, x: layer(x)[0][:, -1]),
    "batch norm": lambda: nn.Sequential(
        nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Flatten(), nn.Linear(24, 2)
    ),
    "shared": Tied,
    "frozen": _frozen,
    "own function": lambda: Through(nn.Linear(6, 6), lambda layer, x: Cubed.apply(layer(x))),
    "casts by itself": lambda: Through(nn.Linear(6, 6, bias=False), _casts_by_itself),
    "own autocast": lambda: Through(_two(6, 6), _own_autocast),
    "several losses": lambda: Through(_two(3, 2), lambda heads, x: tuple(h(x) for h in heads)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
}


def model_of(kind):
    torch.manual_seed(1)
    return MODELS[kind]()


def batches_of(kind, count=2):
    """Batches for a model, each alike but for the numbers in it."""
    made = torch.Generator().manual_seed(2)
    if "embedding" in kind or kind == "shared":
        # Tokens that recur.
        return [torch.randint(0, 5, (3, 4), generator=made) for _ in range(count)]
    return [torch.randn(3, 4, 6, generator=made) for _ in range(count)]


def loss_fn(model, batch):
    """Small enough that float16 loses a part of the gradients, and not all of them."""
    found = model(batch)
    outputs = found if isinstance(found, tuple) else [found]
    return sum((_widened(each) ** 2).mean() for each in outputs) * LOSES


@functools.cache
def _onednn_has_float16_lstm():
    with torch.random.fork_rng(), torch.autocast("cpu", torch.float16):
        try:
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
        except RuntimeError:
            return False
    return True


def kernels_of(kind):
    """Within it a model of the kind runs in float16 on this processor."""
    if kind == "lstm" and not _onednn_has_float16_lstm():
        return torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
    return contextlib.nullcontext()


def _widened(tensor):
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# --- Passes and reports -------------------------------------------------------------------------


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


RIGHT = ("shared", "own function", "several losses")
"""Where float16 loses less than 10 % of each gradient."""


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
    if kind in RIGHT:
        assert (report.verdict, report.rule) == ("not needed", None)
        return
    assert report.verdict == "needed"
    assert measurement.lowest_exponent > 0
    beyond = 2.0 ** (measurement.highest_exponent + 1)
    with kernels_of(kind):
        found = [gradients_by_hand(model, batch, beyond, wide=False) for batch in batches]
    assert not all(np.isfinite(g).all() for each in found for g in each.values())


def test_a_loss_is_judged_by_what_it_trains_and_no_more_batches_are_taken_than_asked_for():
    model = nn.ModuleDict({"a": nn.Linear(6, 1), "b": nn.Linear(6, 1)})

    def loss(model, batch):
        return (model["b"](batch) + model["a"](batch)).float().mean() / 2**30

    report = diagnose(model, loss, batches_of("linear", 2), parameters=model["b"].parameters())
    assert [g.name for g in report.measurement.gradients] == ["b.weight", "b.bias"]
    wrong = {
        "nothing, and none": [],
        "tuple, and none": list(model.named_parameters()),
        "Parameter, and none": list(nn.Linear(2, 2).parameters()),
        "a SGD": torch.optim.SGD(model.parameters()),
    }
    for words, given in wrong.items():
        for run, batches in ((diagnose, batches_of("linear", 1)), (explain, torch.ones(2, 6))):
            with pytest.raises((ArgumentError, TypeError), match=words):
                run(model, loss, batches, parameters=given)
    endless = iter(lambda: torch.ones(2, 6), None)
    report = diagnose(model_of("own function"), loss_fn, endless, max_batches=3)
    assert report.measurement.batches == 3


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
    if dtype == torch.float16:
        # A loss that casts to float16 itself is measured beside a high scale.
        report = diagnose(model, lambda m, b: loss_fn(m, b.half()) / 2**8, batches_of("linear", 2))
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


class Nested(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.layer, self.layout = nn.Linear(6, 1), layout

    def forward(self, x):
        nested = torch.nested.nested_tensor([x[:1], x[1:]], layout=self.layout)
        return torch.cat(self.layer(nested).unbind())


WITHIN = {
    "weights": (
        lambda: nn.Linear(6, 1),
        lambda m, b: torch.vmap(lambda weight: m(b) * weight)(torch.ones(3)),
    ),
    "a jacobian": (lambda: nn.Linear(6, 1), lambda m, b: torch.func.jacrev(m)(b[0]).sum() * m(b)),
    "nested": (lambda: Nested(torch.strided), lambda m, b: m(b)),
    "jagged": (lambda: Nested(torch.jagged), lambda m, b: m(b)),
    "scripted": (lambda: torch.jit.script(nn.Linear(6, 1)), lambda m, b: m(b)),
    "scripted within": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 1)),
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
    if "scripted" not in case and "Nested" not in report.model:
        assert "casts it to float16" in said(report)


# --- What it leaves behind: nothing -------------------------------------------------------------


def test_modes_of_scripts_are_kept_and_hooks_that_step_at_once_are_not_called():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 1), nn.ReLU())).eval()
    diagnose(scripted, loss_fn, batches_of("linear", 1))
    assert not any(module.training for module in scripted.modules())
    model = model_of("linear")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.data.zero_())
    before = bits(model.state_dict())
    diagnose(model, loss_fn, batches_of("linear", 1))
    assert bits(model.state_dict()) == before


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

LINEAR = nn.Linear(6, 1)
ONE = [torch.ones(2, 6)]


def loss(call):
    return lambda: diagnose(LINEAR, call, ONE)


def given(batches):
    return lambda: diagnose(LINEAR, loss_fn, batches)


META = nn.Linear(6, 1, device="meta")
TYPE, VALUE = ArgumentTypeError, ArgumentError
MISTAKES = {
    "a list": (loss(lambda m, b: [m(b).mean()]), TYPE, "a list. Return the loss alone"),
    "outputs": (loss(lambda m, b: types.SimpleNamespace(loss=m(b))), TYPE, r"`output\.loss`"),
    "no mean": (loss(lambda m, b: m(b)), VALUE, r"shape \(2, 1\) .*Take the mean"),
    "a number": (loss(lambda m, b: 1.0), TYPE, "a float"),
    "integers": (loss(lambda m, b: (m(b) > 0).sum()), VALUE, "dtype torch.int64"),
    "detached": (loss(lambda m, b: m(b).mean().detach()), VALUE, "no trainable parameter"),
    "of another": (loss(lambda m, b: nn.Linear(6, 1)(b).mean()), VALUE, "depends on no train"),
    **{
        f"one batch, {type(each).__name__}": (given(each), TYPE, r"one batch is \[batch\]")
        for each in (ONE[0], (ONE[0],), {"x": ONE[0]}, 3, np.ones((2, 6)))
    },
    "no batch": (given([]), VALUE, "`batches` must contain at least one batch"),
    "no module": (lambda: diagnose(loss_fn, LINEAR, ONE), TYPE, r"must be a torch\.nn\.Module"),
    "no function": (lambda: diagnose(LINEAR, 1, ONE), TYPE, "`loss_fn` must be a function"),
    "Keras'": (lambda: lossscale.diagnosis.diagnose(LINEAR, ONE), TYPE, r"torch\.diagnose\(model"),
    "no parameter": (lambda: diagnose(nn.ReLU(), loss_fn, ONE), VALUE, "no trainable param"),
    "on meta": (lambda: diagnose(META, loss_fn, ONE), UnsupportedError, "nor models on the meta"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_one_sentence(mistake):
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        call()
