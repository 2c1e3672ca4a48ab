"""float16 parameters that are trained by float32 copies of them: `MasterWeights`.

The oracle trains float32 masters by hand: a forward pass with rounded weights, float32 gradients,
and one rounding after each applied step.
"""

import collections
import copy
import itertools
import random
import re

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.frameworks.torch_native import WAYS, Way
from frameworks.torch.support import (
    COPIES,
    DEVICE,
    ByHand,
    Sam,
    bits,
    drawn,
    pairs,
    through_a_file,
    train_step,
)
from frameworks.torch.test_every_optimizer import CASES
from lossscale import errors
from lossscale.torch import GradScaler, LossScaleOptimizer, MasterWeights, float32_state_dict, guard
from pages import DOCS

pytestmark = [
    pytest.mark.usefixtures("on_the_device"),
    pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="PyTorch before 2.10"),
]
INF, NAN = float("inf"), float("nan")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


X = drawn(3, 8, 6)


def net(dtype=F16, seed=0):
    """A network whose parameters are matrices, because Muon takes no others."""
    norm = nn.LayerNorm(8, elementwise_affine=False)
    made = nn.Sequential(nn.Linear(6, 8, False), norm, nn.Tanh(), nn.Linear(8, 4, False))
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(drawn(seed + number, *parameter.shape) / 2)
    return made.to(DEVICE, dtype)


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **settings})


def loss_of(model, factor=1.0):
    outputs = model(X.to(next(model.parameters()).dtype)).float()
    return (outputs - X[:, :4]).square().mean() * factor


def step(model, optimizer, factor=1.0):
    train_step(optimizer, loss_of(model, factor), "verb")


def started(steps=2, dtype=F16, make=adamw, decide="host", grad_dtype=F32):
    """A model, its masters and their loss scaling, after some steps."""
    model = net(dtype)
    inner = MasterWeights(make(model), grad_dtype=grad_dtype)
    optimizer = LossScaleOptimizer(inner, initial_scale=2.0**8, decide=decide)
    for _ in range(steps):
        step(model, optimizer)
    return model, inner, optimizer


def everything(model, inner):
    """All bits of parameters, masters and state."""
    state = [v for s in inner.state_dict()["state"].values() for v in s.values()]
    tensors = [*model.parameters(), *inner.masters.values(), *filter(torch.is_tensor, state)]
    return [bits(tensor) for tensor in tensors]


# --- Training ------------------------------------------------------------------------------------

# SparseAdam takes no dense gradients.
OPTIMIZERS = [c.values for c in CASES if c.values[0].__name__ != "SparseAdam"]


@torch.no_grad()
def run_event(draw, model, inner, hand, saved):
    """Does something to a model between two steps, and to the masters by hand."""
    event = draw.choice(["write", "set", "there and back", "swap", "save", "load"])
    number, seed = draw.randrange(2), draw.randrange(10**6)
    parameter, twin = (list(each.parameters())[number] for each in (model, hand.model))
    values = drawn(seed, *parameter.shape) / 2

    def read():
        for what in draw.sample(["masters", "state", "groups", "copy", "zero"], 2):
            {
                "masters": lambda: [inner.masters[p] for p in inner.masters],
                "state": inner.state_dict,
                "groups": lambda: inner.param_groups,
                "copy": lambda: copy.deepcopy((model, inner)),
                "zero": inner.zero_grad,
            }[what]()

    if event == "write":
        row, value = draw.randrange(4), draw.choice([0.0, 0.3, -1.5])
        for each in (parameter, twin):
            each.data[row].fill_(value)
        hand.adopt()
    elif event == "set":
        inner.set_masters({parameter: values})
        hand.masters[number].copy_(values)
        twin.copy_(values)
    elif event == "there and back":
        before = parameter.dtype
        model.float()
        read()
        model.to(before)
    elif event == "swap":
        kept = parameter.data
        parameter.data = values.to(kept)
        read()
        if draw.random() < 0.5:
            parameter.data = kept
        else:
            twin.copy_(values)
            hand.adopt()
    elif event == "save":
        saved[:] = copy.deepcopy([model.state_dict(), inner.state_dict()]), hand.saved()
    elif saved:
        loads = [lambda: model.load_state_dict(saved[0][0])]
        loads.insert(draw.randrange(2), lambda: inner.load_state_dict(saved[0][1]))
        for load in loads:
            load()
        hand.load(saved[1])
    return event


def run_random_program(seed):
    """Runs a random program with `MasterWeights` and by hand; returns what it used."""
    draw = random.Random(seed)
    dtype, (cls, settings) = draw.choice([F16, F16, BF16]), draw.choice(OPTIMIZERS)
    verb = draw.choice([way for way in WAYS if way != "fixed"])
    if verb == "device" and not settings.get("fused"):
        verb = "backward"

    def make(parameters):
        return cls(parameters, lr=1e-3, **settings)

    model = net(dtype, seed)
    hand = ByHand(copy.deepcopy(model), make)
    scale = 1.0 if verb == "bare" else draw.choice([2.0**5, 2.0**12])
    micro_batches, clip = draw.choice([1, 1, 3]), draw.choice([None, None, 0.5])
    # Sums of several, and gradients that nobody unscales before they are clipped, would be narrow.
    may_arrive = micro_batches == 1 and verb not in ("bare", "PyTorch's scaler")
    grad_dtype = draw.choice([F32, None]) if may_arrive else F32
    inner = MasterWeights(make(model.parameters()), grad_dtype=grad_dtype)
    way = Way(verb, [inner], scale=scale, device=DEVICE)
    to_none = draw.random() < 0.5
    saved = []
    for number in range(draw.randint(3, 8)):
        events = set()
        while draw.random() < 0.4:
            events.add(run_event(draw, model, inner, hand, saved))
        # With PyTorch's scaler a fused SGD that skips its first step, also after a load, reads
        # momentum that it has not made.
        is_first = not number or "load" in events
        is_good = verb == "bare" or (is_first and verb == "PyTorch's scaler")
        is_bad = not is_good and draw.random() < 0.25
        seeds = range(seed * 100 + number * 10, seed * 100 + number * 10 + micro_batches)
        batches = [drawn(each, 8, 6).to(dtype) for each in seeds]
        if is_bad:
            batches[-1][0, 0] = INF

        def losses(of, batches=batches):
            outputs = [of(batch).float() for batch in batches]
            return [(each - X[:, :4]).square().mean() / len(batches) for each in outputs]

        way.zero_grad(to_none)
        for loss in losses(model):
            way.backward(loss)
        if clip:
            if way.scaler or way.wrappers:
                (way.scaler or way.wrappers[0]).unscale_(*([inner] if way.scaler else []))
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        way.step()
        if not hand.step(losses(hand.model), scale, clip):
            assert is_bad
            scale /= 2
            # The groups that are saved have the scale, too.
            saved.clear()
        assert way.scales() == [scale][: verb != "bare"]
        masters = inner.masters
        for parameter, other, master in pairs(model.parameters(), hand.parameters, hand.masters):
            assert (parameter.dtype, bits(parameter)) == (dtype, bits(other))
            assert bits(masters[parameter]) == bits(master)
            # A step that the kernel would skip leaves the gradients as they have arrived.
            is_scaled = is_bad and grad_dtype is None
            assert is_scaled or parameter.grad is None or parameter.grad.dtype == F32
    return cls.__name__, verb


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_random_programs_equal_masters_by_hand(first):
    for seed in range(first, first + (10 if DEVICE == "cpu" else 3)):
        run_random_program(seed)


def test_the_drop_in_may_skip_the_first_step():
    """PyTorch's own scaler leaves uninitialized memory as the momentum of SGD."""
    settings = {"lr": 0.05, "momentum": 0.9, "fused": True}
    model = net()
    inner = MasterWeights(torch.optim.SGD(model.parameters(), **settings))
    scaler = GradScaler(DEVICE, init_scale=2.0**8)
    before = everything(model, inner)
    for factor in (INF, 1.0):
        inner.zero_grad()
        scaler.scale(loss_of(model, factor)).backward()
        scaler.step(inner)
        scaler.update()
        assert (everything(model, inner) == before) == (factor == INF)
    other = net()
    step(other, MasterWeights(torch.optim.SGD(other.parameters(), **settings)))
    assert list(map(bits, model.parameters())) == list(map(bits, other.parameters()))


def test_what_trains_float32_parameters_trains_these():
    model, inner, optimizer = started(0)
    scheduler = guard(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), optimizer)
    torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(model[0].weight.grad.dtype))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.dtype))
    compiled = torch.compile(model, backend="aot_eager") if DEVICE == "cpu" else model
    for forward in (model, compiled, lambda x: checkpoint(model, x, use_reentrant=False)):
        train_step(optimizer, forward(X.to(F16)).float().square().mean(), "verb")
        scheduler.step()
    assert called == [F32, F32, "after"] * 3
    assert inner.param_groups[0]["lr"] == 1e-3 * 0.5**3
    assert optimizer.inner_optimizer is inner
    assert inner.inner_optimizer.param_groups is optimizer.param_groups
    # Another optimizer of this library sees the parameters, not the masters.
    assert list(inner.state) == list(model.parameters())


class WritesData(torch.optim.Optimizer):
    """As optimizers were once written: it writes to `data`."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.held = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.requires_grad and isinstance(p, nn.Parameter):
                    p.data.add_(p.grad.data, alpha=-group["lr"] * getattr(p, "factor", 1.0))
                elif p.grad is None:
                    p.data.mul_(0.5)


def test_optimizers_that_write_to_data():
    for dtype in (F16, BF16):
        w, idle = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
        w.factor = 2.0
        optimizer = MasterWeights(WritesData([w, idle]))
        for _ in range(2):
            optimizer.zero_grad()
            w.float().sum().backward()
            with torch.no_grad():
                w[1] = 0.5
            optimizer.step()
        (master, other), rounded = optimizer.masters.values(), w.detach().float()
        assert master.tolist() == pytest.approx([0.6, 0.3])
        assert rounded.tolist() == pytest.approx([0.6, 0.3], rel=4e-3)
        assert (other.tolist(), idle.tolist()) == ([0.25, 0.25], [0.25, 0.25])


def test_hooks_of_the_inner_optimizer_see_the_parameters():
    for when, own in itertools.product(("pre", "post"), (False, True)):
        w = nn.Parameter(torch.ones(2, dtype=BF16))
        sgd = torch.optim.SGD([w], lr=0.25)
        optimizer, seen = MasterWeights(sgd), []

        def hook(*_, w=w, seen=seen):
            seen.append(w.tolist())
            with torch.no_grad():
                w[1] = 8.0
            w.grad = torch.full_like(w, 2.0, dtype=F32)

        register = f"register_step_{when}_hook"
        getattr(optimizer if own else sgd, register)(hook)
        w.sum().backward()
        optimizer.step()
        assert seen == [[1.0, 1.0] if when == "pre" else [0.75, 0.75]]
        assert optimizer.masters[w].tolist() == ([0.5, 7.5] if when == "pre" else [0.75, 8.0])


def test_a_new_one_starts_from_the_parameters_and_an_older_one_refuses():
    model, inner, optimizer = started(3)
    newer = MasterWeights(adamw(model))
    for parameter, master in newer.masters.items():
        assert bits(master) == bits(parameter.float())
    newer.set_masters(inner.masters)
    assert [*map(bits, newer.masters.values())] == [*map(bits, inner.masters.values())]
    newest = MasterWeights(torch.optim.SGD([model[0].weight], lr=0.1))
    model.float()
    assert inner.param_groups
    model.half()
    before = everything(model, inner)
    for other in (inner, newer):
        loss_of(model).backward()
        with pytest.raises(errors.CallOrderError, match="one optimizer with several parameter gr"):
            other.step()
        with pytest.raises(errors.CallOrderError, match="made later"):
            other.set_masters({})
    with pytest.raises(errors.CallOrderError, match="made later"):
        step(model, optimizer)
    assert everything(model, inner) == before
    newest.step()
    # As long as a newer one lives.
    del newest, newer, other
    step(model, optimizer)


def test_optimizers_that_hold_others_are_saved_and_loaded():
    class Lookahead(torch.optim.Optimizer):
        """Saves its optimizer's state in a dictionary without groups."""

        def __init__(self, held):
            groups, state = held.param_groups, collections.defaultdict(dict)
            self.__setstate__({"param_groups": groups, "state": state, "defaults": {}})
            self.held = held

        def step(self, closure=None):
            self.held.step()

        def state_dict(self):
            return {"held": self.held.state_dict()}

        def load_state_dict(self, state_dict):
            self.held.load_state_dict(state_dict["held"])

    model, inner, optimizer = started(2, make=lambda model: Lookahead(adamw(model)))
    saved = through_a_file((model.state_dict(), optimizer.state_dict()))
    other, again, twin = started(0, make=lambda model: Lookahead(adamw(model)))
    other.load_state_dict(saved[0])
    twin.load_state_dict(saved[1])
    for each, its in ((model, optimizer), (other, twin)):
        step(each, its)
    assert list(map(bits, inner.masters.values())) == list(map(bits, again.masters.values()))
    assert list(inner.inner_optimizer.held.state) == list(model.parameters())


# --- What other code writes -----------------------------------------------------------------------


# Other numbers are in the random programs.
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("number", [-0.0, INF, NAN])
def test_what_is_written_between_steps_is_kept(number, dtype):
    model, inner, _ = started(3, dtype)
    before = {p: (p.detach().clone(), m.clone()) for p, m in inner.masters.items()}
    model[0].weight.data[0].fill_(number)
    written = {p: p.detach().clone() for p in before}
    for parameter, master in inner.masters.items():
        old, wide = before[parameter]
        now = parameter.detach()
        assert bits(now) == bits(written[parameter])
        is_same = now.view(torch.int16) == old.view(torch.int16)
        assert bits(master) == bits(torch.where(is_same, wide, now.float()))


def test_a_write_into_the_state_alone_is_lost():
    """`set_masters` is the way in; a broadcast of parameters and state writes both."""
    model, inner, _ = started(3)
    (first, second), weight = inner.masters.values(), model[0].weight
    before, state = [*map(bits, model.parameters())], inner.state[weight]
    with torch.no_grad():
        state["master_weight"].mul_(2.0)
    inner.zero_grad()
    inner.step()
    assert [*map(bits, model.parameters())] == before
    assert [*map(bits, inner.masters.values())] == [bits(weight.float()), bits(second)]
    with torch.no_grad():
        weight.copy_(first)
        state["master_weight"].copy_(first)
    inner.step()
    assert bits(inner.masters[weight]) == bits(first) != bits(weight.float())


# --- Parameters that change -----------------------------------------------------------------------


@pytest.mark.parametrize("verb", [way for way in WAYS if way != "fixed"])
def test_float32_in_between_loses_nothing_and_a_step_in_it_is_an_error(verb):
    """Of one layer, too; with hooks, and for the kernels that skip without one."""
    # PyTorch's scaler leaves its divisor on a fused optimizer whose step raises an error.
    fused = verb != "PyTorch's scaler"
    made = [(m, MasterWeights(adamw(m, fused=fused))) for m in (net(BF16), net(BF16))]
    ways, called = [Way(verb, [each], scale=2.0**8, device=DEVICE) for _, each in made], []
    hooks = ["masters", "inner"] if verb in ("bare", "scale_loss") else []
    for name, each in zip(hooks, (made[0][1], made[0][1].inner_optimizer), strict=False):
        each.register_step_pre_hook(lambda *_, name=name: called.append(name))
    for number in range(4):
        for way, (model, inner) in pairs(ways, made):
            way.zero_grad(True)
            way.backward(loss_of(model))
            (model[3] if number % 2 else model).float()
            if number and way is ways[0]:
                before, scales = list(map(bits, inner.masters.values())), way.scales()
                saved = inner.state_dict(), float32_state_dict(model, inner).values()
                for masters in ([p["master_weight"] for p in saved[0]["state"].values()], saved[1]):
                    assert list(map(bits, masters)) == before
                with pytest.raises(errors.CallOrderError, match=r"is torch.float32 now.*half\(\)"):
                    way.step()
                assert (list(map(bits, inner.masters.values())), way.scales()) == (before, scales)
            model.bfloat16()
            way.step()
        assert everything(*made[0]) == everything(*made[1])
    assert called == hooks * 4


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("grad_dtype", [F32, None])
def test_gradients_after_a_conversion(swaps, grad_dtype, monkeypatch):
    """PyTorch casts the gradients and, if it swaps tensors, loses their dtype."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swaps)
    model, _, optimizer = started(3, grad_dtype=grad_dtype)
    for clears in (True, False):
        optimizer.zero_grad(clears)
        optimizer.backward(loss_of(model))
        model.float()
        model.half()
        assert {p.grad.dtype for p in model.parameters()} == {F16}
        optimizer.backward(loss_of(model))
        optimizer.step()
        assert {(p.grad.dtype, p.grad_dtype) for p in model.parameters()} == {(F32, grad_dtype)}


def replace(model, inner):
    model[0].weight = inner.param_groups[0]["params"][0] = nn.Parameter(model[0].weight.detach())


LATER = {
    "halved": (lambda: net(F32), lambda model, inner: model.half()),
    "materialized": (lambda: nn.Sequential(nn.LazyLinear(4)).half(), lambda model, inner: None),
    "replaced": (net, replace),
}


@pytest.mark.parametrize("verb", ["backward", "drop-in"])
@pytest.mark.parametrize("what", LATER)
def test_parameters_that_are_float16_later_need_another_optimizer(what, verb):
    make, change = LATER[what]
    model = make().to(DEVICE)
    inner = MasterWeights(adamw(model))
    way = Way(verb, [inner], device=DEVICE)
    change(model, inner)
    loss = model(X.half()).float().square().mean()
    if verb == "drop-in":
        way.backward(loss)
    with pytest.raises(errors.GradientsError, match=r"MasterWeights.*Make both after model.half"):
        way.step() if verb == "drop-in" else way.backward(loss)
    again = MasterWeights(adamw(model))
    step(model, LossScaleOptimizer(again))
    assert {m.dtype for m in again.masters.values()} == {F32}


def test_frozen_added_and_mixed_parameters():
    model = net()
    model[1] = nn.LayerNorm(8).to(DEVICE)
    model.forward = lambda x: model[3](model[2](model[1](model[0](x).float()).to(F16)))
    model[0].requires_grad_(False)
    inner = MasterWeights(adamw(model[:2]))
    optimizer = LossScaleOptimizer(inner, initial_scale=2.0**4)
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.1})
    assert set(inner.masters) == {*model[0].parameters(), *model[3].parameters()}
    before = bits(model[0].weight)
    step(model, optimizer)
    assert bits(model[0].weight) == before
    assert model[1].weight.dtype == F32
    model[0].requires_grad_()
    step(model, optimizer)
    assert model[0].weight.grad.dtype == F32
    assert bits(model[0].weight) != before


def test_sparse_tied_and_early():
    table = nn.Embedding(10, 4, sparse=True).to(DEVICE, F16)
    optimizer = LossScaleOptimizer(MasterWeights(torch.optim.SGD(table.parameters(), lr=0.1)))
    first = table.weight.detach().clone()
    optimizer.backward(table(torch.tensor([1, 1, 3])).float().sum())
    optimizer.step()
    assert table.weight.grad.is_sparse
    changed = (table.weight != first).any(1).tolist()
    assert changed == [row in (1, 3) for row in range(10)]
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(DEVICE, F16)
    tied[1].weight = tied[0].weight
    inner = MasterWeights(torch.optim.Adagrad(tied.parameters(), lr=0.1))
    assert len(inner.masters) == 3
    assert {s["sum"].dtype for s in inner.state.values()} == {F32}
    # Gradients from before.
    early = net()
    loss_of(early).backward()
    inner = MasterWeights(adamw(early))
    assert early[0].weight.grad.dtype == F32
    inner.step()


@pytest.mark.parametrize("grad_dtype", [F32, None])
@pytest.mark.parametrize("copied", COPIES)
def test_copies_train_on(copied, grad_dtype):
    model, inner, optimizer = started(grad_dtype=grad_dtype)
    other, twin = COPIES[copied]((model, optimizer))
    for each, its in ((model, optimizer), (other, twin)):
        step(each, its)
    assert everything(model, inner) == everything(other, twin.inner_optimizer)
    assert other[0].weight.grad_dtype == grad_dtype
    assert twin.inner_optimizer.masters[other[0].weight] is not inner.masters[model[0].weight]


# --- Steps that do not come to an end -------------------------------------------------------------


def test_an_exception_within_a_step():
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise ValueError("within")

    model, inner, optimizer = started(1, make=lambda m: Failing(m.parameters(), lr=0.1))
    inner.inner_optimizer.fails = True
    with pytest.raises(ValueError, match="within"):
        step(model, optimizer)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    for parameter, master in inner.masters.items():
        assert bits(parameter) == bits(master.to(F16))
    inner.inner_optimizer.fails = False
    step(model, optimizer)
    assert list(inner.state) == list(model.parameters())


def test_sams_two_calls_see_rounded_weights():
    model, inner, optimizer = started(0, make=lambda model: Sam(model.parameters()))
    losses = []

    def backward(factor=1.0):
        optimizer.zero_grad()
        assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {F16}
        loss = loss_of(model, factor)
        losses.append(loss.item())
        optimizer.backward(loss)

    for _ in range(3):
        for call in (optimizer.first_step, optimizer.second_step):
            backward()
            call()
    assert losses[-2] < losses[2] < losses[0] < losses[1]
    before = everything(model, inner)
    backward(NAN)
    optimizer.step()
    assert (optimizer.steps_skipped, everything(model, inner)) == (1, before)


def test_methods_of_the_optimizer_see_the_masters():
    class Averaging(torch.optim.SGD):
        @torch.no_grad()
        def eval(self):
            for p in self.param_groups[0]["params"]:
                p.add_(1e-4)

    model, inner, _ = started(1, make=lambda m: Averaging(m.parameters(), lr=0.1))
    before = {p: m.clone() for p, m in inner.masters.items()}
    inner.eval()
    for parameter, master in inner.masters.items():
        assert bits(master) == bits(before[parameter] + 1e-4)
        assert bits(parameter) == bits(master.to(F16))
    model.float()
    with pytest.raises(errors.CallOrderError, match="make a new optimizer"):
        inner.eval()


# --- State dictionaries ---------------------------------------------------------------------------


def resumed(model, optimizer, save, load):
    """Whether another model and its masters continue to the bit from what was saved."""
    saved = save(model, optimizer)
    other, inner, twin = started(0)
    load(other, twin, saved)
    for _ in range(2):
        step(model, optimizer)
        step(other, twin)
    assert everything(model, optimizer.inner_optimizer) == everything(other, inner)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_distributed_checkpoint_saves_and_restores_them(flat):
    model, _, optimizer = started(3)
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)

    def save(model, optimizer):
        state = dcp.get_optimizer_state_dict(model, optimizer, options=options)
        return copy.deepcopy((model.state_dict(), state))

    def load(other, twin, saved):
        if not twin.state:
            with pytest.raises(RuntimeError, match="'c10::Half' to a tensor with grad_dtype 'Flo"):
                dcp.get_optimizer_state_dict(other, twin, options=options)
            text = (DOCS / "float16_models.md").read_text(encoding="utf-8")
            (recipe,) = re.findall(r"\n```\n(for .*?)```\n", text, re.S)
            exec(recipe, {"torch": torch, "model": other, "inner": twin.inner_optimizer})
        other.load_state_dict(saved[0])
        # What it loads into has all that was saved.
        assert_same_keys(dcp.get_optimizer_state_dict(other, twin, options=options), saved[1])
        dcp.set_optimizer_state_dict(other, twin, saved[1], options=options)
        if flat:
            twin.loss_scale_state.load_state_dict(optimizer.loss_scale_state.state_dict())

    resumed(model, optimizer, save, load)
    assert model[0].weight.grad.dtype == F32


def assert_same_keys(first, second):
    assert first.keys() == second.keys()
    for key in first.keys() if isinstance(first.get("state"), dict) else ():
        if isinstance(first[key], dict):
            assert_same_keys(first[key], second[key])


def test_a_step_that_clears_gradients():
    class Clears(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            self.zero_grad()

    w = nn.Parameter(torch.ones(1, dtype=BF16))
    optimizer = MasterWeights(Clears([w], lr=0.25))
    w.sum().backward()
    optimizer.step()
    assert (w.tolist(), w.grad) == ([0.75], None)


def test_early_states_and_hooks_of_loading():
    w = nn.Parameter(torch.ones(1, dtype=F16))
    adagrad = MasterWeights(torch.optim.Adagrad([w], initial_accumulator_value=1e-8))
    assert adagrad.state[w]["sum"].item() == pytest.approx(1e-8)
    model, inner, _ = started(2)
    saved = copy.deepcopy(inner.state_dict())
    other, twin, _ = started(1)
    twin.register_load_state_dict_pre_hook(lambda *_: saved)
    twin.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    other.load_state_dict(model.state_dict())
    assert everything(model, inner) == everything(other, twin)


def test_a_state_that_is_saved_while_averages_are_swapped_in():
    model, inner, _ = started(3)
    before = [bits(master) for master in inner.masters.values()]
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(net(seed=4).state_dict())
    saved = copy.deepcopy(inner.state_dict())
    model.load_state_dict(kept)
    assert [bits(master) for master in inner.masters.values()] == before
    for state, average in pairs(saved["state"].values(), net(seed=4).parameters()):
        assert bits(state["master_weight"]) == bits(average.detach().float())


def test_states_of_plain_optimizers():
    wide = net(F32)
    plain = adamw(wide)
    step(wide, plain)
    saved = plain.state_dict()
    model, inner, _ = started(1)
    model.load_state_dict(wide.state_dict())
    inner.load_state_dict(saved)
    assert inner.state[model[0].weight]["exp_avg"].dtype == F32
    for parameter, master in inner.masters.items():
        assert bits(master) == bits(parameter.float())
    # And back, before and after the first step.
    for steps in (0, 2):
        model, inner, _ = started(steps)
        wide = net(F32)
        plain = adamw(wide)
        plain.load_state_dict(inner.state_dict())
        step(wide, plain)
        assert plain.state[wide[0].weight]["step"] == steps + 1


def test_masters_can_start_from_weights_that_were_never_rounded():
    wide = net(F32)
    model = copy.deepcopy(wide).half()
    inner = MasterWeights(adamw(model))
    weights = dict(wide.named_parameters())
    inner.set_masters({p: weights[name] for name, p in model.named_parameters()})
    other = MasterWeights(adamw(net()))
    other.load_state_dict(through_a_file(inner.state_dict()))
    for master, parameter in pairs(other.masters.values(), wide.parameters()):
        assert bits(master) == bits(parameter)


def test_values_that_cannot_be_masters():
    model, inner, _ = started()
    p, q = model.parameters()
    before = everything(model, inner)
    for values, text in (
        ({q: torch.ones_like(q), p: torch.ones(3)}, r"shape \(8, 6\).*Received: tensor"),
        ({q: torch.ones_like(q), nn.Parameter(torch.ones(2)): torch.ones(2)}, "of the optimizer"),
        ({q: torch.ones_like(q), p: torch.full_like(p, 1e5, dtype=F32)}, "finite.*is 1e\\+05"),
        ({p: [1.0]}, r"Received: \[1.0\]"),
    ):
        with pytest.raises(errors.StateDictError, match=text):
            inner.set_masters(values)
    for write in (lambda m: m.copy_(p), lambda m: m.add_(1), lambda m: m.fill_(0)):
        with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update to inference"):
            write(inner.masters[p])
    assert everything(model, inner) == before
    # A float32 parameter has no master.
    model[3].float()
    step_of = MasterWeights(adamw(model))
    step_of.set_masters({model[3].weight: drawn(5, 4, 8)})
    assert bits(model[3].weight) == bits(drawn(5, 4, 8))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_master_in_a_file_of_a_parameter_that_is_float32_now(order, is_new):
    """transformers keeps T5's `wo` in float32; a head that was made again stays as it is."""
    model, inner, _ = started(3)
    saved = through_a_file((model.state_dict(), inner.state_dict()))
    master, now = inner.masters[model[3].weight], drawn(9, 4, 8)
    other = net()
    other[3].float()
    other.forward = lambda x: other[3](other[:3](x).float())
    twin = MasterWeights(adamw(other, lr=0.0, weight_decay=0.0))
    if is_new:
        del saved[0]["3.weight"]
        other[3].weight.data.copy_(now)
    for each, state in [(other, saved[0]), (twin, saved[1])][::order]:
        kind = {"strict": False} if each is other else {}
        each.load_state_dict(state, **kind)
    twin.param_groups[0].update(lr=0.0, weight_decay=0.0)
    expected = now if is_new else master
    assert bits(twin.masters[other[3].weight]) == bits(expected)
    assert order == -1 or bits(other[3].weight) == bits(expected)
    step(other, twin)
    assert bits(other[3].weight) == bits(expected)
    assert "master_weight" not in twin.state[other[3].weight]
    assert twin.state[other[3].weight]["step"] == 4


def test_parameters_that_have_the_same_elements():
    first, second = nn.Linear(4, 4).half(), nn.Linear(4, 4).half()
    second.weight.data = first.weight.data
    both = [*first.parameters(), *second.parameters()]
    with pytest.raises(errors.UnsupportedError, match="have the same elements"):
        MasterWeights(torch.optim.SGD(both, lr=0.1))
    flat = drawn(3, 100001).half()
    views = [nn.Parameter(each) for each in (flat[:3], flat[3:50001], flat[50001:], flat[:0])]
    empty = [nn.Parameter(torch.empty(0, dtype=F16)) for _ in range(2)]
    meta = [nn.Parameter(torch.empty(2, dtype=F16, device="meta")) for _ in range(2)]
    assert len(MasterWeights(torch.optim.SGD([*views, *meta], lr=0.1)).masters) == 6
    inner = MasterWeights(torch.optim.SGD([*views, *empty], lr=0.1))
    sum(p.float().sum() for p in views).backward()
    inner.step()
    assert inner.state_dict()["state"].keys() == {0, 1, 2, 3}
    assert bits(views[1]) == bits((drawn(3, 100001).half()[3:50001].float() - 0.1).half())


def test_lazy_and_replaced_parameters():
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(4)).to(DEVICE, BF16)
    groups = [{"params": each.parameters()} for each in model]
    inner = MasterWeights(torch.optim.SGD(groups, lr=0.1))
    assert not inner.state

    def step_alone():
        inner.zero_grad()
        loss_of(model).backward()
        inner.step()

    step_alone()
    assert len(inner.masters) == 4
    for group, module in pairs(inner.param_groups, model):
        for number, name in enumerate(("weight", "bias")):
            new = nn.Parameter(getattr(module, name).detach().clone())
            setattr(module, name, new)
            group["params"][number] = new
            step_alone()
            assert bits(new) == bits(inner.masters[new].to(BF16))
            assert new.grad.dtype == F32
    assert set(inner.masters) == set(model.parameters())


# --- What is refused ------------------------------------------------------------------------------


class KeepsParameters(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.mine = [p for group in self.param_groups for p in group["params"]]


def sharded(model):
    model[0].weight._fsdp_flattened = True
    return adamw(model)


TWICE, TYPE, UNSUPPORTED = (
    *(errors.AlreadyWrappedError, errors.ArgumentTypeError, errors.UnsupportedError),
)
REFUSED = {
    "a scaled one": (
        *(lambda: LossScaleOptimizer(adamw(net())), TWICE),
        r"LossScaleOptimizer\(MasterWeights\(optimizer\)\)",
    ),
    "masters": (lambda: MasterWeights(adamw(net())), TWICE, "order"),
    "a class": (lambda: torch.optim.AdamW, TYPE, "an instance"),
    "a model": (net, TYPE, "torch.optim.Optimizer"),
    "shards": (lambda: sharded(net()), UNSUPPORTED, "MixedPrecisionPolicy"),
    "other lists": (lambda: KeepsParameters(net().parameters()), UNSUPPORTED, "'mine'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_have_masters(name):
    make, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        MasterWeights(make())


def test_a_second_one_and_a_direct_step():
    model, inner, _ = started()
    assert len(inner.state)
    # Reading an empty state, as torch.distributed.checkpoint does, keeps float32 gradients.
    w = nn.Parameter(torch.ones(1, dtype=BF16))
    assert not MasterWeights(torch.optim.SGD([w], lr=1.0)).state
    for _ in range(4):
        (w * 2.0**-10).sum().backward()
    assert w.grad.tolist() == [2.0**-8]
    with pytest.raises(errors.AlreadyWrappedError, match="already wraps this AdamW"):
        MasterWeights(inner.inner_optimizer)
    before = everything(model, inner)
    with pytest.raises(errors.CallOrderError, match="step\\(\\) of the MasterWeights"):
        inner.inner_optimizer.step()
    shape = {
        "state": {0: {"master_weight": torch.ones(3)}},
        "param_groups": inner.state_dict()["param_groups"],
    }
    with pytest.raises(errors.StateDictError, match=r"\(8, 6\).*Received: tensor"):
        inner.load_state_dict(shape)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        inner.load_state_dict({"state": {}, "param_groups": []})
    group = {"params": [sharded(net()).param_groups[0]["params"][0]]}
    with pytest.raises(errors.UnsupportedError, match="MixedPrecisionPolicy"):
        inner.add_param_group(group)
    assert everything(model, inner) == before
    assert len(inner.param_groups) == 1


def test_a_pytorch_without_float32_gradients(monkeypatch):
    class Missing:
        def __get__(self, *_):
            raise AttributeError

    monkeypatch.setattr(torch.Tensor, "grad_dtype", Missing())
    with pytest.raises(errors.UnsupportedError, match=r"PyTorch 2.10 or later.*torch.autocast"):
        MasterWeights(adamw(net()))


def test_masters_by_hand_take_scale_loss():
    model = net()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = LossScaleOptimizer(torch.optim.SGD(masters, lr=1.0), initial_scale=2.0**10)
    with pytest.raises(errors.GradientsError, match="scale_loss"):
        optimizer.backward(loss_of(model))
    assert all(p.grad is None for p in model.parameters())
    optimizer.scale_loss(loss_of(model)).backward()
    for master, parameter in pairs(masters, model.parameters()):
        master.grad = parameter.grad.float()
    optimizer.step()
    for master, parameter in pairs(masters, model.parameters()):
        assert bits(master.grad) == bits(parameter.grad.float() / 2.0**10)
    # The gradient of a float16 input is wanted as it is.
    wide, x = net(F32), X.half().requires_grad_()
    optimizer = LossScaleOptimizer(adamw(wide))
    optimizer.backward(wide(x.float()).square().mean())
    assert x.grad.dtype == F16


# --- Gradients of any dtype -----------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts the operators that cast one tensor."""

    number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += operator in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", [None, 2.0**-31])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("verb", ["backward", "scale_loss", "device", "drop-in"])
def test_small_gradients_of_any_dtype_are_widened_together(verb, dtype, clip):
    """The masters get what float32 parameters get, down to 2**-30, by few operators."""
    made = []
    for of in (dtype, F32):
        given = [nn.Parameter(torch.zeros(3, dtype=of)) for _ in range(50)]
        inner = torch.optim.SGD(given, lr=1.0, fused=verb in ("device", "drop-in"))
        inner = inner if of == F32 else MasterWeights(inner, grad_dtype=None)
        way = Way(verb, [inner], clip_norm=clip, scale=2.0**16, device=DEVICE)
        for _ in range(2):
            way.zero_grad()
            loss = sum(p.float().sum() for p in given) * 2.0**-30
            with Casts() as casts:
                way.backward(loss)
                way.step()
        # Autograd casts 50 gradients.
        assert casts.number < 60
        assert given[0].grad.dtype == F32
        made.append(bits(given[0] if of == F32 else inner.masters[given[0]]))
    assert made[0] == made[1] != bits(torch.zeros(3))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_of_any_dtype_with_a_graph():
    weight = nn.Parameter(torch.full((3,), 2.0, dtype=F16))
    optimizer = LossScaleOptimizer(MasterWeights(torch.optim.SGD([weight]), grad_dtype=None))
    optimizer.backward(weight.float().square().sum() * 2.0**-28, create_graph=True)
    assert weight.grad.requires_grad
    assert (weight.grad == 2.0**-26).all()


def test_dtypes_of_gradients_that_are_refused():
    for value in (F16, torch.float64, "float32"):
        with pytest.raises(errors.ArgumentTypeError, match=r"`grad_dtype` must be.*Received: "):
            MasterWeights(adamw(net()), grad_dtype=value)
    # A dtype that the user chose, without masters.
    model = net()
    for parameter in model.parameters():
        parameter.grad_dtype = None
    with pytest.raises(errors.GradientsError, match="MasterWeights"):
        LossScaleOptimizer(adamw(model)).backward(loss_of(model))
    scaler = GradScaler(DEVICE)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(errors.GradientsError, match="MasterWeights"):
        scaler.unscale_(adamw(model))
