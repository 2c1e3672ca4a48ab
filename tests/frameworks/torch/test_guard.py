"""Schedules of the learning rate, guarded and not."""

import copy
import pickle
from typing import Protocol, runtime_checkable

import pytest
import torch

import lossscale
from frameworks.torch.support import (
    ONES,
    OURS,
    SHAPES,
    made,
    one_step,
    parameters,
    step,
    watched,
    with_scaler,
    wrapped,
)

lr_scheduler = torch.optim.lr_scheduler
SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=10, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}
GOOD, BAD = ONES, [gradient * torch.inf for gradient in ONES]


def halving(optimizer):
    """A guarded schedule that halves the rate, which begins with 0.5, at each step."""
    return lossscale.torch.guard(lr_scheduler.StepLR(optimizer, 1, 0.5), optimizer)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_a_guarded_schedule_is_that_of_the_applied_steps(name):
    def rates(optimizer, given, scheduler, steps):
        metrics = (1.0,) if name == "ReduceLROnPlateau" else ()
        for gradients in steps:
            step(optimizer, given, gradients)
            scheduler.step(*metrics)
            if gradients is GOOD:
                yield optimizer.param_groups[0]["lr"]

    given, optimizer = made()
    scheduler = SCHEDULERS[name](optimizer)
    scheduler = lossscale.torch.guard(scheduler, optimizer)
    plain = parameters(*SHAPES)
    bare = torch.optim.SGD(plain, lr=0.5)
    other = SCHEDULERS[name](bare)
    found = list(rates(optimizer, given, scheduler, (BAD, GOOD, GOOD, BAD, GOOD)))
    assert found == list(rates(bare, plain, other, [GOOD] * 3))
    assert isinstance(scheduler, type(other))
    assert scheduler.state_dict().keys() == other.state_dict().keys()
    other.load_state_dict(scheduler.state_dict())


@pytest.mark.parametrize(
    ("times", "epochs"),
    [
        pytest.param(
            1, (((GOOD, BAD), 0.25), ((BAD, BAD), 0.25), ((BAD, GOOD), 0.125)), id="each epoch"
        ),
        # As Accelerate does with two processes.
        pytest.param(2, (((BAD,), 0.5), ((GOOD,), 0.125), ((BAD,), 0.125)), id="each process"),
    ],
)
def test_a_schedule_is_held_back_by_what_has_skipped_all_since_it_was_stepped(times, epochs):
    given, optimizer = made()
    scheduler = halving(optimizer)
    for steps, rate in epochs:
        for gradients in steps:
            step(optimizer, given, gradients)
        for _ in range(times):
            scheduler.step()
        assert scheduler.get_last_lr() == [rate]


def test_a_schedule_goes_on_after_a_load():
    """Of the steps before the load none counts for what comes after it."""
    given, optimizer = made()
    for gradients in (GOOD, BAD):
        step(optimizer, given, gradients)
    given, other = made()
    scheduler = halving(other)
    other.load_state_dict(optimizer.state_dict())
    for gradients, rate in ((BAD, 0.5), (GOOD, 0.25)):
        step(other, given, gradients)
        scheduler.step()
        assert scheduler.get_last_lr() == [rate]


def test_without_a_guard_there_is_no_false_warning_on_a_first_step_that_is_skipped():
    given, optimizer = made()
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(optimizer, given, BAD)
    scheduler.step()
    assert optimizer.last_step_skipped
    assert scheduler.get_last_lr() == [0.25]


# PyTorch's own optimizers lose in a copy what a scheduler counts their steps with, too.
@pytest.mark.filterwarnings("ignore:Seems like .optimizer.step..:UserWarning")
@pytest.mark.parametrize("how", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("by", OURS)
@pytest.mark.parametrize("before", [1, 3])
def test_a_copy_follows_what_is_copied_with_it(before, how, by):
    given = parameters(*SHAPES)
    run = OURS[by](torch.optim.SGD(given, lr=0.5))
    stepped = getattr(run, "optimizer", run)
    scheduler = lossscale.torch.guard(lr_scheduler.StepLR(stepped, 1, 0.5), watched(run))
    for _ in range(before):
        step(run, given, GOOD)
        scheduler.step()
    for each, weights, copied in (how((run, given, scheduler)), (run, given, scheduler)):
        for gradients, rate in ((BAD, 0.5 ** (before + 1)), (GOOD, 0.5 ** (before + 2))):
            step(each, weights, gradients)
            copied.step()
            assert copied.get_last_lr() == [rate]


def test_with_a_scaler_the_steps_of_the_own_optimizer_count():
    weights, optimizer, scaler = with_scaler(init_scale=8.0)
    other = torch.optim.SGD(parameters((3,)), lr=0.5)
    schedulers = [
        lossscale.torch.guard(lr_scheduler.ExponentialLR(each, 0.5), scaler)
        for each in (optimizer, other)
    ]
    for slope in (torch.inf, 1.0):
        other.zero_grad()
        scaler.scale(other.param_groups[0]["params"][0].sum()).backward()
        scaler.step(other)
        one_step(scaler, optimizer, weights, slope)
        for scheduler in schedulers:
            scheduler.step()
    assert [scheduler.get_last_lr() for scheduler in schedulers] == [[0.25], [0.125]]


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self): ...


class Container(Stateful):
    """The shape of torchtitan's: a Protocol among its bases, and several schedulers inside."""

    def __init__(self, optimizers):
        self.schedulers = [lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]

    def step(self):
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self):
        return self.schedulers[0].state_dict()


def test_a_container_of_schedulers():
    given = parameters(*SHAPES)
    optimizer = wrapped([torch.optim.SGD([p], lr=0.5) for p in given])
    container = lossscale.torch.guard(Container(optimizer), optimizer)
    assert isinstance(container, Stateful)
    for gradients in (BAD, GOOD):
        step(optimizer, given, gradients)
        container.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert container.state_dict()["last_epoch"] == 1


def test_mistakes():
    optimizer = wrapped(torch.optim.SGD(parameters((3,)), lr=0.5))
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    for given, words in (
        ((optimizer, scheduler), "LossScaleOptimizer whose steps count"),
        ((scheduler, optimizer.inner_optimizer), "LossScaleOptimizer whose steps count"),
        ((optimizer, optimizer), "must be a scheduler"),
        ((None, optimizer), "must be a scheduler"),
        ((lr_scheduler.StepLR, optimizer), "must be a scheduler"),
    ):
        with pytest.raises(TypeError, match=words):
            lossscale.torch.guard(*given)
    scheduler = lossscale.torch.guard(scheduler, optimizer)
    with pytest.raises(TypeError, match="already guarded"):
        lossscale.torch.guard(scheduler, optimizer)
