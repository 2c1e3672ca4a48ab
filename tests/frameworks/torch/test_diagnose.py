"""The report on a model of PyTorch: every number beside one that is computed by hand."""

import copy
import json
import types

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lossscale
from frameworks.torch.modules import LOSES, MODELS, batches_of, kernels_of, loss_fn, model_of
from frameworks.torch.support import bits
from lossscale.diagnostics import GradientReport, Verdict
from lossscale.errors import ArgumentError, ArgumentTypeError

diagnose = lossscale.torch.diagnose


def gradients_by_hand(model, batch, scale, *, wide):
    """The gradients of the scaled loss as training has them, by `backward` of a copy."""
    model = copy.deepcopy(model)
    if wide:
        model, batch = model.double(), batch.double() if batch.is_floating_point() else batch
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
    return {name: None if g is None else g.to_dense().numpy() for name, g in pairs}


def expected(model, batches, scale, reference_scale):
    """What float16 loses of each gradient at a scale, and how wrong it is."""
    pairs = {}
    for batch in batches:
        reference = gradients_by_hand(model, batch, reference_scale, wide=True)
        found = gradients_by_hand(model, batch, scale, wide=False)
        for name, g in reference.items():
            h = found[name].astype(np.float64) / scale
            pairs.setdefault(name, []).append((g / reference_scale, h))
    numbers = {}
    for name, both in pairs.items():
        g, h = (np.concatenate([each[side].ravel() for each in both]) for side in (0, 1))
        lost = np.abs(g)[h == 0].sum() / np.abs(g).sum()
        numbers[name] = lost, np.linalg.norm(h - g) / np.linalg.norm(g)
    return numbers


@pytest.mark.parametrize("kind", MODELS)
def test_what_float16_makes_of_each_gradient_is_what_training_makes_of_it(kind):
    model, batches = model_of(kind), batches_of(kind)
    fidelity = diagnose(model, loss_fn, batches, reference="float64", in_use=2.0**9).fidelity
    assert fidelity.missing == ""
    # Something is wrong without a scale, and a scale mends it.
    without, with_one = (
        max(variable.at[scale].error for variable in fidelity.variables)
        for scale in (1.0, fidelity.good)
    )
    assert without > 0.01
    assert with_one < without / 2
    assert fidelity.batches == 2
    assert (fidelity.reference_scale == 1) == (kind != "casts by itself")
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [variable.name for variable in fidelity.variables] == names
    with kernels_of(kind):
        for scale in (1.0, fidelity.good, 2.0**9):
            wanted = expected(model, batches, scale, fidelity.reference_scale)
            for variable in fidelity.variables:
                found = variable.at[scale]
                assert (found.lost, found.error) == pytest.approx(wanted[variable.name], rel=1e-6)
        overflowing = gradients_by_hand(model, batches[0], fidelity.highest * 2, wide=False)
        highest = gradients_by_hand(model, batches[0], fidelity.highest, wide=False)
    assert not all(np.isfinite(h).all() for h in overflowing.values())
    assert all(np.isfinite(h).all() for h in highest.values())


# --- The report ---------------------------------------------------------------------------------


def test_the_report_names_layers_and_tensors_on_the_way():
    model = model_of("batch norm")
    report = diagnose(model, loss_fn, batches_of("batch norm"))
    layers = {variable.name: variable.layer for variable in report.fidelity.variables}
    assert layers["0.weight"] == "0"
    assert {tensor.name for tensor in report.ranges} >= {"output:Sequential", "activation:1"}
    # What a module only passes on is not listed again.
    assert "activation:4" not in {tensor.name for tensor in report.ranges}
    assert report.framework == "PyTorch"
    assert (report.batches, report.samples) == (2, 6)
    text = str(report)
    assert text.startswith("Loss scaling for Sequential in float16: re")
    assert "under torch.autocast" in text
    assert "Keras" not in text
    assert "keras" not in text
    assert GradientReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["fidelity"]["setting"] == "under torch.autocast"


def test_gradients_inside_are_those_that_autograd_gives():
    model, batch = model_of("convolution"), batches_of("convolution", 1)[0]
    tensors = []
    handles = [m.register_forward_hook(lambda m, i, o: tensors.append(o)) for m in model[::2]]
    grads = torch.autograd.grad(loss_fn(model, batch), tensors)
    for handle in handles:
        handle.remove()
    report = diagnose(model, loss_fn, [batch], quick=True)
    masses = {tensor.name: tensor.histogram.mass for tensor in report.ranges}
    for name, gradient in zip(("activation:0", "output:Sequential"), grads, strict=True):
        assert masses[name] == pytest.approx(float(gradient.double().abs().sum()), rel=1e-6)


def test_quick_computes_each_batch_once_and_predicts():
    calls = []

    def counted(model, batch):
        calls.append(torch.is_autocast_enabled("cpu"))
        return loss_fn(model, batch)

    report = diagnose(model_of("linear"), counted, batches_of("linear", 3), quick=True)
    assert calls == [False] * 3
    assert report.fidelity is None
    assert report.verdict is report.prediction.verdict
    assert diagnose(model_of("linear"), loss_fn, batches_of("linear", 1), format="bfloat16").format
    assert "bfloat16" in str(
        diagnose(model_of("linear"), loss_fn, batches_of("linear", 1), format="bfloat16")
    )


def test_no_more_batches_are_taken_than_asked_for():
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield torch.ones(2, 6)

    report = diagnose(model_of("own function"), loss_fn, endless(), max_batches=2, quick=True)
    assert (report.batches, len(taken)) == (2, 2)


@pytest.mark.parametrize("kind", ["wrapper", "scaler", "torch's scaler", "number"])
def test_the_scale_in_use_is_measured_as_well(kind):
    model = model_of("linear")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    in_use = {
        "wrapper": lambda: lossscale.torch.LossScaleOptimizer(inner, initial_scale=64),
        "scaler": lambda: lossscale.torch.GradScaler("cpu", init_scale=64.0),
        "torch's scaler": lambda: torch.amp.GradScaler("cpu", init_scale=64.0),
        "number": lambda: 64,
    }[kind]()
    report = diagnose(model, loss_fn, batches_of("linear", 1), in_use=in_use)
    assert report.fidelity.in_use == 64.0
    assert "lost at 2**6 (in use)" in str(report)


def test_a_model_that_fits_needs_no_scaling():
    report = diagnose(model_of("linear"), lambda m, b: loss_fn(m, b) / LOSES, batches_of("linear"))
    assert report.verdict is Verdict.NOT_NEEDED
    assert report.recommended_scale == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_16_bits_is_measured_as_it_is_beside_a_wide_copy(dtype):
    model = model_of("linear").to(dtype)
    batches = [batch.to(dtype) for batch in batches_of("linear", 1)]
    before = bits(model.state_dict())
    report = diagnose(model, loss_fn, batches, reference="float32")
    assert bits(model.state_dict()) == before
    assert report.verdict in (Verdict.REQUIRED, Verdict.RECOMMENDED)
    assert report.policy == str(dtype).removeprefix("torch.")
    assert report.fidelity.reference_scale == 1
    wide = copy.deepcopy(model).float()
    loss_fn(wide, batches[0].float()).backward()
    found = {name: p.grad for name, p in wide.named_parameters()}
    for variable in report.fidelity.variables:
        size = float(found[variable.name].double().abs().sum())
        assert variable.at[1.0].mass == pytest.approx(size, rel=1e-5)


def test_a_loss_that_casts_to_float16_itself_is_measured_beside_a_high_scale():
    model, batches = model_of("linear").half(), batches_of("linear", 2)
    report = diagnose(model, lambda model, batch: loss_fn(model, batch.half()) / 2**8, batches)
    assert report.fidelity.reference_scale > 2**10
    assert report.verdict is Verdict.REQUIRED
    assert "computes in 16 bits whatever" in str(report)


def test_a_model_that_float16_cannot_run_is_unknown_and_says_why():
    def loss(model, batch):
        found = model(batch)
        if found.dtype == torch.float16:
            raise NotImplementedError('"inverse_cpu" not implemented for Half')
        return found.mean()

    report = diagnose(model_of("linear"), loss, batches_of("linear", 1))
    assert report.verdict is Verdict.UNKNOWN
    assert report.reason.startswith('The model does not run in float16 here: "inverse')


def test_random_numbers_are_drawn_alike_in_both_precisions():
    drawn = []

    def loss(model, batch):
        found = model(batch)
        drawn.append(found.dtype)
        noise = torch.rand_like(found) + torch.randn(found.shape, dtype=found.dtype)
        return (found * noise).float().mean() / 2**14

    report = diagnose(model_of("linear"), loss, batches_of("linear", 1))
    assert {torch.float16, torch.float32} <= set(drawn)
    assert max(v.at[report.fidelity.good].error for v in report.fidelity.variables) < 2e-3


def test_a_model_that_draws_what_cannot_be_repeated_is_unknown():
    numbers = iter(range(1, 1000))
    report = diagnose(
        model_of("linear"), lambda m, b: loss_fn(m, b) * next(numbers), batches_of("linear", 1)
    )
    assert report.verdict is Verdict.UNKNOWN
    assert "draws random numbers of its own" in report.reason


def test_a_compiled_model_has_the_names_of_the_one_inside():
    model = torch.compile(model_of("linear"), backend="eager")
    report = diagnose(model, loss_fn, batches_of("linear", 1), quick=True)
    names = {tensor.name for tensor in report.ranges}
    assert {"0.weight", "activation:0", "output:Sequential"} <= names


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_within_the_model_change_nothing(reentrant):
    model, batches = model_of("batch norm"), batches_of("batch norm", 1)

    def loss(model, batch):
        inside = checkpoint(model[:3], batch.requires_grad_(), use_reentrant=reentrant)
        return (model[3:](inside).float() ** 2).mean() * LOSES

    expected = diagnose(model, lambda m, b: loss_fn(m, b), batches).fidelity.variables
    assert diagnose(model, loss, batches).fidelity.variables == expected


# --- Mistakes -----------------------------------------------------------------------------------

LINEAR = torch.nn.Linear(6, 1)
MISTAKES = {
    "a list": (lambda m, b: [m(b).mean()], ArgumentTypeError, "a list. Add several losses up"),
    "outputs": (
        lambda m, b: types.SimpleNamespace(loss=m(b).mean()),
        ArgumentTypeError,
        r"`output\.loss`",
    ),
    "nothing": (lambda m, b: None, ArgumentTypeError, "Received: None"),
    "a number": (lambda m, b: m(b).mean().item(), ArgumentTypeError, r"Leave out \.item"),
    "no mean": (lambda m, b: m(b), ArgumentError, r"shape \(2, 1\). Take the mean"),
    "detached": (lambda m, b: m(b).mean().detach(), ArgumentError, "no trainable parameter"),
    "another model": (
        lambda m, b: torch.nn.Linear(6, 1)(b).mean(),
        ArgumentError,
        "depends on none of the trainable parameters",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_loss_that_cannot_be_derived_is_named(mistake):
    loss, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        diagnose(LINEAR, loss, [torch.ones(2, 6)])


@pytest.mark.parametrize("batches", [torch.ones(2, 6), (torch.ones(2, 6),), {"x": 1}, 3])
def test_one_batch_is_no_iterable_of_batches(batches):
    with pytest.raises(ArgumentTypeError, match=r"one batch is \[batch\]"):
        diagnose(LINEAR, loss_fn, batches)


def test_other_mistakes_have_one_sentence():
    one = [torch.ones(2, 6)]
    with pytest.raises(ArgumentError, match="no batch in `batches`"):
        diagnose(LINEAR, loss_fn, [])
    with pytest.raises(ArgumentTypeError, match=r"must be a torch\.nn\.Module"):
        diagnose(loss_fn, LINEAR, one)
    with pytest.raises(ArgumentTypeError, match="`loss_fn` must be a function"):
        diagnose(LINEAR, torch.ones(()), one)
    with pytest.raises(ArgumentError, match="has no trainable parameter"):
        diagnose(torch.nn.ReLU(), loss_fn, one)
    with pytest.raises(ArgumentError, match="weight has no shape yet"):
        diagnose(torch.nn.LazyLinear(1), loss_fn, one)
    with pytest.raises(ArgumentError, match="'float32' or 'float64'"):
        diagnose(LINEAR, loss_fn, one, reference="float16")
    with pytest.raises(ArgumentError, match="`in_use` must be"):
        diagnose(LINEAR, loss_fn, one, in_use=-1)
    elsewhere = torch.ones(2, 6, device="meta")

    def on_a_gpu(model, batch):
        # What PyTorch says; here no other device has numbers.
        raise RuntimeError("Expected all tensors to be on the same device")

    with pytest.raises(ArgumentError, match="A batch is on meta, and the model on cpu"):
        diagnose(LINEAR, on_a_gpu, [elsewhere])
    with pytest.raises(ArgumentError, match="weight is on the device meta"):
        diagnose(torch.nn.Linear(6, 1, device="meta"), loss_fn, one)
