"""What somebody new to the wrapper gets wrong, and is told."""

import copy
import pickle
import re
import warnings

import pytest
import torch

import lossscale
from frameworks.torch.support import bits, parameters, snapshot, wrapped
from lossscale import LossScaleWarning
from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentTypeError,
    GradientsError,
    StateDictError,
    UnknownSettingError,
)
from lossscale.torch.grad_scaler.scaler import GradScaler

INNER = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.5),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.5, momentum=0.9, foreach=True),
    "fused": lambda given: torch.optim.AdamW(given, lr=0.5, fused=True),
}


def made(inner="sgd", **settings):
    given = parameters((3,))
    return given, wrapped(INNER[inner](given), **settings)


def loss_of(given):
    return given[0].square().sum()


# What would be divided too often, or not at all.


def test_a_loss_that_is_scaled_already():
    given, optimizer = made()
    for scale in (optimizer.scale_loss, optimizer.get_scaled_loss):
        scaled = scale(loss_of(given).detach())
        for again in (optimizer.scale_loss, optimizer.get_scaled_loss):
            with pytest.raises(GradientsError, match=r"scaled already.*once"):
                again(scaled)
        # Another tensor with the same numbers is another loss.
        assert float(optimizer.scale_loss(scaled.clone())) == float(scaled) * 2**15


def test_what_is_remembered_of_a_loss_keeps_nothing_alive_and_is_not_copied():
    given, optimizer = made()
    scaled = optimizer.scale_loss(loss_of(given))
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not copied._marks.was_scaled(scaled)
    assert optimizer._marks.was_scaled(scaled)
    del scaled
    assert optimizer._marks._scaled() is None
    assert not optimizer._marks.was_scaled(None)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 100.0}, {"rule": lossscale.FixedScale(8)}])
@pytest.mark.parametrize("inner", INNER)
def test_unscaling_before_there_are_gradients_divides_nothing(inner, settings):
    """Gradients that come later are still those of the scaled loss."""
    runs = []
    for early in (True, False):
        given, optimizer = made(inner, **settings)
        scaled = optimizer.scale_loss(loss_of(given))
        if early:
            assert optimizer.unscale_()
        scaled.backward()
        optimizer.step()
        runs.append([snapshot(given, optimizer), optimizer.iterations])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("rule", [None, lossscale.FixedScale(8)])
@pytest.mark.parametrize("inner", INNER)
def test_a_scaler_that_unscales_before_there_are_gradients(inner, rule):
    runs = []
    for early in (True, False):
        given = parameters((3,))
        optimizer, scaler = INNER[inner](given), GradScaler("cpu", rule=rule)
        scaled = scaler.scale(loss_of(given))
        if early:
            scaler.unscale_(optimizer)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        runs.append([snapshot(given, optimizer), scaler.state_dict()])
    assert runs[0] == runs[1]


def test_a_scaler_of_pytorch_that_is_given_the_wrapper():
    given, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(given)).backward()
    with pytest.warns(LossScaleWarning, match="such as a GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(AlreadyWrappedError, match="Use it without a GradScaler"):
        GradScaler("cpu").step(optimizer)


@pytest.mark.parametrize("inner", INNER)
def test_who_leaves_a_step_out_is_told_that_the_scale_stays(inner):
    given, optimizer = made(inner)
    before = snapshot(given, optimizer)
    optimizer.scale_loss(loss_of(given) * torch.inf).backward()
    assert not optimizer.unscale_()
    optimizer.zero_grad()
    with pytest.warns(LossScaleWarning, match=r"Call step\(\) all the same") as told:
        optimizer.scale_loss(loss_of(given)).backward()
    assert told[0].filename == __file__
    assert snapshot(given, optimizer) == before
    # What is called is not told, nor what LBFGS evaluates again.
    given, optimizer = made(inner)
    optimizer.scale_loss(loss_of(given) * torch.inf).backward()
    if optimizer.unscale_():
        raise AssertionError
    optimizer.step()
    optimizer.scale_loss(loss_of(given))
    assert optimizer.steps_skipped == 1


@pytest.mark.parametrize("rule", [lossscale.DynamicScale(), lossscale.FixedScale(8)])
def test_steps_whose_loss_nobody_scaled_are_counted_and_followed_by_a_schedule(rule):
    given, optimizer = made("momentum", rule=rule)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scheduler = lossscale.torch.guard(scheduler, optimizer)
    told = []
    finite = [True, False, True] if rule.checks_gradients else [True] * 3
    for is_finite in finite:
        optimizer.zero_grad()
        (loss_of(given) * (1.0 if is_finite else torch.inf)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LossScaleWarning)
            optimizer.step()
        scheduler.step()
        told.append(not optimizer.last_step_skipped)
    assert told == finite
    assert optimizer.iterations == 3
    assert scheduler.get_last_lr() == [0.5 ** (1 + sum(finite))]
    assert float(optimizer.loss_scale) == float(rule.init().scale)


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
@pytest.mark.parametrize("wrap", [True, False], ids=["wrapper", "scaler"])
@pytest.mark.parametrize("name", SPARSE)
def test_values_of_one_index_whose_sum_overflows(name, wrap):
    given = parameters((3, 1))
    optimizer = SPARSE[name](given)
    before = snapshot(given, optimizer)
    # Half of the largest number, three times.
    if wrap:
        optimizer = wrapped(optimizer, initial_scale=1.0)
        optimizer.scale_loss(torch.zeros(()))
        given[0].grad = of_the_same_index(1.0, *[1.7e38] * 3)
        optimizer.step()
        assert optimizer.last_step_skipped
    else:
        scaler = GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        given[0].grad = of_the_same_index(1.0, *[1.7e38] * 3)
        scaler.step(optimizer)
        assert scaler.last_step_skipped
    assert snapshot(given, optimizer) == before


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_the_norm_of_values_of_one_index(name, by_hand):
    given = parameters((3, 1))
    optimizer = wrapped(SPARSE[name](given), clip_norm=0.5)
    scale = optimizer.scale_loss(torch.ones(()))
    given[0].grad = of_the_same_index(scale, 1.0, 2.0, 3.0)
    if by_hand:
        optimizer.unscale_()
    optimizer.step()
    assert given[0].grad.to_dense().flatten().tolist() == pytest.approx([0.5, 0.0, 0.0])


# Closures.


def test_lbfgs_and_a_closure_that_returns_the_scaled_loss():
    given = parameters((3,))
    optimizer = wrapped(torch.optim.LBFGS(given))
    before = bits(given)

    def closure():
        optimizer.zero_grad()
        loss = optimizer.scale_loss(loss_of(given))
        loss.backward()
        return loss

    with pytest.raises(GradientsError, match=r"returned the scaled loss.*LBFGS"):
        optimizer.step(closure)
    assert bits(given) == before


def test_lbfgs_and_a_closure_that_returns_nothing():
    given = parameters((3,))
    optimizer = wrapped(torch.optim.LBFGS(given))
    with pytest.raises(ArgumentTypeError, match="must return the loss: LBFGS"):
        optimizer.step(lambda: optimizer.scale_loss(loss_of(given)).backward())


def test_lbfgs_and_a_closure_that_scales_nothing():
    runs = []
    for wrap in (True, False):
        given = parameters((3,))
        optimizer = torch.optim.LBFGS(given)
        optimizer = wrapped(optimizer) if wrap else optimizer

        def closure(optimizer=optimizer, given=given):
            optimizer.zero_grad()
            loss = loss_of(given)
            loss.backward()
            return loss

        if wrap:
            # Not of unscale_(), which nobody has called.
            with pytest.warns(LossScaleWarning, match=r"^step\(\) was called, and no loss"):
                optimizer.step(closure)
        else:
            optimizer.step(closure)
        runs.append(bits(given))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("inner", INNER)
def test_a_loss_in_the_place_of_a_closure(inner):
    given, optimizer = made(inner)
    loss = optimizer.scale_loss(loss_of(given))
    loss.backward()
    before = snapshot(given, optimizer)
    with pytest.raises(ArgumentTypeError, match=r"Received: Tensor.*scale_loss\(loss\)\.backward"):
        optimizer.step(loss)
    assert snapshot(given, optimizer) == before
    optimizer.step()
    assert optimizer.iterations == 1


# Names, rules and files.


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("scale", r"scale_loss\(loss\)"),
        ("update", r"step\(\) moves the scale"),
        ("get_scale", r"float\(optimizer\.loss_scale\)"),
        ("is_enabled", "leave the wrapper out"),
        ("set_growth_interval", r"optimizer\.rule"),
    ],
)
def test_names_of_a_scaler(name, hint):
    _, optimizer = made()
    assert not hasattr(optimizer, name)
    with pytest.raises(
        UnknownSettingError, match=f"no '{name}', which is of a GradScaler: .*{hint}"
    ):
        getattr(optimizer, name)


@pytest.mark.parametrize("inner", INNER)
def test_clipping_that_is_set_later(inner):
    runs = []
    for first in (None, 0.5):
        given, optimizer = made(inner, clip_norm=first)
        assert optimizer.clip_norm == first
        optimizer.clip_norm = 0.5
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.scale_loss(loss_of(given)).backward()
            optimizer.step()
        runs.append(snapshot(given, optimizer))
    assert runs[0] == runs[1]
    assert float(given[0].grad.norm()) == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"`clip_norm` must be .* above 0"):
        optimizer.clip_norm = 0
    assert optimizer.clip_norm == 0.5
    optimizer.clip_norm = None
    optimizer.zero_grad()
    optimizer.scale_loss(100 * loss_of(given)).backward()
    optimizer.step()
    assert float(given[0].grad.norm()) > 1


@pytest.mark.parametrize(("name", "value"), [("decide", "host"), ("process_group", None)])
def test_what_cannot_be_set_later(name, value):
    _, optimizer = made()
    assert getattr(optimizer, name) == value
    with pytest.raises(AttributeError, match=f"'{name}'.*has no setter"):
        setattr(optimizer, name, "device")


def test_what_pytorchs_optimizers_do_not_have():
    _, optimizer = made()
    with pytest.raises(NotImplementedError, match=r"`get_weights`.*torch.*\(SGD\)\. docs/"):
        optimizer.get_weights()


@pytest.mark.parametrize("rule", [lossscale.DynamicScale, lossscale.FixedScale])
def test_the_class_of_a_rule(rule):
    for make in (made, lambda rule: GradScaler("cpu", rule=rule)):
        with pytest.raises(ArgumentTypeError, match=rf"class; call it: {rule.__name__}\(\)"):
            make(rule=rule)


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        [],
        {"model": {}, "optimizer": {}},
        {"state": {}, "param_groups": []},
        GradScaler("cpu").state_dict(),
    ],
    ids=["nothing", "empty", "list", "whole checkpoint", "no groups", "scaler"],
)
def test_what_is_no_state_of_an_optimizer(found):
    given, optimizer = made("momentum")
    before = snapshot(given, optimizer)
    expected = re.escape("'state' and 'param_groups', as state_dict() returns it. Received: ")
    with pytest.raises(StateDictError, match=f"{expected}.*load that of the optimizer") as caught:
        optimizer.load_state_dict(found)
    assert isinstance(caught.value, KeyError)
    assert snapshot(given, optimizer) == before


# Mistakes that PyTorch allows end as they do there.


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clear", ["optimizer", "inner", "model"])
@pytest.mark.parametrize("inner", INNER)
def test_however_gradients_are_cleared(inner, clear, set_to_none):
    runs = []
    for wrap in (True, False):
        model = torch.nn.Linear(3, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        optimizer = plain = INNER[inner](model.parameters())
        if wrap:
            optimizer = wrapped(plain)
        for _ in range(3):
            loss = model(torch.ones(2, 3)).square().sum()
            (optimizer.scale_loss(loss) if wrap else loss).backward()
            optimizer.step()
            cleared = {"optimizer": optimizer, "inner": plain, "model": model}[clear]
            cleared.zero_grad(set_to_none=set_to_none)
        runs.append(snapshot(model.parameters(), optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("inner", INNER)
def test_a_model_that_is_cast_after_it_was_wrapped(inner, dtype):
    runs = []
    for wrap in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = INNER[inner](model.parameters())
        optimizer = wrapped(optimizer) if wrap else optimizer
        model.to(dtype)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3, dtype=dtype)).square().sum()
            # bfloat16 divides as exactly, for the scale is a power of two.
            (optimizer.scale_loss(loss) if wrap else loss).backward()
            optimizer.step()
        runs.append(snapshot(model.parameters(), optimizer))
    assert runs[0] == runs[1]
