"""State dictionaries: into and out of the plain optimizer, damaged, flattened, with a scheduler."""

import copy
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
from lossscale.errors import ArgumentError, CallOrderError

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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed.load_state_dict(optimizer.state_dict())
    assert (float(fixed.loss_scale), fixed.iterations) == (8.0, 4)


def test_the_state_dictionary_functions_of_distributed_checkpoint():
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


# States that are saved between `backward` and `step`, with the gradients.

BATCHES = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
VERBS = {
    "verb": lambda o, loss: o.backward(loss),
    "scale_loss": lambda o, loss: o.scale_loss(loss).backward(),
    "unscaled": lambda o, loss: (o.scale_loss(loss).backward(), o.unscale_()),
}


def small():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, wrapped(torch.optim.Adam(model.parameters(), lr=0.1), initial_scale=1024.0)


def by_pickle(model, optimizer, folder):
    grads = [p.grad for p in model.parameters()]
    return through_a_file((model, optimizer, grads), weights_only=False)


def by_files(model, optimizer, folder):
    saved = [model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]]
    of_model, of_optimizer, grads = through_a_file(saved)
    model, optimizer = small()
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    return model, optimizer, grads


def by_distributed_checkpoint(model, optimizer, folder):
    def state(grads):
        found = {"m": model.state_dict(), "o": get_optimizer_state_dict(model, optimizer)}
        return found | {"g": grads}

    dcp.save(state([p.grad for p in model.parameters()]), checkpoint_id=folder, no_dist=True)
    model, optimizer = small()
    loaded = state([torch.zeros_like(p) for p in model.parameters()])
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(loaded["m"])
    set_optimizer_state_dict(model, optimizer, loaded["o"])
    return model, optimizer, loaded["g"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("verbs", [(a, b) for a in VERBS for b in VERBS], ids="-".join)
@pytest.mark.parametrize("resumed", [by_pickle, by_files, by_distributed_checkpoint])
def test_a_run_that_is_saved_within_a_step_goes_on_as_it_would_have(resumed, verbs, tmp_path):
    def run(resumes):
        model, optimizer = small()
        for number, batch in enumerate(BATCHES):
            if number == 3 and resumes:
                model, optimizer, gradients = resumed(model, optimizer, tmp_path)
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
            VERBS[verbs[number % 2]](optimizer, model(batch).square().mean())
            if number in (1, 4):
                optimizer.step()
                optimizer.zero_grad()
        return bits(list(model.parameters())), optimizer.iterations

    with warnings.catch_warnings():
        warnings.simplefilter("error", LossScaleWarning)
        assert run(True) == run(False)


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


def test_gradients_that_are_multiplied_by_two_scales_are_not_saved():
    given = parameters(*SHAPES)
    first, second = (wrapped(torch.optim.SGD(given, lr=0.5), initial_scale=s) for s in (8.0, 4.0))
    first.scale_loss(given[0].sum()).backward()
    second.scale_loss(given[1].sum()).backward()
    assert second.state_dict()["param_groups"][0]["loss_scale_of_gradients"] == 4.0
    first.backward(given[0].sum())
    third = wrapped(torch.optim.SGD([given[1]], lr=0.5), initial_scale=2.0)
    third.scale_loss(given[1].sum()).backward()
    with pytest.raises(CallOrderError, match="which a state cannot say"):
        first.state_dict()
    first.unscale_()
    assert first.state_dict()["param_groups"][0]["loss_scale_of_gradients"] == 1.0


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("key", ["loss_scale", "loss_scale_iterations"])
def test_a_key_of_the_users_own_that_is_named_as_ours_is_an_error_that_names_it(key, group):
    groups = [{"params": [torch.ones(1, requires_grad=True)]} for _ in range(2)]
    groups[group][key] = 2.0
    inner = torch.optim.SGD(groups)
    with pytest.raises(ValueError, match=rf"keys \['{key}'\]"):
        lossscale.LossScaleOptimizer(inner)
    assert inner.param_groups[group][key] == 2.0
