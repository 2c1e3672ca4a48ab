"""What a forward pass changes follows the steps that were applied: `guard` of a model."""

import copy
import functools
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lossscale
from lossscale.torch import GradScaler, LossScaleOptimizer, guard, unguard

INF = float("inf")
FIXED = lossscale.FixedScale(2.0**10, skip_nonfinite=True)
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
BAD = X * INF


class Codebook(nn.Module):
    """Buffers that are replaced, None, late, integers, sparse, and views."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("codes", torch.ones(4))
        self.register_buffer("largest", None)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.register_buffer("sums", torch.zeros(3, 4).t())
        self.register_buffer("column", torch.zeros(4, 3)[:, 0])
        self.register_buffer("conjugate", torch.ones(4, dtype=torch.cfloat).conj())

    def forward(self, x):
        hidden = self.linear(x)
        with torch.no_grad():
            self.codes = 0.9 * self.codes + 0.1 * hidden.mean(0)
            self.largest = hidden.amax(0)
            self.calls += 1
            self.sums += hidden.mean()
            self.column += hidden.mean()
            self.conjugate *= hidden.mean()
            self.graph.mul_(2)
            if not hasattr(self, "late"):
                self.register_buffer("late", hidden.mean(0))
        return hidden * self.codes


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.rest = nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x):
        x = self.first(x)
        return (
            checkpoint(self.rest, x, use_reentrant=self.reentrant)
            if self.training
            else self.rest(x)
        )


def norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


MODELS = {
    "norm": norm,
    "spectral": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4)
    ),
    "old spectral": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "codebook": Codebook,
    "reentrant": lambda: Checkpointed(True),
    "not reentrant": lambda: Checkpointed(False),
}


def made(name="norm"):
    torch.manual_seed(0)
    return MODELS[name]()


def optimizers(model, number=1, **settings):
    """Optimizers that share the parameters."""
    weights = list(model.parameters())
    return [torch.optim.SGD(weights[i::number], lr=0.05, **settings) for i in range(number)]


def wrapped(model, **settings):
    inner = optimizers(model, fused="decide" in settings)
    return LossScaleOptimizer(inner, rule=FIXED, **settings)


def guarded(**settings):
    model = made()
    optimizer = wrapped(model, **settings)
    return guard(model, optimizer), optimizer


def loss_of(model, x, call=None):
    with torch.autocast("cpu", torch.float16):
        return (call or model)(x).float().pow(2).mean()


def step(model, optimizer, x, call=None):
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, x, call))
    optimizer.step()


# --- A loop for each way of a step; each returns what to guard by, and a step --------------------


def whole(x):
    return [x]


def by_wrapper(model, parts=whole, scales_loss=False, number=1, **settings):
    inner = optimizers(model, number, fused="decide" in settings)
    optimizer = LossScaleOptimizer(inner, rule=FIXED, **settings)

    def one(x, call=None):
        optimizer.zero_grad()
        for loss in (loss_of(model, part, call) for part in parts(x)):
            if scales_loss:
                optimizer.scale_loss(loss).backward()
            else:
                optimizer.backward(loss)
        optimizer.step()

    return optimizer, one


def by_scaler(model, number=1, fused=False):
    inner, scaler = optimizers(model, number, fused=fused), GradScaler("cpu", rule=FIXED)

    def one(x, call=None):
        for each in inner:
            each.zero_grad()
        scaler.scale(loss_of(model, x, call)).backward()
        for each in inner:
            scaler.step(each)
        scaler.update()

    return scaler, one


def by_closure(model):
    optimizer = wrapped(model)

    def closure(x, call):
        optimizer.zero_grad()
        loss = loss_of(model, x, call)
        optimizer.backward(loss)
        return loss

    return optimizer, lambda x, call=None: optimizer.step(lambda: closure(x, call))


def by_zero_grad(model):
    optimizer = wrapped(model)

    def one(x, call=None):
        optimizer.zero_grad()
        if optimizer.backward(loss_of(model, x, call)):
            optimizer.step()
        optimizer.zero_grad()

    return optimizer, one


WAYS = {
    "backward": by_wrapper,
    "device": functools.partial(by_wrapper, decide="device"),
    "scale_loss": functools.partial(by_wrapper, scales_loss=True),
    "closure": by_closure,
    "accumulation": functools.partial(by_wrapper, parts=lambda x: (x, X.flip(0), x * 0.5)),
    "scaler": by_scaler,
    "fused scaler": functools.partial(by_scaler, fused=True),
    "two in a scaler": functools.partial(by_scaler, number=2),
    "two in a wrapper": functools.partial(by_wrapper, number=2),
    "zero_grad": by_zero_grad,
}


def guarded_by(way):
    model = made()
    watched, one = WAYS[way](model)
    return guard(model, watched), watched, one


def bits(model):
    """The buffers, as they are stored."""
    found = {}
    for name, tensor in model.named_buffers():
        dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
        found[name] = dense.detach().resolve_conj().contiguous().numpy().tobytes()
    return found


def run(name, way, bad, guarded, call=lambda model: None, compiled=False):
    """Trains, and returns the bits of the parameters and buffers, and the number of skips."""
    model = made(name)
    watched, one = WAYS[way](model)
    if guarded:
        assert guard(model, watched) is model
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else call(model)
    given = torch.Generator().manual_seed(1)
    for number in range(5):
        x = torch.randn(8, 4, generator=given)
        if number in bad:
            one(x * 1e6, called)
        elif number != 2:
            one(x, called)
        model.eval()
        with torch.no_grad():
            model(X)
        model.train()
    weights = {n: p.detach().numpy().tobytes() for n, p in model.named_parameters()}
    return (weights, bits(model)), int(watched.steps_skipped)


PAIRS = [("norm", way) for way in WAYS] + [
    (name, way) for name in MODELS if name != "norm" for way in ("backward", "device", "scaler")
]


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_a_run_ends_as_one_that_was_never_given_the_batch(name, way):
    never, _ = run(name, way, (), guarded=False)
    found, skipped = run(name, way, (2,), guarded=True)
    assert found == never
    assert skipped >= 1
    assert run(name, way, (), guarded=True)[0] == never
    plain, _ = run(name, way, (2,), guarded=False)
    assert plain[1] != never[1]


@pytest.mark.parametrize("way", ["backward", "device", "scaler", "accumulation"])
@pytest.mark.parametrize("bad", [(0,), (1, 2)])
@pytest.mark.parametrize("call", [lambda m: m.forward, lambda m: lambda x: m[2](m[1](m[0](x)))])
def test_a_model_that_is_called_without_its_hooks(way, bad, call):
    """Its buffers are saved after each step."""
    model, other = made(), made()
    watched, one = WAYS[way](model)
    guard(model, watched)
    _, same = WAYS[way](other)
    for number in range(4):
        x = X * (1e6 if number in bad else 1)
        before = bits(model)
        one(x, call(model))
        if number in bad:
            assert bits(model) == before
        else:
            same(x)
    assert bits(model) == bits(other)


@pytest.mark.parametrize("way", ["backward", "device", "scaler"])
def test_a_compiled_model(way):
    torch._dynamo.reset()
    never, _ = run("norm", way, (), guarded=False, compiled=True)
    found, skipped = run("norm", way, (2,), guarded=True, compiled=True)
    assert found == never
    assert skipped == 1


@pytest.mark.parametrize("guarded_is", ["inner", "compiled", "in place"])
def test_a_first_compiled_step_after_others_may_be_skipped(guarded_is):
    torch._dynamo.reset()
    model = made()
    optimizer = wrapped(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    guard(compiled if guarded_is == "compiled" else model, optimizer)
    for _ in range(2):
        step(model, optimizer, X)
    if guarded_is == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
        compiled = model
    for _ in range(2):
        before = bits(model)
        step(model, optimizer, BAD, compiled)
        assert bits(model) == before
        step(model, optimizer, X, compiled)
    assert optimizer.steps_skipped == 2


@pytest.mark.parametrize("way", ["backward", "device", "scaler"])
def test_what_others_do_to_the_buffers_between_the_steps_stays(way):
    def load(model):
        other = norm()
        other[1].running_mean.fill_(7.0)
        model.load_state_dict(other.state_dict())

    def recalibrate(model):
        with torch.no_grad():
            model(X * 3)

    def evaluate_with_others(model):
        kept = copy.deepcopy(model.state_dict())
        model[1].running_mean.data.fill_(5.0)
        model.eval()(X)
        model.train().load_state_dict(kept)

    changes = [
        load,
        recalibrate,
        lambda model: torch.optim.swa_utils.update_bn([X, X * 2], model),
        lambda model: model[1].reset_running_stats(),
        lambda model: model.double().float(),
        lambda model: model[1].running_var.copy_(torch.ones(4) * 3),
        evaluate_with_others,
    ]
    for change in changes:
        model, watched, one = guarded_by(way)
        one(X)
        change(model)
        before = bits(model)
        one(BAD)
        assert bits(model) == before
        assert int(watched.steps_skipped) == 1
    # After these the passes cannot be seen.
    for change in (load, recalibrate):
        model, watched, one = guarded_by(way)
        for x in (X, BAD):
            change(model)
            before = bits(model)
            one(x, model.forward)
        assert bits(model) == before


def test_buffers_of_another_dtype_since_they_were_saved():
    model, optimizer = guarded()
    step(model, optimizer, X, model.forward)
    before = model[1].running_mean.clone()
    model[1].to(torch.float64)
    optimizer.zero_grad()
    optimizer.backward((model[2](model[1](model[0](BAD).double()).float())).pow(2).mean())
    optimizer.step()
    assert optimizer.last_step_skipped
    assert model[1].running_mean.dtype == torch.float64
    assert torch.equal(model[1].running_mean, before.double())


@pytest.mark.parametrize("decide", ["host", "device"])
def test_numbers_that_replace_those_of_a_buffer(decide):
    def replaced(x):
        found = model.forward(x)
        model[1].running_var.data = model[1].running_var.clone()
        return found

    model, optimizer = guarded(decide=decide)
    step(model, optimizer, X, model.forward)
    model[1].running_mean.data = model[1].running_mean.clone()
    before = bits(model)
    step(model, optimizer, BAD, replaced)
    assert bits(model) == before


def test_reentrant_checkpointing_of_the_whole_model():
    model, optimizer = guarded()
    for x in (X, BAD, X, BAD):
        before = bits(model)
        given = x.clone().requires_grad_()
        step(model, optimizer, given, lambda x: checkpoint(model, x, use_reentrant=True))
        assert (bits(model) == before) == (x is BAD)


@pytest.mark.parametrize("first", [X, BAD])
def test_lazy_buffers_get_their_shape_in_a_first_step(first):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 1))
    optimizer = wrapped(model)
    guard(model, optimizer)
    fresh = bits(nn.Sequential(nn.Identity(), nn.BatchNorm1d(4, affine=False)))
    step(model, optimizer, first)
    if first is BAD:
        assert bits(model) == fresh
    before = bits(model)
    step(model, optimizer, BAD)
    assert bits(model) == before


# --- Several optimizers --------------------------------------------------------------------------


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("skips", ["d", "g"])
@pytest.mark.parametrize("order", ["alternating", "forward passes first"])
def test_a_skip_puts_back_what_changed_since_the_last_step_of_any(order, skips, decide):
    torch.manual_seed(0)
    g, d = norm(), nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    of_g, of_d = wrapped(g, decide=decide), wrapped(d, decide=decide)
    for model in (g, d):
        guard(model, [of_g, of_d])

    def both():
        return bits(g), bits(d)

    for number in range(4):
        is_bad = number == 2
        before = both()
        if order == "alternating":
            of_d.zero_grad()
            of_d.backward(loss_of(d, g(X).detach() * (INF if is_bad and skips == "d" else 1)))
            of_d.step()
            if is_bad and skips == "d":
                assert both() == before
            before = both()
            of_g.zero_grad()
            of_g.backward(loss_of(d, g(BAD if is_bad and skips == "g" else X)))
            of_g.step()
            assert (both() == before) == is_bad or skips == "d"
        else:
            loss_d = loss_of(d, g(X).detach() * (INF if is_bad and skips == "d" else 1))
            loss_g = loss_of(g, BAD if is_bad and skips == "g" else X)
            for one, loss in ((of_d, loss_d), (of_g, loss_g)):
                one.zero_grad()
                one.backward(loss)
            of_d.step()
            of_g.step()
            assert (both() == before) == is_bad
    assert int(of_d.steps_skipped) == (skips == "d")


def test_one_of_two_optimizers_in_a_scaler_skips():
    for call in (lambda model: model, lambda model: model.forward):
        model = made()
        scaler = GradScaler("cpu", rule=FIXED)
        first, second = (
            torch.optim.SGD(part, lr=0.1)
            for part in (model[0].parameters(), model[1:].parameters())
        )
        guard(model, scaler)
        for overflows in (False, True, True, False):
            before = bits(model)
            scaler.scale(call(model)(X).pow(2).mean()).backward()
            if overflows:
                model[0].weight.grad.fill_(INF)
            for each in (second, first):
                scaler.step(each)
            scaler.update()
            for each in (second, first):
                each.zero_grad()
            assert (bits(model) == before) == overflows


# --- Averages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["backward", "device", "scaler"])
def test_an_averaged_model_follows_the_applied_steps(way):
    model = made()
    watched, one = WAYS[way](model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert guard(averaged, watched) is averaged
    counts = []
    for x in (X, BAD, X, BAD, BAD):
        one(x)
        averaged.update_parameters(model)
        counts.append(int(averaged.n_averaged))
    assert counts == [1, 1, 2, 2, 2]
    for other in (copy.deepcopy(averaged), pickle.loads(pickle.dumps(averaged))):
        other.update_parameters(model)
        assert (int(other.n_averaged), int(averaged.n_averaged)) == (3, 2)
    assert unguard(averaged) is averaged
    averaged.update_parameters(model)
    assert int(averaged.n_averaged) == 3


# --- Copies, files, memory -----------------------------------------------------------------------


def test_a_copy_of_a_guarded_model_is_not_guarded_and_needs_no_library():
    model, optimizer = guarded()
    step(model, optimizer, X)
    file = io.BytesIO()
    torch.save(model, file)
    for other in (
        copy.deepcopy(model),
        torch.load(io.BytesIO(file.getvalue()), weights_only=False),
    ):
        before = bits(other)
        other(X)
        other.load_state_dict(model.state_dict())
        other(X)
        step(model, optimizer, BAD)
        assert bits(other) != before
    code = (
        "import io, sys, torch; sys.modules['lossscale'] = None;"
        "model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False);"
        "model(torch.ones(2, 4)); model.load_state_dict(model.state_dict())"
    )
    subprocess.run([sys.executable, "-c", code], input=file.getvalue(), check=True)


def test_a_guard_keeps_neither_the_model_nor_the_optimizer():
    model, optimizer = guarded()
    step(model, optimizer, X)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model
    gc.collect()
    step(other := made(), optimizer, X)
    assert other is not None
    # The optimizer holds the parameters, and not the model.
    assert gone[0]() is None
    del optimizer
    gc.collect()
    assert gone[1]() is None


def test_between_the_steps_a_guard_holds_one_copy():
    def held():
        """The number of storages about as large as the table."""
        gc.collect()
        # Those of a compilation have no storage.
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(0 <= size - 3_000_000 < 2**12 for size in storages.values())

    for decide in ("host", "device"):
        model = made()
        model.register_buffer("table", torch.zeros(750_000))
        optimizer = wrapped(model, decide=decide)
        guard(model, optimizer)
        step(model, optimizer, X)
        assert held() == 2
        unguard(model)
        del model, optimizer


def test_a_decision_on_the_device_is_not_waited_for():
    launched = []

    class RecordingMode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            launched.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def operations(guarded):
        model = nn.Sequential(nn.Linear(4, 4), *(nn.BatchNorm1d(4) for _ in range(20)))
        optimizer = wrapped(model, decide="device")
        if guarded:
            guard(model, optimizer)
        for _ in range(2):
            step(model, optimizer, X)
        loss = loss_of(model, X)
        optimizer.backward(loss)
        launched.clear()
        with RecordingMode():
            optimizer.step()
            model(X)
        return [name for name in launched if "view" not in name and "slice" not in name]

    plain, guarded = operations(False), operations(True)
    assert len(guarded) - len(plain) <= 10
    assert guarded.count("_local_scalar_dense.default") == plain.count(
        "_local_scalar_dense.default"
    )


def test_a_buffer_that_did_not_change_may_be_part_of_a_graph():
    """A skip of one optimizer does not spoil the graph of another's loss."""
    for decide in ("host", "device"):
        model = made()
        model.register_buffer("gain", torch.ones(8, 1))
        one, other = wrapped(model, decide=decide), wrapped(model[2], decide=decide)
        guard(model, [one, other])
        later = (model(X) * model.gain).pow(2).mean()
        one.backward(loss_of(model, BAD))
        one.step()
        one.zero_grad()
        other.backward(later)


# --- Arguments -----------------------------------------------------------------------------------


def test_buffers_may_be_named():
    model = made()
    optimizer = wrapped(model)
    guard(model, optimizer, buffers=["*.running_mean", "1.running_var"])
    step(model, optimizer, BAD)
    assert model[1].running_mean.tolist() == [0.0] * 4
    assert model[1].running_var.tolist() == [1.0] * 4
    assert int(model[1].num_batches_tracked) == 1
    guard(model, optimizer)
    step(model, optimizer, BAD)
    assert int(model[1].num_batches_tracked) == 1
    unguard(unguard(model))
    step(model, optimizer, BAD)
    assert int(model[1].num_batches_tracked) == 2
    with pytest.raises(lossscale.errors.ArgumentError, match=r"names of buffers.*'2\.mean'"):
        guard(model, optimizer, buffers="2.mean")


def test_large_buffers_are_named_in_a_warning():
    model = made()
    model.register_buffer("quantized", torch.zeros(65 * 2**20, dtype=torch.int8))
    optimizer = wrapped(model)
    with pytest.warns(lossscale.LossScaleWarning, match=r"65 MiB.*'quantized'.*buffers="):
        guard(model, optimizer)
    guard(model, optimizer, buffers=["1.*"])


def test_a_guard_whose_optimizer_never_steps_warns():
    model = made()
    optimizer, other = wrapped(model), wrapped(model)
    guard(model, optimizer)
    for _ in range(20):
        loss_of(model, X)
    with pytest.warns(lossscale.LossScaleWarning, match="never stepped"):
        [step(model, other, X) for _ in range(20)]
    # A scaler that is not enabled skips nothing.
    guard(model, GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("way", ["backward", "scaler"])
def test_a_monitor_names_once_what_a_skipped_step_has_spoiled(way, guarded):
    model = made()
    model.register_buffer("mask", torch.full((4,), -INF))
    watched, one = WAYS[way](model)
    if guarded:
        guard(model, watched)
    found = []
    with lossscale.torch.Monitor(watched, model, on_floor="ignore") as monitor:
        for x in (X, BAD, X, BAD):
            one(x)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                monitor.step(1.0)
            found += [str(each.message) for each in caught]
    assert len(found) == (not guarded)
    assert guarded or "has left '1.running_mean' of the model not finite" in found[0]


def test_what_cannot_be_guarded():
    model = made()
    with pytest.raises(TypeError, match="whose steps count"):
        guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="whose steps count"):
        guard(model, [wrapped(model), None])
    with pytest.raises(TypeError, match="empty"):
        guard(model, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(torch.nn.Linear(4, 1), torch.ones(4, 4))
    with pytest.raises(TypeError, match="scripted or traced"):
        guard(torch.nn.Sequential(traced), wrapped(traced))
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    with pytest.raises(TypeError, match="`buffers` is an argument for models"):
        guard(scheduler, wrapped(model), buffers=["*"])
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        unguard(scheduler)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_guarded_model_is_exported_and_traced_and_after_unguard_scripted():
    model = made().eval()
    optimizer = wrapped(model)
    guard(model, optimizer)
    before = bits(model)
    torch.export.export(model, (X,), strict=False)
    torch.jit.trace(model, X)
    assert bits(model) == before
    model.train()
    scripted = torch.jit.script(unguard(model))
    assert torch.equal(scripted(X), made()(X))
