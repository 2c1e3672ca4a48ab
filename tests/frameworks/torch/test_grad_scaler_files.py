"""The state of a scaler goes both ways between this class and the scalers of others."""

import json

import pytest
import torch

import lossscale.torch
from frameworks.torch.scaling import MAKERS, made, one_step, scale_and_tracker
from frameworks.torch.support import parameter, sgd, through_a_file, wrapped
from lossscale import FixedScale, LossScaleWarning
from lossscale.errors import ArgumentError, StateDictError
from lossscale.torch.grad_scaler import GradScaler

SETTINGS = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
KEYS = {"scale", "_growth_tracker", *SETTINGS}


def used(make):
    weights, optimizer, scaler = made("sgd", make, init_scale=64.0, **SETTINGS)
    for slope in (torch.inf, 0.0, 0.0):
        one_step(scaler, optimizer, weights, slope)
    return scaler, weights, optimizer


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
    assert "torch" in (saves, loads) or other.steps_skipped == 2


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


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("state", OF_OTHERS.values(), ids=OF_OTHERS)
def test_states_of_other_scalers_are_taken_over_by_both(state, decide):
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.load_state_dict(state)
    assert scale_and_tracker(scaler) == (512.0, 7)
    inner = torch.optim.SGD([parameter()], lr=1.0, fused=True)
    optimizer = wrapped(inner, decide=decide)
    optimizer.loss_scale_state.load_state_dict(state)
    assert (float(optimizer.loss_scale), optimizer.dynamic_counter) == (512.0, 7)
    # And back: the wrapper's, as PyTorch's scaler and the drop-in read it.
    for make in (torch.amp.GradScaler, GradScaler):
        theirs = make("cpu")
        saved = optimizer.loss_scale_state.scaler_state_dict()
        theirs.load_state_dict(json.loads(json.dumps(saved)))
        theirs.scale(torch.ones(()))
        assert scale_and_tracker(theirs) == (512.0, 7)
    scaler.load_state_dict(optimizer.loss_scale_state.state_dict())
    assert scale_and_tracker(scaler) == (512.0, 7)


def test_what_cannot_be_taken_over_is_named():
    for name, lost in (("Megatron", "hysteresis_tracker"), ("DeepSpeed", "delayed_shift")):
        with pytest.warns(LossScaleWarning, match=f"hysteresis .{lost}=2.*is not loaded"):
            GradScaler("cpu").load_state_dict(OF_OTHERS[name] | {lost: 2})
    optimizer = wrapped(sgd(parameter()))
    words = r"growth_interval=500.*rule=lossscale.DynamicScale"
    with pytest.warns(LossScaleWarning, match=words) as warned:
        optimizer.loss_scale_state.load_state_dict(OF_OTHERS["PyTorch"] | {"growth_interval": 500})
    assert warned[0].filename == __file__
    assert float(optimizer.loss_scale) == 512.0


@pytest.mark.parametrize(("saves", "loads"), [(1, 2), (2, 1), (2, 2)])
def test_states_go_between_rules_that_wait_and_that_do_not(saves, loads):
    scaler, other = (
        GradScaler("cpu", rule=lossscale.DynamicScale(8.0, overflows_before_backoff=waits))
        for waits in (saves, loads)
    )
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict().get("rule_state", {}).get("overflows") == {1: None, 2: 0}[loads]


class Saved:
    """DeepSpeed saves its scaler as an object."""

    def __init__(self):
        self.cur_scale, self.cur_iter, self.last_overflow_iter = 512.0, 8, 0
        self.scale_factor, self.scale_window, self.delayed_shift = 2.0, 1000, 1


APEX = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(2)}


def test_a_scaler_that_was_saved_itself_and_one_of_several():
    scaler = GradScaler("cpu")
    scaler.load_state_dict({"loss_scaler": Saved(), "dynamic_loss_scale": True})
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (512.0, 7)
    scaler.load_state_dict(APEX["loss_scaler1"])
    assert scale_and_tracker(scaler) == (2.0, 1)
    with pytest.raises(ArgumentError, match="must be a number"):
        wrapped(sgd(parameter())).loss_scale_state.load_state_dict({"loss_scale": 10**400})


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
    "no scaler": ({"loss_scaler": 5}, StateDictError, "not the state of a gradient scaler"),
    "several": (APEX, StateDictError, r"2 loss scalers.*state\['loss_scaler0'\]"),
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
@pytest.mark.parametrize("by", ["new scaler", "scaler", "wrapper"])
def test_a_scale_outside_of_the_range_is_brought_into_it(scale, becomes, by):
    rule = lossscale.DynamicScale(8.0, min_scale=2.0, max_scale=1024.0)
    loads = (
        wrapped(sgd(parameter()), rule=rule) if by == "wrapper" else GradScaler("cpu", rule=rule)
    )
    state = {"scale": scale, "_growth_tracker": -3}
    if by == "scaler":
        loads.scale(torch.ones(()))
    if by == "wrapper":
        state = loads.state_dict()
        state["param_groups"][0].update(loss_scale=scale, loss_scale_good_steps=-3)
    with pytest.warns(LossScaleWarning, match="outside the range.*continues with"):
        loads.load_state_dict(state)
    multiply = loads.scale_loss if by == "wrapper" else loads.scale
    assert multiply(torch.ones(())) == becomes
    assert (loads.dynamic_counter if by == "wrapper" else loads._get_growth_tracker()) == 0


def test_the_number_of_a_fixed_scale_stands_and_a_tracker_is_brought_before_the_interval():
    fixed = GradScaler("cpu", rule=FixedScale(128.0))
    fixed.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert (fixed.get_scale(), fixed.rule) == (128.0, FixedScale(128.0))
    scaler = GradScaler("cpu", growth_interval=5)
    scaler.load_state_dict({"scale": 8.0, "_growth_tracker": 100})
    assert scale_and_tracker(scaler) == (8.0, 4)
