"""State dictionaries: into and out of the plain optimizer and other scalers, damaged, flattened."""

import copy
import itertools
import json
import warnings

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lossscale
from frameworks.torch.support import (
    MAKERS,
    ONES,
    SHAPES,
    bits,
    derive,
    one_step,
    parameter,
    parameters,
    scale_and_tracker,
    sgd,
    snapshot,
    step,
    through_a_file,
    with_scaler,
    wrapped,
)
from lossscale import DynamicScale, FixedScale, LossScaleWarning
from lossscale.errors import ArgumentError, CallOrderError, StateDictError
from lossscale.torch.grad_scaler import GradScaler

PLAIN = torch.optim.Adam([torch.ones(1)]).param_groups[0]
KEYS = ("loss_scale", "loss_scale_good_steps", "loss_scale_iterations", "loss_scale_steps_skipped")


def trained(decide="host", steps=(True, False, True, True), **settings):
    given = parameters(*SHAPES)
    inner = torch.optim.Adam(given, fused=True)
    optimizer = wrapped(inner, decide=decide, **settings)
    for finite in steps:
        step(optimizer, given, ONES if finite else [g * torch.nan for g in ONES])
    return given, optimizer


@pytest.mark.parametrize("decide", ["host", "device"])
def test_the_numbers_are_in_the_first_group_and_are_plain(decide):
    _, optimizer = trained(decide)
    saved = optimizer.state_dict()
    numbers = {key: saved["param_groups"][0][key] for key in KEYS}
    assert numbers == dict(zip(KEYS, (2.0**14, 2, 4, 1), strict=True))
    assert [type(value) for value in numbers.values()] == [float, int, int, int]
    # The live groups never have them.
    assert set(optimizer.param_groups[0]) == set(PLAIN)
    for other in ("host", "device"):
        _, loaded = trained(other, steps=())
        loaded.load_state_dict(state_dict=through_a_file(saved))
        assert bits(loaded.state_dict()) == bits(saved)
        assert set(loaded.param_groups[0]) == set(PLAIN)


VERBS_AFTER = {
    "backward": lambda o, loss: o.backward(loss),
    "scale_loss": lambda o, loss: o.scale_loss(loss),
    "step": lambda o, loss: o.step(),
    "unscale_": lambda o, loss: o.unscale_(),
    "state_dict": lambda o, loss: o.state_dict(),
    "loss_scale_state": lambda o, loss: o.loss_scale_state,
    "copy": lambda o, loss: copy.deepcopy(o),
}


@pytest.mark.parametrize("verb", VERBS_AFTER)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("decide", ["host", "device"])
def test_what_the_inner_optimizer_loads_is_taken_over_at_the_next_verb(verb, parts, decide):
    def new():
        given = parameters(*SHAPES)
        inner = [torch.optim.Adam(some, fused=True) for some in (given[:1], given[1:])]
        inner = inner if parts == 2 else torch.optim.Adam(given, fused=True)
        return given, wrapped(inner, decide=decide)

    given, optimizer = new()
    step(optimizer, given, [g * torch.nan for g in ONES])
    step(optimizer, given, ONES)
    saved = through_a_file(optimizer.state_dict())
    given, loaded = new()
    loaded.inner_optimizer.load_state_dict(saved)
    VERBS_AFTER[verb](loaded, sum(p.sum() for p in given))
    assert float(loaded.loss_scale) == 2.0**14
    assert (int(loaded.steps_skipped), int(loaded.iterations)) == (1, 2)
    assert all(set(group) == set(PLAIN) for group in loaded.param_groups)
    # Within a step it is an error, and the scale that multiplied the gradients stays.
    loaded.backward(sum(p.sum() for p in given))
    loaded.inner_optimizer.load_state_dict({**saved})
    with pytest.raises(CallOrderError, match=r"load_state_dict\(\) of the LossScaleOptimizer"):
        loaded.step()
    loaded.load_state_dict(saved)
    assert all(set(group) == set(PLAIN) for group in loaded.param_groups)


@pytest.mark.parametrize("order", list(itertools.permutations(["wrap", "load", "assign"])))
def test_an_optimizer_that_loads_a_state_saved_within_a_step_itself(order):
    given = parameters(*SHAPES)
    optimizer = wrapped(torch.optim.SGD(given, lr=0.5), initial_scale=8.0)
    optimizer.scale_loss(sum(p.sum() for p in given)).backward()
    saved, kept = copy.deepcopy((optimizer.state_dict(), [p.grad for p in given]))
    given = parameters(*SHAPES)
    before = [p.detach().clone() for p in given]
    inner = resumed = torch.optim.SGD(given, lr=0.5)
    for each in order:
        if each == "wrap":
            resumed = wrapped(inner)
        elif each == "load":
            inner.load_state_dict(saved)
        else:
            for p, gradient in zip(given, kept, strict=True):
                p.grad = gradient
    resumed.step()
    assert bits(given) == bits([p - 0.5 for p in before])
    assert float(resumed.loss_scale) == 8.0


BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def small():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, wrapped(torch.optim.Adam(model.parameters(), lr=0.1), initial_scale=1024.0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("recipe", [False, True])
@pytest.mark.parametrize("form", ["nested", "flat", "verb", "scale_loss", "unscaled"])
def test_torch_distributed_checkpoint_saves_the_scale(form, recipe, tmp_path):
    """In a nested dictionary with the optimizer; beside a flat one as the pages say.

    Between a loss and its step, by three ways, the gradients are saved beside a nested one.
    """
    flat, within = form == "flat", form not in ("nested", "flat")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state_of(model, optimizer, gradients):
        found = {"m": model.state_dict(), "g": gradients}
        found["o"] = get_optimizer_state_dict(model, optimizer, options=options)
        return found | ({"loss_scale": optimizer.loss_scale_state} if recipe else {})

    model, optimizer = small()
    for factor in (torch.inf, 1.0, 1.0):
        optimizer.zero_grad()
        optimizer.backward(model(BATCH).square().mean() * factor)
        optimizer.step()
    optimizer.zero_grad()
    if within:
        derive(optimizer, model(BATCH).square().mean(), form)
    gradients = [p.grad for p in model.parameters() if within]
    dcp.save(state_of(model, optimizer, gradients), checkpoint_id=tmp_path, no_dist=True)
    other, resumed = small()
    # A step that only makes the optimizer's state moves nothing of ours.
    state = state_of(other, resumed, list(map(torch.zeros_like, gradients)))
    assert (resumed.iterations, float(resumed.loss_scale)) == (0, 1024.0)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["m"])
    set_optimizer_state_dict(other, resumed, state["o"], options=options)
    assert bits(resumed.state_dict()["state"]) == bits(optimizer.state_dict()["state"])
    is_saved = recipe or not flat
    assert float(resumed.loss_scale) == (512.0 if is_saved else 1024.0)
    assert (resumed.iterations, resumed.steps_skipped) == ((3, 1) if is_saved else (0, 0))
    if within:
        for parameter, gradient in zip(other.parameters(), state["g"], strict=True):
            parameter.grad = gradient
        for each in (optimizer, resumed):
            each.step()
        assert bits(list(other.parameters())) == bits(list(model.parameters()))


def test_a_plain_optimizer_loads_it_and_from_that_of_a_plain_one_the_scale_stays():
    _, optimizer = trained()
    plain = torch.optim.Adam(parameters(*SHAPES), fused=True)
    _, other = trained(steps=(False, False))
    other.load_state_dict(plain.state_dict())
    assert float(other.loss_scale) == 2.0**13
    plain.load_state_dict(optimizer.state_dict())
    assert bits(plain.state_dict()["state"]) == bits(optimizer.state_dict()["state"])
    other.load_state_dict(plain.state_dict())
    assert float(other.loss_scale) == 2.0**14


def test_the_state_of_the_loss_scale_by_itself_and_a_fixed_scale_that_comes_from_the_code():
    _, optimizer = trained()
    saved = optimizer.loss_scale_state.state_dict()
    assert saved == dict(zip(KEYS, (2.0**14, 2, 4, 1), strict=True))
    _, other = trained(steps=())
    other.loss_scale_state.load_state_dict(saved)
    assert other.loss_scale_state.state_dict() == saved
    # Assigning to iterations changes nothing else.
    other.iterations = 40
    assert other.iterations == 40
    assert other.loss_scale_state.state_dict() == {**saved, "loss_scale_iterations": 40}
    _, fixed = trained(steps=(), rule=FixedScale(8.0))
    with warnings.catch_warnings(action="error"):
        fixed.load_state_dict(optimizer.state_dict())
    assert (float(fixed.loss_scale), fixed.iterations) == (8.0, 4)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_state_with_gradients_of_another_scale_is_refused_before_anything_changes(order):
    given, optimizer = trained(steps=(True,), rule=DynamicScale(8.0, growth_interval=1))
    optimizer.zero_grad()
    optimizer.scale_loss(sum(p.sum() for p in given)).backward()
    saved, kept = copy.deepcopy(optimizer.state_dict()), [p.grad.clone() for p in given]
    optimizer.step()
    optimizer.zero_grad()
    optimizer.scale_loss(sum(p.sum() for p in given)).backward()
    before = snapshot(given, optimizer), bits(optimizer.state_dict())
    with pytest.raises(CallOrderError, match=r"zero_grad\(\) before load_state_dict"):
        optimizer.load_state_dict(saved)
    assert (snapshot(given, optimizer), bits(optimizer.state_dict())) == before
    optimizer.zero_grad()
    for load in (False, True) if order == "before" else (True, False):
        if load:
            optimizer.load_state_dict(saved)
            continue
        for p, gradient in zip(given, kept, strict=True):
            p.grad = gradient
    optimizer.unscale_()
    assert [p.grad.tolist() for p in given] == [torch.ones(shape).tolist() for shape in SHAPES]


def test_a_state_says_what_multiplies_the_gradients_and_changes_none():
    given = parameters(*SHAPES)
    first, second = (wrapped(torch.optim.SGD(given, lr=0.5), initial_scale=s) for s in (8.0, 4.0))
    third = wrapped(torch.optim.SGD([given[1]], lr=0.5), initial_scale=2.0)

    def saved():
        before = bits([p.grad for p in given])
        states = [each.state_dict()["param_groups"][0] for each in (first, second, third)]
        assert bits([p.grad for p in given]) == before
        return [state["loss_scale_of_gradients"] for state in states]

    assert saved() == [0.0, 0.0, 0.0]
    first.scale_loss(given[0].sum()).backward()
    # The third has no gradient yet.
    assert saved() == [8.0, 8.0, 0.0]
    second.scale_loss(given[1].sum()).backward()
    assert saved() == [4.0, 4.0, 4.0]
    first.backward(given[0].sum())
    assert saved() == [1.0, 1.0, 1.0]
    third.scale_loss(given[1].sum()).backward()
    assert saved() == [2.0, 2.0, 2.0]
    first.step()
    assert saved() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("key", ["loss_scale", "loss_scale_iterations"])
def test_a_key_of_the_users_own_that_is_named_as_ours_is_an_error_that_names_it(key, group):
    groups = [{"params": [torch.ones(1, requires_grad=True)]} for _ in range(2)]
    groups[group][key] = 2.0
    inner = torch.optim.SGD(groups)
    with pytest.raises(ValueError, match=rf"keys \['{key}'\]"):
        lossscale.LossScaleOptimizer(inner)
    assert inner.param_groups[group][key] == 2.0


# Those of scalers go both ways between the drop-in and the scalers of others.

SCALER_SETTINGS = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
SCALER_KEYS = {"scale", "_growth_tracker", *SCALER_SETTINGS}


def used(make):
    weights, optimizer, scaler = with_scaler("sgd", make, init_scale=64.0, **SCALER_SETTINGS)
    for slope in (torch.inf, 0.0, 0.0):
        one_step(scaler, optimizer, weights, slope)
    return scaler, weights, optimizer


@pytest.mark.parametrize("saves", MAKERS)
@pytest.mark.parametrize("loads", MAKERS)
@pytest.mark.parametrize("before_first_use", [True, False])
def test_both_ways(saves, loads, before_first_use):
    scaler, weights, optimizer = used(MAKERS[saves])
    state = through_a_file(scaler.state_dict())
    assert set(state) - {"steps_skipped"} == SCALER_KEYS
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


OF_PYTORCH = {
    "scale": 512.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}


@pytest.mark.parametrize("decide", ["host", "device"])
def test_the_state_of_pytorchs_scaler_goes_into_the_wrapper_and_back(decide):
    scaler = GradScaler("cpu", init_scale=8.0)
    # Both ignore keys that others have added, such as the state of another rule.
    scaler.load_state_dict(OF_PYTORCH | {"rule_state": {"scale": 4.0, "overflows": 1}})
    assert scale_and_tracker(scaler) == (512.0, 7)
    inner = torch.optim.SGD([parameter()], lr=1.0, fused=True)
    optimizer = wrapped(inner, decide=decide)
    optimizer.loss_scale_state.load_state_dict(OF_PYTORCH)
    assert (float(optimizer.loss_scale), optimizer.dynamic_counter) == (512.0, 7)
    # And back: the wrapper's, as PyTorch's scaler and the drop-in read it.
    for make in (torch.amp.GradScaler, GradScaler):
        theirs = make("cpu")
        saved = optimizer.loss_scale_state.scaler_state_dict()
        theirs.load_state_dict(json.loads(json.dumps(saved)))
        theirs.scale(torch.ones(()))
        assert scale_and_tracker(theirs) == (512.0, 7)
    words = r"growth_interval=500.*rule=lossscale.DynamicScale"
    with pytest.warns(LossScaleWarning, match=words) as warned:
        optimizer.loss_scale_state.load_state_dict(OF_PYTORCH | {"growth_interval": 500})
    assert warned[0].filename == __file__
    assert float(optimizer.loss_scale) == 512.0
    with pytest.raises(ArgumentError, match="must be a number"):
        optimizer.loss_scale_state.load_state_dict({"loss_scale": 10**400})


# Those of others are refused; from_gradscaler.md has what to load instead.

OF_OTHERS = {
    "Apex": ({"loss_scale": 512.0, "unskipped": 7}, "'loss_scale', 'unskipped'"),
    "Megatron": ({"scale": torch.ones(1), "growth_tracker": 7}, "'scale', 'growth_tracker'"),
    "DeepSpeed": ({"cur_scale": 512.0, "cur_iter": 20}, "'cur_scale', 'cur_iter'"),
    "DeepSpeed, an object": ({"loss_scaler": object()}, "'loss_scaler'"),
}


@pytest.mark.parametrize("case", OF_OTHERS)
def test_a_state_of_another_scaler_is_refused_by_its_keys_and_changes_nothing(case):
    state, keys = OF_OTHERS[case]
    scaler, optimizer = GradScaler("cpu"), wrapped(sgd(parameter()))
    for each in (scaler, optimizer.loss_scale_state):
        before = each.state_dict()
        with pytest.raises(StateDictError, match=f"the keys .*{keys}.*_growth_tracker.: its"):
            each.load_state_dict(state)
        assert each.state_dict() == before


@pytest.mark.parametrize("key", sorted(SCALER_KEYS))
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


def changed(**change):
    """The wrapper's state, with something else in its first group."""

    def made(optimizer):
        saved = copy.deepcopy(optimizer.state_dict())
        return {**saved, "param_groups": [{**saved["param_groups"][0], **change}]}

    return made


NO_SCALER, NO_NUMBER = "not the state of torch.amp.GradScaler", "must be a number"
BAD = {
    "empty": ({}, StateDictError, "empty"),
    "none": (None, StateDictError, "dictionary"),
    "another kind": ({"state": {}, "param_groups": []}, StateDictError, "'state', 'param_groups'"),
    "the wrapper's": ({"loss_scale": 5.0}, StateDictError, NO_SCALER),
    "no number": ({"scale": "high"}, StateDictError, "'scale'.*'high'"),
    "growth": ({"scale": 2.0, "growth_factor": 0.5}, ArgumentError, "growth_factor"),
    "interval": ({"scale": 2.0, "growth_interval": 0}, ArgumentError, "growth_interval"),
    "wrapper, no number": (changed(loss_scale="high"), ArgumentError, NO_NUMBER),
    "wrapper, NaN": (changed(loss_scale_good_steps=float("nan")), ArgumentError, "must be finite"),
    "wrapper, groups": (changed(params=[0]), ValueError, "parameter group"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_state_that_cannot_be_loaded_changes_nothing(case):
    state, error, message = BAD[case]
    if callable(state):
        _, loads = trained()
        state = state(loads)
    else:
        loads, _, _ = used(GradScaler)
    before = bits(loads.state_dict())
    with pytest.raises(error, match=message) as caught:
        loads.load_state_dict(state)
    assert bits(loads.state_dict()) == before
    # As PyTorch's class does it.
    assert isinstance(caught.value, RuntimeError) or case != "empty"


@pytest.mark.parametrize(
    ("scale", "becomes"),
    [(0.0, 8.0), (float("nan"), 8.0), (float("inf"), 8.0), (-1.0, 8.0), (0.5, 2.0), (1e9, 1024.0)],
)
@pytest.mark.parametrize("by", ["new scaler", "scaler", "wrapper"])
def test_a_scale_outside_of_the_range_is_brought_into_it(scale, becomes, by):
    rule = lossscale.DynamicScale(8.0, min_scale=2.0, max_scale=1024.0)
    loads = wrapped(sgd(parameter()), rule=rule)
    if by != "wrapper":
        loads = GradScaler("cpu", 8.0, min_scale=2.0, max_scale=1024.0)
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
