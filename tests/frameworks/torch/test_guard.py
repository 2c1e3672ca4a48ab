"""Schedules of the learning rate, guarded and not."""

import copy

import pytest
import torch

import lossscale
from frameworks.torch.support import backward, parameters, wrapped

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
FINITE = (False, True, True, False, True)


def rates(name, wrap, finite):
    given = parameters((3,))
    optimizer = torch.optim.SGD(given, lr=0.5)
    optimizer = wrapped(optimizer) if wrap else optimizer
    scheduler = SCHEDULERS[name](optimizer)
    if wrap:
        assert lossscale.torch.guard(scheduler, optimizer) is scheduler
    metrics = (1.0,) if name == "ReduceLROnPlateau" else ()
    found = []
    for is_finite in finite:
        optimizer.zero_grad()
        backward(optimizer, given, [torch.ones(3)], 1.0 if is_finite else torch.inf)
        optimizer.step()
        scheduler.step(*metrics)
        if is_finite:
            found.append(optimizer.param_groups[0]["lr"])
    return found, scheduler


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_a_guarded_schedule_is_that_of_the_applied_steps(name):
    ours, scheduler = rates(name, True, FINITE)
    plain, other = rates(name, False, [True] * FINITE.count(True))
    assert ours == plain
    assert type(scheduler).__name__ == name
    assert isinstance(scheduler, type(other))
    assert scheduler.state_dict().keys() == other.state_dict().keys()
    other.load_state_dict(scheduler.state_dict())


def test_a_schedule_for_each_epoch_is_held_back_by_no_single_step():
    given = parameters((3,))
    optimizer = wrapped(torch.optim.SGD(given, lr=0.5))
    scheduler = lossscale.torch.guard(lr_scheduler.StepLR(optimizer, 1, 0.5), optimizer)
    for finite, rate in (((True, False), 0.25), ((False, False), 0.25), ((False, True), 0.125)):
        for is_finite in finite:
            optimizer.zero_grad()
            backward(optimizer, given, [torch.ones(3)], 1.0 if is_finite else torch.nan)
            optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [rate]


def test_a_schedule_goes_on_after_a_load():
    """Of the steps before the load none counts for what comes after it."""
    given = parameters((3,))
    optimizer = wrapped(torch.optim.SGD(given, lr=0.5))
    for factor in (1.0, torch.inf):
        optimizer.zero_grad()
        backward(optimizer, given, [torch.ones(3)], factor)
        optimizer.step()
    other = wrapped(torch.optim.SGD(parameters((3,)), lr=0.5))
    scheduler = lossscale.torch.guard(lr_scheduler.StepLR(other, 1, 0.5), other)
    other.load_state_dict(optimizer.state_dict())
    given = other.param_groups[0]["params"]
    for factor, rate in ((torch.inf, 0.5), (1.0, 0.25)):
        other.zero_grad()
        backward(other, given, [torch.ones(3)], factor)
        other.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [rate]


def test_a_schedule_may_be_stepped_once_for_each_process():
    given = parameters((3,))
    optimizer = wrapped(torch.optim.SGD(given, lr=0.5))
    scheduler = lossscale.torch.guard(lr_scheduler.StepLR(optimizer, 1, 0.5), optimizer)
    for factor, rate in ((torch.inf, 0.5), (1.0, 0.125), (torch.inf, 0.125)):
        optimizer.zero_grad()
        backward(optimizer, given, [torch.ones(3)], factor)
        optimizer.step()
        # As Accelerate does with two processes.
        for _ in range(2):
            scheduler.step()
        assert scheduler.get_last_lr() == [rate]


def test_without_a_guard_there_is_no_false_warning_on_a_first_step_that_is_skipped():
    given = parameters((3,))
    optimizer = wrapped(torch.optim.SGD(given, lr=0.5))
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    backward(optimizer, given, [torch.ones(3)], torch.inf)
    optimizer.step()
    scheduler.step()
    assert optimizer.last_step_skipped
    assert scheduler.get_last_lr() == [0.25]


def test_a_schedule_may_be_made_for_the_optimizer_inside_and_be_copied():
    given = parameters((3,))
    optimizer = wrapped(torch.optim.SGD(given, lr=0.5))
    scheduler = lr_scheduler.StepLR(optimizer.inner_optimizer, 1, 0.5)
    lossscale.torch.guard(scheduler, optimizer)
    backward(optimizer, given, [torch.ones(3)], torch.inf)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    assert copy.copy(scheduler).get_last_lr() == [0.5]


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
    lossscale.torch.guard(scheduler, optimizer)
    with pytest.raises(TypeError, match="guarded already"):
        lossscale.torch.guard(scheduler, optimizer)
