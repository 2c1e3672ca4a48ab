"""What a forward pass changes follows the steps that were applied: `guard` of a model.

For statistics and named buffers the oracle is the same program without the bad batches, and without
a guard; for the rule on all buffers it is a few lines of NumPy.
"""

import copy
import gc
import pickle
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

import lossscale
from frameworks.torch import support
from frameworks.torch.support import DEVICE, drawn
from lossscale.torch import GradScaler, LossScaleOptimizer, guard, unguard

pytestmark = [
    pytest.mark.usefixtures("on_the_device"),
    pytest.mark.filterwarnings("ignore:.*min_scale:lossscale.LossScaleWarning"),
]
INF = float("inf")
FIXED = lossscale.FixedScale(2.0**10, skip_nonfinite=True)
PINNED = {"init_scale": 2.0**10, "min_scale": 2.0**10, "max_scale": 2.0**10}


X = drawn(3, 8, 4)
BAD = X * INF


def norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


MODELS = {
    "norm": norm,
    "spectral": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4)
    ),
    "old spectral": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 1)),
    "lazy": lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False)),
}
# All but the statistics of norms.
NAMED = {"spectral": ["*._u", "*._v"], "old spectral": ["0.weight_*"]}


def made(name="norm"):
    torch.manual_seed(0)
    return MODELS[name]()


def loss_of(model, x, call=None):
    with torch.autocast(DEVICE, torch.float16):
        return (call or model)(x).float().pow(2).mean()


def bits(model):
    """The buffers, as they are stored."""
    return {
        name: support.bits(tensor)
        for name, tensor in model.named_buffers()
        if not nn.parameter.is_lazy(tensor)
    }


def loop(model, verb="backward", number=1, parts=1, fused=False, leaves_out=False, **settings):
    """What to guard a model by, and what takes a step, or leaves out one that overflows."""
    weights = list(model.parameters())
    fused = fused or "decide" in settings
    inner = [torch.optim.SGD(weights[i::number], lr=0.05, fused=fused) for i in range(number)]
    scaler = GradScaler(DEVICE, **PINNED) if verb == "scale" else None
    by = scaler or LossScaleOptimizer(inner, rule=FIXED, **settings)

    def step(x, call=None):
        (model if scaler else by).zero_grad()
        for part in (x, X.flip(0), x * 0.5)[:parts]:
            loss = loss_of(model, part, call)
            by.backward(loss) if verb == "backward" else getattr(by, verb)(loss).backward()
        applies = not leaves_out or all(p.grad.isfinite().all() for p in model.parameters())
        if scaler:
            for each in inner:
                for call in [scaler.unscale_] * leaves_out + [scaler.step] * applies:
                    call(each)
            scaler.update()
        else:
            (by.step if applies else by.zero_grad)()

    return by, step


def guarded(name="norm", **settings):
    model = made(name)
    by, step = loop(model, **settings)
    return guard(model, by), by, step


WAYS = {
    "backward": {},
    "device": {"decide": "device"},
    "scale_loss": {"verb": "scale_loss"},
    "accumulation": {"parts": 3},
    "zero_grad": {"leaves_out": True},
    "two in a wrapper": {"number": 2},
    "scaler": {"verb": "scale"},
    "fused scaler": {"verb": "scale", "fused": True},
    "left out of a scaler": {"verb": "scale", "leaves_out": True},
}


# --- Random programs -----------------------------------------------------------------------------


def evaluate(model):
    model.eval()
    with torch.no_grad():
        model(X)
    model.train()


def recalibrate(model):
    with torch.no_grad():
        model(X * 3)
    update_bn([X, X * 2], model)


def write(model):
    for each in (part for part in model.modules() if isinstance(part, nn.BatchNorm1d)):
        each.running_var.copy_(torch.ones(4) * 3)
        each.running_mean.data = each.running_mean.clone()


# What is loaded, cast or replaced is in the programs by the rule.
BETWEEN = [evaluate, lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()))]
# A skipped step may undo these, unless the model is guarded again.
BY_HAND = [recalibrate, write]


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def compiled_in_place(model):
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    return model


def checkpointed(model, use_reentrant=True):
    return lambda x: checkpoint(model, x.clone().requires_grad_(), use_reentrant=use_reentrant)


def on_other_buffers(model):
    def call(x):
        others = {name: tensor + 5 for name, tensor in model.named_buffers()}
        functional_call(model, others, (x,))
        others = {name: tensor.clone() for name, tensor in model.named_buffers()}
        return functional_call(model, others, (x,))

    return call


def after_per_sample_gradients(model):
    def call(x):
        model.eval()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        slopes = grad(lambda p, row: functional_call(model, p, (row[None],)).sum())
        with torch.autocast(DEVICE, enabled=False):
            vmap(slopes, (None, 0))(parameters, x)
        return model.train()(x)

    return call


CALLS = {
    "model": lambda model: model,
    "forward": lambda model: model.forward,
    "checkpointed": checkpointed,
    "not reentrant": lambda model: checkpointed(model, use_reentrant=False),
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "a part": lambda model: model[:2],
    "functional": lambda model: lambda x: functional_call(model, dict(model.named_parameters()), x),
    "other buffers": on_other_buffers,
    "per-sample gradients": after_per_sample_gradients,
}
MAIN = ("backward", "device", "scaler")
PROGRAMS = [
    (name, way, call)
    for name in MODELS
    for way in (WAYS if name == "norm" else MAIN)
    for call in (CALLS if name == "norm" and way in MAIN else ("model", "forward"))
    # What is compiled depends neither on the device nor on who decides.
    if "compiled" not in call or (DEVICE == "cpu" and way != "device")
]


def run(name, way, call, is_guarded):
    """Trains, sometimes on bad batches if it is guarded; returns the bits that are left."""
    model = made(name)
    by, step = loop(model, **WAYS[way])
    chance, skips = random.Random(f"{name} {way} {call}"), 0
    called = CALLS[call](model)
    if is_guarded:
        # That of a compiled model is that of the model in it.
        whole = called if way == "scaler" and call == "compiled" else model
        assert guard(whole, by, buffers=NAMED.get(name)) is whole
    for number in range(8):
        x = drawn(number, 8, 4)
        # The first compiled step comes after others.
        now = None if call == "compiled" and number < 2 else called
        for each in chance.sample(BETWEEN + BY_HAND, chance.choice([0, 0, 1, 2]) * (number > 1)):
            each(model)
            if is_guarded and each in BY_HAND:
                guard(whole, by, buffers=NAMED.get(name))
        # The first one gives lazy buffers their shape.
        if number == 1 or (chance.random() > 0.4 and (number or name != "lazy")):
            step(x, now)
        elif is_guarded:
            before, skips = bits(model), skips + 1
            step(x * 1e6, now)
            assert before == bits(model) or name == "lazy"
    # A scaler counts no step that it is not asked for.
    assert way == "left out of a scaler" or int(by.steps_skipped) >= skips
    return support.bits(dict(model.named_parameters())), bits(model)


@pytest.mark.parametrize(("name", "way", "call"), PROGRAMS)
def test_a_program_ends_as_one_that_was_never_given_the_bad_batches(name, way, call):
    assert run(name, way, call, True) == run(name, way, call, False)


# --- Random programs by the rule, passes of several optimizers before their steps included --------


class LibraryNorm(nn.BatchNorm1d):
    """A class of a library, with a buffer of its own."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("momentum_seen", torch.zeros(()))


class Everything(nn.Module):
    """A buffer of each kind. Its passes move all of them, and spoil some numbers of those named."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norms = nn.ModuleList(
            [LibraryNorm(4), nn.InstanceNorm1d(4, track_running_stats=True), nn.SyncBatchNorm(4)]
        )
        kinds = {
            "codes": torch.ones(4),
            "moved": torch.ones(3, 2, dtype=torch.float64).t(),
            "replaced": torch.ones(4, dtype=torch.float16),
            "largest": torch.full((2,), -INF),
            "named": torch.ones(4),
            "waves": torch.ones(4, dtype=torch.cfloat),
            "count": torch.tensor(3),
            "flag": torch.tensor(False),
        }
        for name, tensor in kinds.items():
            self.register_buffer(name, tensor)
        self.register_buffer("table", torch.ones(4), persistent=False)

    @torch.no_grad()
    def move(self, number, spoiled):
        for name, tensor in list(self.named_buffers()):
            value = tensor.clone() + (1 if tensor.dtype != torch.bool else True)
            if name in spoiled and value.is_floating_point():
                some = torch.arange(value.numel()).reshape(value.shape) % 2 == 0
                value[some] = (INF, -INF, float("nan"))[number % 3]
            if name in ("replaced", "late"):
                setattr(self, name, value)
            else:
                tensor.copy_(value)
        if number == 5:
            self.register_buffer("late", torch.ones(2))


ASKED = ["named", "count", "waves"]


def kind_of(name, asked):
    if name.split(".")[-1] in ("running_mean", "running_var", "num_batches_tracked"):
        return "bits"
    if name in asked:
        return "bits"
    return "free" if name in ("count", "flag", "table", "waves") else "finite"


def numbers(model):
    return {name: tensor.cpu().numpy().copy() for name, tensor in model.named_buffers()}


def run_by_the_rule(seed):
    """Compares each buffer after each step of a random program with what the rule says."""
    chance = random.Random(seed)
    torch.manual_seed(0)
    model = Everything()
    on_device = {"decide": "device"} if chance.random() < 0.4 else {}
    fused = bool(on_device)
    inner = [torch.optim.SGD(part.parameters(), lr=0.01, fused=fused) for part in model.parts]
    way = chance.choice(["one", "list", "scaler"])
    by = [LossScaleOptimizer(each, rule=FIXED, **on_device) for each in inner]
    if way == "scaler":
        by = [GradScaler(DEVICE, **PINNED)] * 2
    watched = by[0] if way != "list" else by
    stepped, copies, asked = set(), {}, ()

    def guarded_again():
        nonlocal asked
        asked = chance.choice([(), ASKED])
        guard(model, watched, buffers=chance.choice([asked, iter(asked)]))
        copies.clear()
        copies.update(numbers(model))

    def between():
        change = chance.choice(["", "", "write", "guard", "load", "assign", "cast", "data"])
        if change in ("write", "guard"):
            model.codes[0], model.norms[1].running_var[0] = -INF, INF
            model.norms[0].reset_running_stats()
        if change == "guard":
            guarded_again()
        if change in ("load", "assign"):
            part = chance.choice([model, model.norms])
            buffers, state = dict(part.named_buffers()), part.state_dict()
            state = {name: state[name].clone() for name in state if name in buffers}
            part.load_state_dict(state, strict=False, assign=change == "assign")
            names = {("norms." if part is model.norms else "") + name for name in state}
            copies.update({name: now for name, now in numbers(model).items() if name in names})
        if change == "cast":
            model.double().float()
        if change == "data":
            model.codes.data = model.codes.clone()

    guarded_again()
    for number in range(12):
        between()
        count = 1 if way == "one" else chance.choice([1, 2])
        stepping = [0] if way == "one" else chance.sample([0, 1], count)
        if number < 3:
            # A scaler does not know yet of a second one.
            stepping = [0]
        bad = {}
        for which in stepping:
            spoiled = [name for name in numbers(model) if chance.random() < 0.2]
            model.move(2 * number + which, spoiled)
            output = model.parts[which](drawn(number, 8, 4))
            bad[which] = chance.random() < 0.5
            inner[which].zero_grad()
            loss = output.mean() * (INF if bad[which] else 1.0)
            by[which].scale(loss).backward() if way == "scaler" else by[which].backward(loss)
        for which in stepping:
            before, tensors = numbers(model), dict(model.named_buffers())
            by[which].step(inner[which]) if way == "scaler" else by[which].step()
            stepped.add(which)
            is_alone = way == "one" or (way == "scaler" and len(stepped) == 1)
            for name, now in before.items():
                kind, expected = kind_of(name, asked), now
                if kind != "free":
                    copied = copies.get(name, now).astype(now.dtype)
                    repaired = np.where(np.isfinite(now), now, copied)
                    if bad[which]:
                        expected = copies[name] = copied if kind == "bits" else repaired
                    else:
                        copies[name] = now if is_alone else repaired
                found = tensors[name].cpu().numpy()
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected, f"{name}, step {number}")
            after = dict(model.named_buffers())
            assert after.keys() == tensors.keys()
            assert all(after[name] is tensor for name, tensor in tensors.items())
        if way == "scaler":
            by[0].update()


@pytest.mark.parametrize("seed", range(12))
def test_each_buffer_is_what_the_rule_says(seed):
    run_by_the_rule(seed)


# --- Several optimizers --------------------------------------------------------------------------


@pytest.mark.parametrize("way", MAIN)
def test_numbers_that_a_hook_of_the_step_writes_are_kept(way):
    model, _, step = guarded(**WAYS[way])
    handle = register_optimizer_step_post_hook(lambda *_: model[1].running_mean.fill_(7))
    step(X)
    handle.remove()
    step(BAD)
    assert model[1].running_mean.tolist() == [7.0] * 4


@pytest.mark.parametrize("way", MAIN)
def test_a_lazy_norm_whose_first_step_is_skipped_is_as_a_new_one(way):
    model, _, step = guarded("lazy", **WAYS[way])
    for _ in range(2):
        step(BAD)
        assert bits(model[1]) == bits(nn.BatchNorm1d(4))
    step(X)
    before = bits(model)
    step(BAD)
    assert bits(model) == before


@pytest.mark.parametrize("way", MAIN)
def test_an_averaged_model_follows_the_applied_steps(way):
    model = made()
    watched, step = loop(model, **WAYS[way])
    averaged = AveragedModel(model)
    assert guard(averaged, watched) is averaged
    counts = []
    for x in (X, BAD, X, BAD, BAD):
        step(x)
        averaged.update_parameters(model)
        counts.append(int(averaged.n_averaged))
    assert counts == [1, 1, 2, 2, 2]
    for other in (copy.deepcopy(averaged), pickle.loads(pickle.dumps(averaged))):
        other.update_parameters(model)
        assert (int(other.n_averaged), int(averaged.n_averaged)) == (3, 2)
    assert unguard(averaged) is averaged
    averaged.update_parameters(model)
    assert int(averaged.n_averaged) == 3
    guard(averaged, watched)
    gone = weakref.ref(averaged)
    del averaged
    assert gone() is None


# --- Copies, files, memory, costs ----------------------------------------------------------------


def test_a_copy_of_a_guarded_model_is_not_guarded_and_needs_no_library():
    model, _, step = guarded()
    step(X)
    saved = pickle.dumps(model)
    assert b"lossscale" not in saved
    for other in (copy.deepcopy(model), pickle.loads(saved)):
        before = bits(other)
        other(X)
        other.load_state_dict(model.state_dict())
        other(X)
        step(BAD)
        assert bits(other) != before


def test_a_guard_keeps_neither_the_model_nor_the_optimizer():
    model, optimizer, step = guarded()
    step(X)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, step
    gc.collect()
    optimizer.backward(loss_of(made(), X))
    optimizer.step()
    # The optimizer holds the parameters, and not the model.
    assert gone[0]() is None
    del optimizer
    gc.collect()
    assert gone[1]() is None


@pytest.mark.parametrize("decide", ["host", "device"])
def test_between_the_steps_a_guard_holds_one_copy(decide):
    model, optimizer, step = guarded(decide=decide)
    model.register_buffer("table", torch.zeros(750_000))
    guard(model, optimizer)
    step(X)
    gc.collect()
    # Those of a compilation have no storage.
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(0 <= size - 3_000_000 < 2**12 for size in storages.values()) == 2


@pytest.mark.parametrize("decide", ["host", "device"])
def test_a_buffer_that_did_not_change_may_be_part_of_a_graph(decide):
    """A skip of one optimizer does not spoil the graph of another's loss."""
    model = made()
    model.register_buffer("gain", torch.ones(8, 1))
    (one, step), (other, _) = (loop(each, decide=decide) for each in (model, model[2]))
    guard(model, [one, other])
    later = (model(X) * model.gain).pow(2).mean()
    step(BAD)
    other.backward(later)


# --- Arguments and warnings ----------------------------------------------------------------------


def test_buffers_may_be_named_and_a_second_guard_replaces_the_first():
    model, optimizer, step = guarded()
    shared = nn.Module()
    shared.register_buffer("calls", torch.zeros(4, dtype=torch.int64))
    # The second of two names for a module.
    model[0].first = model[2].second = shared
    guard(model, optimizer, buffers=["2.second.calls"])
    shared.calls += 1
    step(BAD)
    assert shared.calls.tolist() == [0] * 4
    guard(model, optimizer)
    shared.calls += 1
    step(BAD)
    assert shared.calls.tolist() == [1] * 4
    assert int(model[1].num_batches_tracked) == 0
    unguard(unguard(model))
    step(BAD)
    assert int(model[1].num_batches_tracked) == 1
    assert model[1].running_mean.isnan().all()
    with pytest.raises(lossscale.errors.ArgumentError, match=r"names of buffers.*'2\.mean'"):
        guard(model, optimizer, buffers="2.mean")
    for kind, tensor in {
        "sparse": torch.eye(4).to_sparse(),
        "strided": torch.zeros(4, 3)[:, 0],
        "expanded": torch.zeros(1).expand(4),
        "meta": torch.zeros(4, device="meta"),
        "lazy": nn.parameter.UninitializedBuffer(),
        "conjugate": torch.ones(4, dtype=torch.cfloat).conj(),
    }.items():
        model.register_buffer(kind, tensor)
        with pytest.raises(lossscale.errors.ArgumentError, match=f"dense.*'{kind}'"):
            guard(model, optimizer, buffers=["1.*", kind])
        # What is not named stays as it is.
        guard(model, optimizer)


def test_models_that_have_nothing_to_guard():
    model, optimizer, _ = guarded()
    # A scaler that is not enabled skips nothing.
    guard(model, GradScaler(DEVICE, enabled=False))
    guard(nn.BatchNorm1d(4, affine=False), optimizer)


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize("way", ["backward", "scaler"])
def test_a_monitor_names_once_what_a_skipped_step_has_spoiled(way, is_guarded):
    model = made()
    model.register_buffer("mask", torch.full((4,), -INF))
    watched, step = loop(model, **WAYS[way])
    if is_guarded:
        guard(model, watched)
    with (
        lossscale.torch.Monitor(watched, model) as monitor,
        warnings.catch_warnings(record=True, action="always") as caught,
    ):
        for x in (X, BAD, X, BAD):
            step(x)
            monitor.step(1.0)
    found = [str(each.message) for each in caught if "A skipped step has left" in str(each.message)]
    assert len(found) == (not is_guarded)
    assert is_guarded or "has left '1.running_mean' of the model not finite" in found[0]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_is_refused_and_what_is_exported_traced_and_scripted():
    model = made().eval()
    optimizer, sgd = loop(model)[0], torch.optim.SGD(model.parameters(), lr=0.1)
    traced = nn.Sequential(torch.jit.trace(nn.Linear(4, 1), torch.ones(4, 4)))
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
    for call, words in (
        (lambda: guard(model, sgd), "whose steps count"),
        (lambda: guard(model, [optimizer, None]), "whose steps count"),
        (lambda: guard(model, []), "empty"),
        (lambda: guard(traced, optimizer), "scripted or traced"),
        (lambda: guard(scheduler, optimizer, buffers=["*"]), "`buffers` is an argument for models"),
        (lambda: unguard(scheduler), r"must be a torch\.nn\.Module"),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    guard(model, optimizer)
    before = bits(model)
    torch.export.export(model, (X,), strict=False)
    torch.jit.trace(model, X)
    assert bits(model) == before
    model.train()
    scripted = torch.jit.script(unguard(model))
    assert torch.equal(scripted(X), made()(X))
