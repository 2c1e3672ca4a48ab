"""State dictionaries: into and out of the plain optimizer and other scalers, damaged, flattened."""

import copy
import json
import pickle
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
    step,
    through_a_file,
    with_scaler,
    wrapped,
)
from lossscale import FixedScale, LossScaleWarning
from lossscale.errors import ArgumentError, CallOrderError, StateDictError
from lossscale.torch import MasterWeights
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


class Hookless(torch.optim.Adam):
    """Calls no hooks when it loads, as optimizers do that write their own method."""

    def load_state_dict(self, state_dict):
        self.param_groups[0].update({**state_dict["param_groups"][0], **self.param_groups[0]})


LOADING = {
    "SGD": lambda given: sgd(*given, momentum=0.5, fused=True),
    "list": lambda given: [torch.optim.Adam([p], fused=True) for p in given],
    "masters": lambda given: MasterWeights(torch.optim.AdamW(given, fused=True)),
    "no hooks": lambda given: Hookless(given, fused=True),
}


@pytest.mark.parametrize("kind", LOADING)
@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("decide", ["host", "device"])
def test_a_loss_scale_that_the_inner_optimizer_itself_loads_is_taken_over(kind, is_copied, decide):
    def new():
        given = parameters(*SHAPES)
        return given, wrapped(LOADING[kind](given), decide=decide)

    given, optimizer = new()
    step(optimizer, given, [g * torch.nan for g in ONES])
    step(optimizer, given, ONES)
    saved = through_a_file(optimizer.state_dict())
    given, loaded = new()
    loaded = copy.deepcopy(loaded) if is_copied else loaded
    given = [p for group in loaded.param_groups for p in group["params"]]
    loaded.inner_optimizer.load_state_dict(saved)
    is_taken = kind != "no hooks"
    if not is_taken:
        # The first of these calls warns, and takes the numbers out.
        with pytest.warns(LossScaleWarning, match="not loaded.*Hookless calls no hooks"):
            (loaded.step if is_copied else loaded.state_dict)()
        loaded.state_dict()
    assert float(loaded.loss_scale) == (2.0**14 if is_taken else 2.0**15)
    assert (int(loaded.steps_skipped), int(loaded.iterations)) == ((1, 2) if is_taken else (0, 0))
    assert not any(set(KEYS) & set(group) for group in loaded.param_groups)
    if not is_taken:
        return
    # Between a scaled loss and its step it is refused, and changes nothing.
    for way in ("verb", "scale_loss"):
        derive(loaded, sum(p.sum() for p in given), way)
        before = bits([loaded.inner_optimizer.state_dict(), [p.grad for p in given]])
        with pytest.raises(CallOrderError, match=r"load_state_dict\(\) of the LossScaleOptimizer"):
            loaded.inner_optimizer.load_state_dict(saved)
        assert bits([loaded.inner_optimizer.state_dict(), [p.grad for p in given]]) == before
    loaded.load_state_dict(saved)
    assert not any(set(KEYS) & set(group) for group in loaded.param_groups)


def test_a_list_of_which_one_cannot_load_keeps_its_scale_and_counts():
    class Fails(torch.optim.SGD):
        def load_state_dict(self, state_dict):
            if state_dict["param_groups"][0]["lr"] == 0.25:
                raise ValueError("refused")
            super().load_state_dict(state_dict)

    given = parameters(*SHAPES)
    optimizer = wrapped([sgd(given[0]), Fails(given[1:], lr=0.5)])
    step(optimizer, given, ONES)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {"loss_scale": 8.0, "loss_scale_iterations": 5}
    saved["param_groups"][1]["lr"] = 0.25
    before = bits(optimizer.state_dict())
    for loads in (optimizer.inner_optimizer, optimizer):
        with pytest.raises(ValueError, match="refused"):
            loads.load_state_dict(saved)
        assert bits(optimizer.state_dict()) == before
    saved["param_groups"][1]["lr"] = 0.5
    optimizer.inner_optimizer.load_state_dict(saved)
    assert (float(optimizer.loss_scale), optimizer.iterations) == (8.0, 5)


COPIES = copy.copy, copy.deepcopy, pickle.dumps


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("way", ["verb", "scale_loss", "unscaled"])
def test_states_and_copies_are_refused_while_gradients_are_scaled(way, decide):
    given = parameters(*SHAPES)
    optimizer = wrapped(sgd(*given, lr=0.5, fused=True), decide=decide, initial_scale=8.0)
    for _ in range(2):
        derive(optimizer, sum(p.sum() for p in given), way)
        before = bits([p.grad for p in given])
        for save in (*COPIES, lambda o: o.load_state_dict(copy.deepcopy(o.state_dict()))):
            if way == "scale_loss":
                with pytest.raises(
                    CallOrderError, match=r"are not saved\. Call unscale_\(\) first"
                ):
                    save(optimizer)
            else:
                save(optimizer)
            assert bits([p.grad for p in given]) == before
        # The number of the loss scale is no gradient.
        optimizer.loss_scale_state.load_state_dict(optimizer.loss_scale_state.state_dict())
        optimizer.zero_grad()
        for save in (*COPIES, lambda o: o.state_dict()):
            save(optimizer)


@pytest.mark.parametrize("adds", ["wrapper", "inner"])
def test_a_copy_right_after_a_group_was_added_holds_no_scaled_gradients(adds):
    """The group's tensor has gradients of another wrapper's scaled loss, which is not copied."""
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    first, second = (wrapped(sgd(own), initial_scale=8.0) for own in (a, b))
    derive(first, a.sum(), "scale_loss")
    (second if adds == "wrapper" else second.inner_optimizer).add_param_group({"params": [a]})
    for given in ((first, second), first, second):
        with pytest.raises(CallOrderError, match="are not saved"):
            copy.deepcopy((given, a))
    first.step()
    assert [a.tolist(), b.tolist()] == [[0.0, 0.0], [1.0, 1.0]]


def test_gradients_of_a_resumed_accumulation_are_checked_by_the_step():
    """Nobody has scaled them then: the step warns, and the scale stays."""
    given, optimizer = trained(steps=(True,))
    optimizer.zero_grad()
    for factor in (1.0, torch.inf):
        derive(optimizer, sum(p.sum() for p in given) * factor)
        saved, kept = copy.deepcopy((optimizer.state_dict(), [p.grad for p in given]))
        _, resumed = trained(steps=())
        resumed.load_state_dict(saved)
        for p, gradient in zip(resumed.param_groups[0]["params"], kept, strict=True):
            p.grad = gradient
        with pytest.warns(LossScaleWarning, match="has scaled no loss"):
            resumed.step()
        assert (float(resumed.loss_scale), resumed.last_step_skipped) == (2.0**15, factor != 1.0)


BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def small():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, wrapped(torch.optim.Adam(model.parameters(), lr=0.1), initial_scale=1024.0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:The optimizer has scaled no loss:lossscale.LossScaleWarning")
@pytest.mark.parametrize("recipe", [False, True])
@pytest.mark.parametrize("form", ["nested", "flat", "verb", "unscaled"])
def test_torch_distributed_checkpoint_saves_the_scale(form, recipe, tmp_path):
    """In a nested dictionary with the optimizer; beside a flat one as the pages say.

    Between a loss and its step, by two ways, the unscaled gradients are saved beside a nested one.
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


# Those of other scalers; from_gradscaler.md has what to load instead.
OF_OTHERS = {
    "Apex": ({"loss_scale": 512.0, "unskipped": 7}, "'loss_scale', 'unskipped'"),
    "Megatron": ({"scale": torch.ones(1), "growth_tracker": 7}, "'scale', 'growth_tracker'"),
    "DeepSpeed": ({"cur_scale": 512.0, "cur_iter": 20}, "'cur_scale', 'cur_iter'"),
    "DeepSpeed, an object": ({"loss_scaler": object()}, "'loss_scaler'"),
}
NO_SCALER, NO_NUMBER = "not the state of torch.amp.GradScaler", "must be a number"
BAD = {
    "empty": ({}, StateDictError, "empty"),
    "none": (None, StateDictError, "dictionary"),
    "another kind": ({"state": {}, "param_groups": []}, StateDictError, "'state', 'param_groups'"),
    "the wrapper's": ({"loss_scale": 5.0}, StateDictError, NO_SCALER),
    "no number": ({"scale": "high"}, ArgumentError, "`scale`.*'high'"),
    "growth": ({"scale": 2.0, "growth_factor": 0.5}, ArgumentError, "growth_factor"),
    "interval": ({"scale": 2.0, "growth_interval": 0}, ArgumentError, "growth_interval"),
    "wrapper, no number": (changed(loss_scale="high"), ArgumentError, NO_NUMBER),
    "wrapper, NaN": (changed(loss_scale_good_steps=float("nan")), ArgumentError, "must be finite"),
    "wrapper, groups": (changed(params=[0]), ValueError, "parameter group"),
    **{
        name: (state, StateDictError, f"the keys .*{keys}.*_growth_tracker.: its")
        for name, (state, keys) in OF_OTHERS.items()
    },
}


@pytest.mark.parametrize(
    ("case", "by"), [(case, "scaler") for case in BAD] + [(case, "wrapper") for case in OF_OTHERS]
)
def test_a_state_that_cannot_be_loaded_changes_nothing(case, by):
    state, error, message = BAD[case]
    if callable(state):
        _, loads = trained()
        state = state(loads)
    else:
        loads = used(GradScaler)[0] if by == "scaler" else trained()[1].loss_scale_state
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
