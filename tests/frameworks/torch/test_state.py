"""State dictionaries: into and out of the plain optimizer, damaged, flattened, with a scheduler."""

import copy
import warnings

import pytest
import torch

from frameworks.torch.support import (
    ONES,
    SHAPES,
    bits,
    parameters,
    snapshot,
    step,
    through_a_file,
    train_step,
    wrapped,
)
from lossscale import DynamicScale, FixedScale, LossScaleWarning
from lossscale.errors import ArgumentError

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
    # They stand in the groups too, for those who flatten dictionaries by them, or log them.
    assert {key: optimizer.param_groups[0][key].item() for key in KEYS} == numbers
    for other in ("host", "device"):
        _, loaded = trained(other, steps=())
        loaded.load_state_dict(state_dict=through_a_file(saved))
        assert bits(loaded.state_dict()) == bits(saved)
        assert {key: loaded.param_groups[0][key].item() for key in KEYS} == numbers


def test_a_number_that_is_written_into_the_live_group_is_heard():
    given, optimizer = trained(steps=())
    [group] = optimizer.param_groups
    # Code that logs them formats them.
    assert [f"{float(group[key]):g}" for key in KEYS] == ["32768", "0", "0", "0"]
    group["loss_scale"] = 8.0
    assert optimizer.scale_loss(torch.ones(())) == 8.0
    step(optimizer, given, ONES)
    assert (float(optimizer.loss_scale), optimizer.dynamic_counter) == (8.0, 1)
    assert float(group["loss_scale_iterations"]) == 1
    group["loss_scale"] = "high"
    with pytest.raises(ArgumentError, match="`loss_scale` in the state must be a number"):
        optimizer.backward(given[0].sum())


def test_a_plain_optimizer_loads_it_and_it_loads_a_plain_one():
    _, optimizer = trained()
    plain = torch.optim.Adam(parameters(*SHAPES), fused=True)
    plain.load_state_dict(optimizer.state_dict())
    assert bits(plain.state_dict()["state"]) == bits(optimizer.state_dict()["state"])
    _, other = trained(steps=(False,))
    other.load_state_dict(plain.state_dict())
    assert float(other.loss_scale) == 2.0**14
    del plain.param_groups[0]["loss_scale"]
    bare = torch.optim.Adam(parameters(*SHAPES), fused=True)
    _, kept = trained(steps=(False, False))
    kept.load_state_dict(bare.state_dict())
    assert float(kept.loss_scale) == 2.0**13


def test_what_does_not_fit_changes_nothing():
    _, optimizer = trained()
    before = bits(optimizer.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    for change, words in (
        ({"loss_scale": "high"}, "must be a number"),
        ({"loss_scale_good_steps": float("nan")}, "must be finite"),
        ({"params": [0]}, "parameter group"),
    ):
        wrong = {**saved, "param_groups": [{**saved["param_groups"][0], **change}]}
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(wrong)
        assert bits(optimizer.state_dict()) == before


def test_a_fixed_scale_comes_from_the_code():
    _, optimizer = trained(rule=FixedScale(8.0))
    state = optimizer.state_dict()
    state["param_groups"][0]["loss_scale"] = 64.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(state)
    assert float(optimizer.loss_scale) == 8.0


def test_a_shorter_interval_takes_effect_on_resume():
    # torch.amp.GradScaler compares for equality, and would never grow again.
    _, optimizer = trained(steps=[True] * 5, rule=DynamicScale(8.0, growth_interval=10))
    given, other = trained(steps=(), rule=DynamicScale(8.0, growth_interval=3))
    other.load_state_dict(optimizer.state_dict())
    step(other, given, ONES)
    assert float(other.loss_scale) == 16.0


def test_the_state_of_the_loss_scale_by_itself():
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


def test_the_state_dictionary_functions_of_distributed_checkpoint():
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = wrapped(torch.optim.AdamW(model.parameters()), initial_scale=8)
    for factor in (torch.inf, 1.0):
        train_step(optimizer, model(torch.ones(1, 3)).sum() * factor)
    optimizer.zero_grad()
    parameters_before = bits(list(model.parameters()))
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        other_model = copy.deepcopy(model)
        other = wrapped(torch.optim.AdamW(other_model.parameters()), initial_scale=8)
        before = other.loss_scale_state.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error", LossScaleWarning)
            # It makes a step of its own if there is no state yet, which moves nothing of ours.
            get_optimizer_state_dict(other_model, other, options=options)
            assert other.loss_scale_state.state_dict() == before
            set_optimizer_state_dict(other_model, other, saved, options=options)
        if flatten:
            other.loss_scale_state.load_state_dict(optimizer.loss_scale_state.state_dict())
        assert snapshot(other_model.parameters(), other) == snapshot(model.parameters(), optimizer)
        assert float(other.loss_scale) == 4.0
        assert (other.steps_skipped, other.iterations) == (1, 2)
    assert bits(list(model.parameters())) == parameters_before
