"""What somebody new to the wrapper gets wrong; strange optimizers and strange gradients."""

import copy
import functools
import itertools
import pickle
import warnings
import weakref

import pytest
import torch
from torch.distributed.algorithms import Join

import lossscale
from frameworks.torch.support import (
    Sam,
    alone,
    bits,
    derive,
    ends_as_without_scaling,
    parameter,
    parameters,
    scaler,
    sgd,
    snapshot,
    watched,
    wrapped,
    wrapper,
)
from lossscale import errors
from lossscale.errors import CallOrderError, UnsupportedError
from lossscale.torch import MasterWeights
from lossscale.torch.grad_scaler import GradScaler

INNER = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.5),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.5, momentum=0.9, foreach=True),
    "fused": lambda given: torch.optim.AdamW(given, lr=0.5, fused=True),
}


each_inner = pytest.mark.parametrize("inner", INNER)


def made(inner="sgd", **settings):
    given = parameters((3,))
    return given, wrapped(INNER[inner](given), **settings)


def loss_of(given):
    return given[0].square().sum()


# What would be divided too often, or not at all.


def test_a_loss_that_is_scaled_already_is_known_to_copies_too_and_not_kept_alive():
    given, optimizer = made()
    scaled = optimizer.scale_loss(loss_of(given).detach())
    with pytest.raises(errors.GradientsError, match=r"already scaled.*once"):
        optimizer.scale_loss(scaled)
    # Another tensor with the same numbers is another loss.
    assert float(optimizer.scale_loss(scaled.clone())) == float(scaled) * 2**15
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        with pytest.raises(errors.GradientsError, match="already scaled"):
            copied.scale_loss(scaled)
    kept = weakref.ref(scaled)
    del scaled
    assert kept() is None


SCALING = {
    "wrapper": wrapper,
    "wrapper, clipping": functools.partial(wrapper, clip_norm=100.0),
    "wrapper, fixed": functools.partial(wrapper, rule=lossscale.FixedScale(8)),
    "scaler": scaler,
}


@each_inner
@pytest.mark.parametrize("by", SCALING)
@pytest.mark.parametrize("is_factor", [False, True], ids=["loss", "factor"])
def test_unscaling_before_there_are_gradients_divides_nothing(inner, by, is_factor):
    """Gradients that come later are still those of the scaled loss."""

    def run(early):
        given = parameters((3,))
        run = SCALING[by](INNER[inner](given))
        # The `backward` of a loss that is multiplied by a scaled number cannot be seen.
        scaled = run.scale_loss(torch.ones(()) if is_factor else loss_of(given))
        loss = scaled * loss_of(given) if is_factor else scaled
        # The wrapper returns the decision: nothing has overflowed.
        assert not early or run.unscale_() in (True, None)
        loss.backward()
        run.step()
        return snapshot(given, run), bits(run.state_dict())

    assert run(early=True) == run(early=False)


# Sparse gradients with several values at one index.

SPARSE = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.5),
    "SparseAdam": lambda given: torch.optim.SparseAdam(given, lr=0.5),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.5),
}


def of_the_same_index(scale, *values):
    given = torch.tensor(values).unsqueeze(1) * scale
    places = torch.zeros(1, len(values), dtype=torch.int64)
    return torch.sparse_coo_tensor(places, given, (3, 1), check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", SPARSE)
def test_values_of_one_index_are_summed_before_they_are_checked_and_clipped(name):
    given = parameters((3, 1))
    optimizer = wrapped(SPARSE[name](given), rule=lossscale.DynamicScale(1.0))
    before = snapshot(given, optimizer)
    optimizer.scale_loss(torch.zeros(()))
    # Half of the largest number, three times.
    given[0].grad = of_the_same_index(1.0, *[1.7e38] * 3)
    optimizer.step()
    assert (float(optimizer.loss_scale), optimizer.last_step_skipped) == (1.0, True)
    assert snapshot(given, optimizer) == before
    optimizer.clip_norm = 0.5
    for by_hand in (False, True):
        scale = optimizer.scale_loss(torch.ones(()))
        given[0].grad = of_the_same_index(scale, 1.0, 2.0, 3.0)
        if by_hand:
            optimizer.unscale_()
        optimizer.step()
        assert given[0].grad.to_dense().flatten().tolist() == pytest.approx([0.5, 0.0, 0.0])


# Names, rules and files.


NO_STATE = r"'state' and 'param_groups', as state_dict\(\) returns it\. Received: .*load the optim"
STATES = {
    "nothing": None,
    "whole checkpoint": {"model": {}, "optimizer": {}},
    "scaler": GradScaler("cpu").state_dict(),
}


def new(**settings):
    """A call that wraps an optimizer with these settings."""
    return lambda o: wrapped(torch.optim.SGD([{"params": []}], lr=0.1), **settings)


def several(choose):
    """A call that wraps several of two optimizers."""
    return lambda o: wrapped(choose(sgd(parameter()), sgd(parameter())))


def lbfgs():
    return torch.optim.LBFGS([parameter()])


class Asks(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "it requires a closure"


def sam_by(wrap):
    """A call of SAM's step with a closure, which nothing evaluates."""
    return lambda o: wrap(Sam([parameter()])).step(lambda: pytest.fail("evaluated"))


SGD = torch.optim.SGD
IN_STEP = "LBFGS evaluates a closure within its step.*without .*, in float32"
TWO_CALLS = r"Sam moves the weights .*backward\(loss\) and first_step\(\).* second_step\(\)"
of_tensorflow = AttributeError, r"Call optimizer.backward\(loss\), then optimizer.step\(\)"
LOSS, META = torch.ones(()), torch.nn.Parameter(torch.ones(2, device="meta"))
A_CLASS = "a class: create an instance first"
MISTAKES = {
    **{
        name: (functools.partial(lambda name, o: getattr(o, name)(LOSS), name), *of_tensorflow)
        for name in ("minimize", "apply_gradients", "get_scaled_loss", "get_unscaled_gradients")
    },
    "several losses": (lambda o: o.scale_loss([LOSS]), TypeError, "must be a tensor.*their sum"),
    "lr": (lambda o: setattr(o, "lr", 0.25), AttributeError, r"param_groups\[i\]\['lr'\]"),
    "a setting": (lambda o: setattr(o, "momentum", 0.5), AttributeError, r"\[i\]\['momentum'\]"),
    "of a rule": (lambda o: setattr(o, "min_scale", 2.0), AttributeError, "or to the rule"),
    "Join": (lambda o: Join([o]), AttributeError, "as many batches"),
    "get_config": (lambda o: o.get_config(), AttributeError, "has an attribute 'get_config'"),
    "no closure": (lambda o: o.step(LOSS), TypeError, r"Received: Tensor.*optimizer.backward\("),
    "decide later": (lambda o: setattr(o, "decide", "device"), AttributeError, "no setter"),
    "a group later": (lambda o: setattr(o, "process_group", 1), AttributeError, "no setter"),
    "clips to 0": (new(clip_norm=0.0), ValueError, "clip_norm"),
    "another decides": (new(decide="gpu"), ValueError, "'host' or 'device'"),
    "no device decides": (new(decide="device"), ValueError, "without parameters"),
    "decides on meta": (
        lambda o: wrapped(torch.optim.AdamW([META], fused=True), decide="device"),
        errors.ArgumentError,
        "the device of the parameters.*meta",
    ),
    "no fixed scale": (new(dynamic=False), ValueError, "initial_scale"),
    "no group": (new(process_group="world"), TypeError, "process_group"),
    "a class": (new(rule=lossscale.FixedScale), TypeError, A_CLASS),
    "of a scaler": (lambda o: GradScaler(rule=lossscale.FixedScale(8.0)), TypeError, "'rule'"),
    "no optimizer": (several(lambda a, b: []), errors.ArgumentError, "empty"),
    "one twice": (several(lambda a, b: [a, a]), errors.ArgumentError, "0 and 1|in two"),
    "a wrapper": (several(lambda a, b: [wrapped(a), b]), errors.AlreadyWrappedError, "LossScaleO"),
    "a name": (several(lambda a, b: [a, "adam"]), TypeError, "adam"),
    "LBFGS": (several(lambda a, b: lbfgs()), errors.UnsupportedError, IN_STEP),
    "LBFGS, masters": (lambda o: MasterWeights(lbfgs()), errors.UnsupportedError, IN_STEP),
    "Schedule-Free": (
        several(lambda a, b: type("SGDScheduleFreeClosure", (SGD,), {})([parameter()])),
        errors.UnsupportedError,
        "ScheduleFreeClosure evaluates a closure",
    ),
    "one that asks": (
        lambda o: wrapped(Asks([parameter()])).step(lambda: None),
        errors.UnsupportedError,
        "Asks evaluates a closure",
    ),
    "SAM": (sam_by(lambda sam: wrapped(sam)), errors.UnsupportedError, TWO_CALLS),
    "SAM, masters": (sam_by(MasterWeights), errors.UnsupportedError, TWO_CALLS),
    "no clipping": (lambda o: setattr(o, "clip_norm", 0), ValueError, "`clip_norm` .* above 0"),
    **{
        f"a state, {kind}": (lambda o, found=found: o.load_state_dict(found), KeyError, NO_STATE)
        for kind, found in STATES.items()
    },
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_answered_before_anything_changes(case):
    call, error, words = MISTAKES[case]
    given, optimizer = made("momentum")
    before = snapshot(given, optimizer), bits(optimizer.state_dict())
    with pytest.raises(error, match=words):
        call(optimizer)
    assert (snapshot(given, optimizer), bits(optimizer.state_dict())) == before
    assert (optimizer.decide, optimizer.process_group, optimizer.clip_norm) == ("host", None, None)


# Strange optimizers and gradients: the oracle is plain training, or an error is what is wanted.


def leaf(*values):
    """A tensor to train. A copy of an `nn.Parameter` would lose its gradient."""
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


# Methods of the inner optimizer.


class Methods(SGD):
    """Has methods of SAM, Sophia and Schedule-Free, and notes the gradients they find."""

    def __init__(self, given):
        super().__init__(given, lr=0.5)
        self.found = []

    def first_step(self):
        self.found.append([p.grad.clone() for g in self.param_groups for p in g["params"]])

    update_hessian = train = eval = first_step


METHODS = ["first_step", "update_hessian", "train", "eval"]


@pytest.mark.parametrize("way", ["verb", "unscaled"])
@pytest.mark.parametrize("several", [False, True])
@ends_as_without_scaling
def test_inner_methods_find_true_gradients(wrap, way, several):
    a, b = leaf(), leaf(3.0)
    parts = [Methods([a]), Methods([b])] if several else Methods([a, b])
    optimizer = wrap(parts)
    called = parts if several and optimizer is parts else [optimizer]
    derive(optimizer, (a * a).sum() + (b**3).sum(), way)
    for name in (*METHODS, "step"):
        for each in called:
            getattr(each, name)()
    return bits([a, b, [each.found for each in (parts if several else [parts])]])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
def test_inner_methods_on_scaled_or_overflowed_gradients_are_an_error(name, several, overflows):
    a = leaf()
    inner = Methods([a])
    optimizer = wrapped([inner, Methods([leaf()])] if several else inner)
    other, b = copy.deepcopy((optimizer, a))
    factor, way, words = (torch.inf, "verb", "overflowed") if overflows else (1, "scaled", "scale")
    derive(optimizer, (a * factor).sum(), way)
    with pytest.raises(CallOrderError, match=rf"{name}\(\) of .* would use gradients .*{words}"):
        getattr(optimizer, name)()
    assert inner.found == []
    if overflows:
        optimizer.step()
        assert a.tolist() == [1.0, 2.0]
        return
    # A step by the inner name, on scaled gradients alone; of a copy, too.
    derive(other, b.sum(), way)
    for each, given in ((optimizer, a), (other, b)):
        one = each.optimizers[0] if several else each.inner_optimizer
        with pytest.raises(CallOrderError, match=r"step\(\) of Methods .*optimizer.backward\("):
            one.step()
        each.unscale_()
        one.step()
        assert given.tolist() == [0.5, 1.5]


# Optimizers that cannot be wrapped, or are of a strange kind.


def test_what_steps_inside_of_backward_or_alone_is_refused():
    a = leaf()
    inner = SGD([a], lr=0.5)
    # PyTorch's communicates in its step.
    local = type("PostLocalSGDOptimizer", (SGD,), {})([leaf()], lr=0.5)
    for each in (local, [local, inner]):
        with pytest.raises(UnsupportedError, match=r"process_group=torch\.distributed\.group"):
            wrapped(each)
    wrapped(local, process_group=[])
    for owner, name, words in (
        (inner, "_overlap_with_ddp", "ZeroRedundancyOptimizer"),
        (a, "_in_backward_optimizers", "_apply_optimizer_in_backward"),
    ):
        setattr(owner, name, True)
        with pytest.raises(UnsupportedError, match=f"{words}.* inside backward"):
            wrapped(inner)
        delattr(owner, name)


class Slots:
    """An optimizer of somebody's own, which cannot be referred to weakly."""

    __slots__ = ("param_groups", "state")

    def __init__(self, given, lr):
        self.param_groups, self.state = [{"params": list(given), "lr": lr}], {}

    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.5)


KINDS = [
    type("Unhashable", (SGD,), {"__hash__": None}),
    type("Equal", (SGD,), {"__hash__": SGD.__hash__, "__eq__": lambda a, b: type(a) is type(b)}),
    Slots,
]


@pytest.mark.parametrize("cls", KINDS)
@pytest.mark.parametrize("together", [False, True])
def test_a_scaler_tells_optimizers_apart_that_are_equal_or_have_no_hash(cls, together):
    """The first of two overflows once: it is skipped by itself, or both after `unscale_`."""
    a, b = leaf(), leaf()
    parts, scaler = [cls([a], lr=0.5), cls([b], lr=0.5)], GradScaler("cpu", init_scale=8.0)
    for factor in (torch.inf, 1.0):
        a.grad = b.grad = None
        scaler.scale((a * factor).sum() + b.sum()).backward()
        for each in parts if together else ():
            scaler.unscale_(each)
        for each in parts:
            scaler.step(each)
        scaler.update()
    assert (a.tolist(), b.tolist()) == ([0.5, 1.5], [0.5, 1.5] if together else [0.0, 1.0])


ROWS = {
    **dict.fromkeys(("verb", "scale_loss", "unscaled"), wrapped),
    "device": functools.partial(wrapped, decide="device"),
    **dict.fromkeys(("scaler", "scaler, unscaled"), scaler),
}


@pytest.mark.parametrize("clears", [None, "optimizer", "parameter"])
@pytest.mark.parametrize("good", [0, 4])
@pytest.mark.parametrize("kind", ROWS)
def test_three_losses_in_a_row_without_a_gradient_are_warned_of_once_in_each_row(
    kind, good, clears
):
    """The losses are of another parameter, or the gradients are cleared before the step."""
    known, other, said = leaf(), leaf(), []
    inner = SGD([known], lr=0.5, fused=True)
    optimizer = ROWS[kind](inner)
    for number in range(22):
        is_good = number < good or number == 12
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True, action="always") as caught:
            derive(optimizer, (known if is_good or clears else other).sum(), kind)
            if not is_good and clears == "optimizer":
                optimizer.zero_grad()
            elif not is_good:
                known.grad = None
            optimizer.step()
        said += [(number, str(each.message)) for each in caught]
    assert [number for number, _ in said] == [good + 2, 15]
    for _, words in said:
        assert "No parameter of SGD had a gradient after the last 3 losses" in words


@pytest.mark.parametrize("clears", ["optimizer", "parameter"])
@pytest.mark.parametrize("kind", ROWS)
def test_an_overflow_that_was_known_when_its_gradients_were_cleared_is_a_skipped_step(kind, clears):
    weight = leaf()
    optimizer = ROWS[kind](SGD([weight], lr=0.5, fused=True))
    is_known = kind in ("verb", "unscaled", "scaler, unscaled")
    for factor in (1.0, torch.inf, torch.inf):
        optimizer.zero_grad()
        derive(optimizer, weight.sum() * factor, kind)
        if factor != 1.0 and clears == "optimizer":
            optimizer.zero_grad()
        elif factor != 1.0:
            weight.grad = None
        optimizer.step()
    skipped = watched(optimizer).steps_skipped
    assert (int(skipped), weight.tolist()) == (2 * is_known, [0.5, 1.5])


def trained_critic_first(a, b):
    """A loss of the first part alone, and a step of both."""
    one, other = wrapped(sgd(a)), wrapped(sgd(b))
    return lambda: (one.backward(a.sum()), one.step(), other.step())


def frozen_with_a_scaler(a, b):
    parts, scaler = [sgd(a), sgd(b.requires_grad_(False))], GradScaler("cpu")
    return lambda: (scaler.scale(a.sum()).backward(), *map(scaler.step, parts), scaler.update())


@pytest.mark.parametrize("make", [trained_critic_first, frozen_with_a_scaler])
def test_steps_without_a_gradient_that_are_no_mistake(make):
    step = make(leaf(), leaf())
    # A warning is an error here.
    for _ in range(30):
        step()


# Gradients that are not tensors of their own.

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -4.0]])
WAYS = ["verb", "scaled", "unscaled", "scaler"]
LOSSES = {
    # Autograd hands one tensor to both terms.
    "summed": lambda a, b: ((a + b) * X).sum(),
    "expanded": lambda a, b: a.sum() * 3 + b.sum(),
    "negated": lambda a, b: (torch.view_as_complex(torch.stack([a, b], -1)).conj().imag * X).sum(),
    "conjugated": lambda a, b: (torch.complex(a, b).conj() * torch.complex(X, -X)).real.sum(),
    "transposed": lambda a, b: (a.T @ b).square().mean() / 2**12,
    "squared": lambda a, b: (a + b).square().sum(),
}


PLACES = {
    "of its own": lambda a, b: (a, b),
    "one tensor": lambda a, b: (a, a),
    "a view": lambda a, b: (a, a.view(a.shape)),
    "detached": lambda a, b: (a, a.detach()),
    # As `torch.autograd.grad` returns that of a complex conjugate.
    "negated": lambda a, b: (a, torch._neg_view(-b)),
    # Both share the rows in the middle.
    "overlap": lambda a, b: ((whole := torch.cat([a, b]))[: len(a)], whole[1 : len(a) + 1]),
}
SETTINGS = {
    "host": {},
    "device": {"decide": "device"},
    "fixed": {"rule": lossscale.FixedScale(8.0)},
    "needs": {"rule": lossscale.FixedScale(8.0, skip_nonfinite=True)},
    "clips": {"clip_norm": 2.0**30},
}
SHARED = [
    *((name, place, way, "host", 0) for name in LOSSES for place in PLACES for way in WAYS),
    # In a later step, too, when much is known of the gradients.
    *(("squared", *row) for row in itertools.product(PLACES, WAYS[:3], SETTINGS, (0, 6))),
]


# After `backward` nothing of a fixed scale reads them, and PyTorch's fused kernel refuses them.
REFUSED = [("squared", "negated", "verb", "fixed", first) for first in (0, 6)]


@pytest.mark.parametrize(
    ("name", "place", "way", "settings", "first"), [row for row in SHARED if row not in REFUSED]
)
def test_gradients_that_share_memory_or_are_views(name, place, way, settings, first):
    def run(wrap):
        a, b = torch.arange(6.0).reshape(2, 3).requires_grad_(), torch.ones(2, 3).requires_grad_()
        optimizer = wrap(SGD([a, b], lr=0.0625, momentum=0.5, fused=name == "squared"))
        for number in range(first + 3):
            optimizer.zero_grad()
            derive(optimizer, LOSSES[name](a, b), "scaled" if way == "unscaled" else way)
            if number >= first:
                a.grad, b.grad = PLACES[place](a.grad, b.grad)
            if wrap is alone:
                # A fused kernel of PyTorch's cannot.
                b.grad = b.grad.resolve_neg()
            if way == "unscaled" and wrap is not alone:
                optimizer.unscale_()
            optimizer.step()
        return bits([a, b])

    ours = scaler if way == "scaler" else functools.partial(wrapped, **SETTINGS[settings])
    assert run(ours) == run(alone)
