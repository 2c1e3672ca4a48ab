"""What a step asks of a GPU, beside PyTorch's scaler: waits, launches, bytes and allocations.

All numbers are what a way adds to a step without loss scaling. A way that costs more than it did
fails, with the operators that it adds; for one that costs less the number here is lowered.
"""

import math

import pytest
import torch

import lossscale
from benchmarks.gpu_torch import LAYOUTS, OPTIMIZERS, WAYS, counted, prepared
from simulated_cuda import device

SMALL = LAYOUTS["200 x 1,000"]
CLIPS = (None, 1.0)
# Launches, waits and passes over the gradients: first if nothing is clipped, and then if it is.
HELD = {
    ("backward", "fused"): ((5, 1, 2), (5, 1, 2)),
    ("scale_loss", "fused"): ((5, 1, 2), (-3, 1, -2)),
    ("device", "fused"): ((15, 0, 2), (15, 0, 2)),
    ("fixed", "fused"): ((2, 0, 0), (-3, 1, -2)),
    ("drop-in", "fused"): ((12, 0, 2), (15, 0, 2)),
    ("backward", "foreach"): ((5, 1, 2), (5, 1, 2)),
    ("scale_loss", "foreach"): ((5, 1, 2), (-1, 1, 0)),
    ("fixed", "foreach"): ((4, 0, 2), (-1, 1, 0)),
    ("drop-in", "foreach"): ((10, 1, 2), (10, 1, 2)),
}


def kind(optimizer):
    return "fused" if "fused" in optimizer else "foreach"


def ways(optimizer):
    """The ways that this optimizer can have; only fused ones skip their own step."""
    return [way for way in WAYS[1:] if way != "device" or kind(optimizer) == "fused"]


def added(found, bare):
    """The operators that a way adds, by name; negative for those that it lacks."""
    names = sorted({*found.launches, *bare.launches})
    counts = {name: found.launches[name] - bare.launches[name] for name in names}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("clip_norm", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_way_waits_or_launches_more_than_it_did_nor_than_pytorchs_scaler(optimizer, clip_norm):
    bare = counted("bare", optimizer, SMALL, clip_norm)
    found = {way: counted(way, optimizer, SMALL, clip_norm) for way in ways(optimizer)}
    theirs, size = found.pop("PyTorch's scaler"), 4 * sum(map(math.prod, SMALL))
    for way, ours in found.items():
        more = added(ours, bare)
        launches, waits, passes = HELD[way, kind(optimizer)][clip_norm is not None]
        assert sum(more.values()) <= launches, (way, more)
        assert round((ours.bytes - bare.bytes) / size) <= passes, way
        assert len(ours.waits) == waits, (way, ours.waits)
        assert ours.launches.total() <= theirs.launches.total(), (way, more)
        # Counters are some bytes.
        assert ours.bytes <= theirs.bytes + 64, (way, ours.bytes - theirs.bytes)
        assert ours.allocations <= theirs.allocations, way


@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD foreach"])
def test_large_parameters(optimizer):
    shapes = LAYOUTS["100 x 100,000"]
    theirs = counted("PyTorch's scaler", optimizer, shapes)
    for way in ways(optimizer)[:-1]:
        ours = counted(way, optimizer, shapes)
        assert len(ours.waits) <= (
            way in ("backward", "scale_loss") or kind(optimizer) == "foreach"
        )
        assert ours.launches.total() <= theirs.launches.total(), (way, added(ours, theirs))
        assert ours.bytes <= theirs.bytes + 64, way


@pytest.mark.parametrize("clip_norm", CLIPS)
@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD fused", "AdamW foreach", "SGD foreach"])
def test_two_optimizers_and_one_scaler(optimizer, clip_norm):
    theirs = counted("PyTorch's scaler", optimizer, SMALL, clip_norm, optimizers=2)
    ours = counted("drop-in", optimizer, SMALL, clip_norm, optimizers=2)
    assert ours.launches.total() <= theirs.launches.total(), added(ours, theirs)
    assert len(ours.waits) == len(theirs.waits) == (0 if kind(optimizer) == "fused" else 2)
    assert ours.bytes <= theirs.bytes + 64


def step(way, loss):
    """A step, and its waits."""
    value = loss()
    device.taken()
    way.backward(value)
    way.step()
    return device.taken()


@pytest.mark.parametrize("clip_norm", CLIPS)
@pytest.mark.parametrize("optimizer", ["AdamW fused", "AdamW foreach"])
@pytest.mark.parametrize("name", ["backward", "scale_loss"])
def test_the_host_waits_once_after_the_scale_has_changed_too(name, optimizer, clip_norm):
    way, loss = prepared(name, optimizer, SMALL[:3], clip_norm, interval=1)
    found = [step(way, loss) for _ in range(4)]
    assert [len(waits) for waits in found] == [1] * 4, found
    assert way.scales() == [2.0**14]


def named(way):
    """The parameters with names, as a monitor takes them."""
    return [
        (str(number), parameter)
        for number, parameter in enumerate(
            parameter
            for inner in way.inners
            for group in inner.param_groups
            for parameter in group["params"]
        )
    ]


def then(way, further):
    """Has something done after each step."""
    before = way.step
    way.step = lambda: (before(), further())


def hook_of_skips(way):
    way.scaler.register_step_skipped_hook(lambda optimizer: None)


def monitor(way):
    way.monitor = lossscale.torch.Monitor(way.scaler, named(way), every=100)
    then(way, way.monitor.step)


def guard(way):
    scheduler = torch.optim.lr_scheduler.StepLR(way.inners[0], 1)
    then(way, lossscale.torch.guard(scheduler, way.scaler).step)


def rule_of_another_kind(way):
    rule = lossscale.DynamicScale(2.0**10, overflows_before_backoff=2)
    way.scaler = lossscale.torch.GradScaler("cuda", rule=rule)


def step_of_a_list(way):
    way.step = lambda: (way.scaler.step(way.inners), way.scaler.update())


def number_that_is_read(way):
    then(way, way.scaler.get_scale)


def nothing(way):
    pass


@pytest.mark.parametrize(
    ("before", "waits"),
    [
        (nothing, 0),
        (step_of_a_list, 0),
        # Once for each optimizer.
        (hook_of_skips, 2),
        # And once more for the scale, which it tells.
        (monitor, 3),
        (guard, 1),
        (rule_of_another_kind, 1),
        (number_that_is_read, 1),
    ],
)
def test_what_makes_the_drop_in_wait(before, waits):
    found = counted("drop-in", "AdamW fused", SMALL[:4], optimizers=2, prepare=before)
    assert len(found.waits) == waits


@pytest.mark.parametrize("optimizer", ["SGD fused", "AdamW fused"])
@pytest.mark.parametrize("name", ["drop-in", "device"])
def test_the_host_decides_on_a_first_step_without_state(name, optimizer):
    way, loss = prepared(name, optimizer, SMALL[:4], None)
    assert [len(step(way, loss)) for _ in range(3)] == [1, 0, 0]
