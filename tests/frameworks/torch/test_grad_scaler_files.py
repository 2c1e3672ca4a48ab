"""The state of a scaler goes both ways between this class and the scalers of others."""

import io
import json
import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch

import lossscale.torch
from frameworks.torch.scaling import (
    MAKERS,
    OPTIMIZERS,
    made,
    one_step,
    parameters,
    scale_and_tracker,
)
from frameworks.torch.support import parameter, sgd, wrapped
from lossscale import DynamicScale, FixedScale, LossScaleWarning, ScaleState
from lossscale.errors import ArgumentError, StateDictError
from lossscale.torch.grad_scaler import GradScaler

SETTINGS = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
KEYS = {"scale", "_growth_tracker", *SETTINGS}


def used(make):
    weights, optimizer, scaler = made("sgd", make, init_scale=64.0, **SETTINGS)
    for slope in (torch.inf, 0.0, 0.0):
        one_step(scaler, optimizer, weights, slope)
    return scaler, weights, optimizer


def through_a_file(state):
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("saves", MAKERS)
@pytest.mark.parametrize("loads", MAKERS)
@pytest.mark.parametrize("before_first_use", [True, False])
def test_both_ways(saves, loads, before_first_use):
    scaler, weights, optimizer = used(MAKERS[saves])
    state = through_a_file(scaler.state_dict())
    assert set(state) - {"steps_skipped"} == KEYS
    assert all(type(value) in (int, float) for value in state.values())
    other = MAKERS[loads]("cpu")
    if not before_first_use:
        other.scale(torch.ones(()))
    other.load_state_dict(state)
    assert scale_and_tracker(other) == scale_and_tracker(scaler) == (16.0, 2)
    for slope in (0.0, 0.0, torch.inf):
        one_step(other, optimizer, weights, slope)
        one_step(scaler, optimizer, weights, slope)
        assert scale_and_tracker(other) == scale_and_tracker(scaler)


def test_skipped_steps_are_counted_on():
    scaler, weights, optimizer = used(GradScaler)
    other = GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.steps_skipped == 1
    one_step(other, optimizer, weights, torch.inf)
    assert other.steps_skipped == 2


OF_OTHERS = {
    "PyTorch": {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    },
    "Apex, amp.state_dict()": {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}},
    "Apex, one scaler": {"loss_scale": 512.0, "unskipped": 7},
    "Megatron": {"scale": torch.tensor([512.0]), "growth_tracker": 7, "hysteresis_tracker": 1},
    "DeepSpeed": {
        "dynamic_loss_scale": True,
        "cur_scale": 512.0,
        "cur_iter": 20,
        "last_overflow_iter": 12,
        "scale_factor": 2.0,
        "scale_window": 2000,
        "clip_grad": 0.0,
    },
}


@pytest.mark.parametrize("state", OF_OTHERS.values(), ids=OF_OTHERS)
def test_states_of_other_scalers_are_taken_over_by_both(state):
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.load_state_dict(state)
    assert scale_and_tracker(scaler) == (512.0, 7)
    optimizer = lossscale.torch.LossScaleOptimizer(OPTIMIZERS["sgd"](parameters(1)))
    optimizer.loss_scale_state.load_state_dict(state)
    assert (float(optimizer.loss_scale), optimizer.dynamic_counter) == (512.0, 7)
    # And back: the wrapper's, as PyTorch's scaler and the drop-in read it.
    for make in (torch.amp.GradScaler, GradScaler):
        theirs = make("cpu")
        theirs.load_state_dict(
            json.loads(json.dumps(optimizer.loss_scale_state.scaler_state_dict()))
        )
        theirs.scale(torch.ones(()))
        assert scale_and_tracker(theirs) == (512.0, 7)
    scaler.load_state_dict(optimizer.loss_scale_state.state_dict())
    assert scale_and_tracker(scaler) == (512.0, 7)


@pytest.mark.parametrize(
    "lost", [{"hysteresis_tracker": 2}, {"delayed_shift": 2}], ids=["Megatron", "DeepSpeed"]
)
def test_what_cannot_be_taken_over_is_named(lost):
    state = OF_OTHERS["Megatron" if "hysteresis_tracker" in lost else "DeepSpeed"] | lost
    [name] = lost
    with pytest.warns(LossScaleWarning, match=f"hysteresis .{name}=2.*falls at each"):
        GradScaler("cpu").load_state_dict(state)
    optimizer = lossscale.torch.LossScaleOptimizer(OPTIMIZERS["sgd"](parameters(1)))
    with pytest.warns(
        LossScaleWarning, match=r"growth_interval=500.*rule=lossscale.DynamicScale"
    ) as warned:
        optimizer.loss_scale_state.load_state_dict(OF_OTHERS["PyTorch"] | {"growth_interval": 500})
    assert warned[0].filename == __file__
    assert float(optimizer.loss_scale) == 512.0


@pytest.mark.parametrize(
    ("name", "trackers", "warns", "overflows"),
    [
        ("Megatron", {"hysteresis_tracker": 2}, True, 0),
        ("Megatron", {"hysteresis_tracker": 1}, False, 1),
        ("DeepSpeed", {"delayed_shift": 2, "cur_hysteresis": 1}, True, 1),
        (
            "DeepSpeed",
            {"delayed_shift": 2, "cur_hysteresis": 1, "consecutive_hysteresis": True},
            False,
            1,
        ),
    ],
)
def test_a_rule_that_waits_takes_the_trackers_of_others_over(name, trackers, warns, overflows):
    scaler = GradScaler("cpu", rule=lossscale.DynamicScale(overflows_before_backoff=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.load_state_dict(OF_OTHERS[name] | trackers)
    assert [("in a row" in str(one.message)) for one in caught] == [True] * warns
    assert scale_and_tracker(scaler) == (512.0, 7)
    assert scaler.state_dict()["rule_state"]["overflows"] == overflows


@pytest.mark.parametrize(("saves", "loads"), [(1, 2), (2, 1), (2, 2)])
def test_states_go_between_rules_that_wait_and_that_do_not(saves, loads):
    def rule(waits):
        return lossscale.DynamicScale(initial_scale=8.0, overflows_before_backoff=waits)

    def optimizer(waits):
        inner = OPTIMIZERS["sgd"](parameters(1))
        made = lossscale.torch.LossScaleOptimizer(inner, rule=rule(waits))
        made.scale_loss(torch.ones(()))
        [weight] = made.param_groups[0]["params"]
        weight.grad = torch.full_like(weight, math.inf)
        made.step()
        return made

    written = optimizer(saves).state_dict()
    read = optimizer(loads)
    read.load_state_dict(json.loads(json.dumps(written)))
    numbers = read.state_dict()["param_groups"][0]
    assert numbers["loss_scale"] == (8.0 if saves == 2 else 4.0)
    assert numbers.get("loss_scale_overflows") == {1: None, 2: saves - 1}[loads]
    scaler = GradScaler("cpu", rule=rule(saves))
    other = GradScaler("cpu", rule=rule(loads))
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict().get("rule_state", {}).get("overflows") == {1: None, 2: 0}[loads]


def test_the_format_of_pytorch_refuses_a_rule_that_waits():
    rule = lossscale.DynamicScale(overflows_before_backoff=2)
    optimizer = lossscale.torch.LossScaleOptimizer(OPTIMIZERS["sgd"](parameters(1)), rule=rule)
    with pytest.raises(
        ValueError, match=r"cannot store the overflow count.*Save optimizer.state_dict"
    ):
        optimizer.loss_scale_state.scaler_state_dict()


def test_an_apex_state_of_several_scalers_says_which_to_load():
    scalers = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(2)}
    scaler = GradScaler("cpu")
    with pytest.raises(StateDictError, match=r"2 loss scalers.*state\['loss_scaler0'\]"):
        scaler.load_state_dict(scalers)
    scaler.load_state_dict(scalers["loss_scaler1"])
    assert scale_and_tracker(scaler) == (2.0, 1)


class Saved:
    """DeepSpeed saves its scaler as an object."""

    def __init__(self):
        self.cur_scale, self.cur_iter, self.last_overflow_iter = 512.0, 8, 0
        self.scale_factor, self.scale_window, self.delayed_shift = 2.0, 1000, 1


def test_a_scaler_that_was_saved_itself():
    scaler = GradScaler("cpu")
    scaler.load_state_dict({"loss_scaler": Saved(), "dynamic_loss_scale": True})
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (512.0, 7)
    with pytest.raises(StateDictError, match="not the state of a gradient scaler"):
        scaler.load_state_dict({"loss_scaler": 5})
    o = wrapped(sgd(parameter()))
    with pytest.raises(ArgumentError, match="must be a number"):
        o.loss_scale_state.load_state_dict({"loss_scale": 10**400})


@pytest.mark.parametrize("key", sorted(KEYS))
def test_what_a_partial_state_does_not_say_stays(key):
    scaler, _, _ = used(GradScaler)
    state = scaler.state_dict()
    del state[key]
    theirs = torch.amp.GradScaler("cpu")
    with pytest.raises(KeyError):
        theirs.load_state_dict(state)
    other = GradScaler("cpu")
    fresh = other.state_dict()
    other.load_state_dict(state)
    assert other.state_dict() == {**state, key: fresh[key]}


BAD = {
    "empty": ({}, StateDictError, "empty"),
    "none": (None, StateDictError, "dictionary"),
    "another kind": ({"state": {}, "param_groups": []}, StateDictError, "'state', 'param_groups'"),
    "no number": ({"scale": "high"}, StateDictError, "'scale'.*'high'"),
    "growth": ({"scale": 2.0, "growth_factor": 0.5}, ArgumentError, "growth_factor"),
    "interval": ({"scale": 2.0, "growth_interval": 0}, ArgumentError, "growth_interval"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_state_that_cannot_be_loaded_changes_nothing(case):
    state, error, message = BAD[case]
    scaler, _, _ = used(GradScaler)
    before = scaler.state_dict()
    with pytest.raises(error, match=message):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
    if case == "empty":
        with pytest.raises(RuntimeError):
            torch.amp.GradScaler("cpu").load_state_dict({})
        with pytest.raises(RuntimeError):
            scaler.load_state_dict({})


@pytest.mark.parametrize(
    ("scale", "becomes"),
    [(0.0, 8.0), (float("nan"), 8.0), (float("inf"), 8.0), (-1.0, 8.0), (0.5, 2.0), (1e9, 1024.0)],
)
@pytest.mark.parametrize("lazily", [True, False])
def test_a_scale_outside_of_the_range_is_brought_into_it(scale, becomes, lazily):
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=2.0, max_scale=1024.0)
    if not lazily:
        scaler.scale(torch.ones(()))
    with pytest.warns(LossScaleWarning, match="outside the range"):
        scaler.load_state_dict({"scale": scale, "_growth_tracker": -3})
    assert scale_and_tracker(scaler) == (becomes, 0)
    assert scaler.scale(torch.ones(())) == becomes


def test_a_tracker_past_the_interval_is_brought_before_it():
    scaler = GradScaler("cpu", growth_interval=5)
    scaler.load_state_dict({"scale": 8.0, "_growth_tracker": 100})
    assert scale_and_tracker(scaler) == (8.0, 4)


def test_the_number_of_a_fixed_scale_stands():
    scaler = GradScaler("cpu", rule=FixedScale(128.0))
    scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert scaler.get_scale() == 128
    assert scaler.rule == FixedScale(128.0)


class PatientState(NamedTuple):
    scale: Any
    good_steps: Any
    bad_steps: Any


class Patient(DynamicScale):
    """Backs off at the second overflow in a row; what it remembers has one field more."""

    @property
    def powers_of_two(self):
        return False

    def init(self):
        return PatientState(*super().init(), bad_steps=0)

    def update(self, state, seen, *, xp):
        after = super().update(ScaleState(*state[:2]), seen, xp=xp)
        waits = ~seen.finite & (state.bad_steps < 1)
        return PatientState(
            xp.where(waits, state.scale, after.scale),
            after.good_steps,
            xp.where(seen.finite, 0, state.bad_steps + 1),
        )

    def restored(self, state):
        return PatientState(*super().restored(ScaleState(*state[:2])), int(state.bad_steps))


def test_a_rule_of_ones_own_keeps_all_that_it_remembers():
    weights, optimizer, scaler = made(rule=Patient(initial_scale=8.0))
    one_step(scaler, optimizer, weights, torch.inf)
    assert scaler.get_scale() == 8
    state = through_a_file(scaler.state_dict())
    other = GradScaler("cpu", rule=Patient(initial_scale=8.0))
    other.load_state_dict(state)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state)
    assert theirs.get_scale() == 8
    for each in (scaler, other):
        one_step(each, optimizer, weights, torch.inf)
        assert scale_and_tracker(each) == (4.0, 0)
