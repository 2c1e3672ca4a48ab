"""What a step asks of a GPU, beside PyTorch's scaler: waits, launches, bytes and allocations.

benchmarks/gpu_counts.json holds all counts. A way that costs more fails, with the operators that
it adds to a step without loss scaling.
"""

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import lossscale
from benchmarks import pages
from benchmarks.gpu_torch import LAYOUTS, MODEL_STEPS, WAYS, counted, prepared, rows, rows_of_models
from simulated_cuda import device

SMALL = LAYOUTS["200 x 1,000"]
ROWS = pages.read(pages.COUNTS)["torch"]
CLIPS = (None, 1.0)


def kind(optimizer):
    return "fused" if "fused" in optimizer else "foreach"


def added(found, bare):
    """The operators that a way adds, by name; negative for those that it lacks."""
    names = sorted({*found.launches, *bare.launches})
    counts = {name: found.launches[name] - bare.launches[name] for name in names}
    return {name: count for name, count in counts.items() if count}


@pytest.fixture(scope="module")
def steps():
    """What is counted in each way of each step."""
    found = {}
    for row, recorder in rows(["200 x 1,000"]):
        found.setdefault(row["step"], {})[row["way"]] = row, recorder
    return found


def test_each_way_costs_what_its_row_says(steps):
    """If a way costs more, that is a fault; if less, `benchmarks.gpu_counts` writes it."""
    for found in steps.values():
        for row, recorder in found.values():
            assert row in ROWS, (row, recorder.waits, added(recorder, found["bare"][1]))


def test_no_way_costs_more_than_pytorchs_scaler(steps):
    for step, found in steps.items():
        theirs = found.pop("PyTorch's scaler", found.get("Keras' class"))[1]
        for way, (_, ours) in found.items():
            more = added(ours, theirs)
            assert ours.launches.total() <= theirs.launches.total(), (step, way, more)
            # PyTorch's scaler does not wait if the optimizer skips its own step.
            if way in ("device", "drop-in"):
                assert len(ours.waits) <= len(theirs.waits), (step, ours.waits)
            # Counters are some bytes.
            assert ours.bytes <= theirs.bytes + 64, (step, way)
            assert ours.allocations <= theirs.allocations, (step, way)


def test_a_float16_model_launches_less_than_autocast_with_pytorchs_scaler():
    found = {}
    # The fourth takes the longest, and shows nothing else.
    for row, recorder in rows_of_models(MODEL_STEPS[:3]):
        found.setdefault(row["step"], {})[row["way"]] = recorder
        assert row in ROWS, (row, recorder.waits)
    for step, ways in found.items():
        theirs = ways["autocast, PyTorch's scaler"]
        for way in (way for way in ways if way.startswith("float16")):
            more = added(ways[way], theirs)
            assert ways[way].launches.total() < theirs.launches.total(), (step, way, more)
            # The host decides in these two.
            waits = len(theirs.waits) or way.endswith(("backward", "scale_loss"))
            assert len(ways[way].waits) <= waits, (step, way, ways[way].waits)


@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD foreach"])
def test_large_parameters(optimizer):
    shapes = LAYOUTS["100 x 100,000"][:20]
    theirs = counted("PyTorch's scaler", optimizer, shapes)
    for way in WAYS[:-1] if kind(optimizer) == "fused" else ("backward", "scale_loss", "drop-in"):
        ours = counted(way, optimizer, shapes)
        assert len(ours.waits) <= (
            way in ("backward", "scale_loss") or kind(optimizer) == "foreach"
        )
        assert ours.launches.total() <= theirs.launches.total(), (way, added(ours, theirs))
        assert ours.bytes <= theirs.bytes + 64, way


@pytest.mark.parametrize("clip_norm", CLIPS)
@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD fused", "AdamW foreach", "SGD foreach"])
def test_two_optimizers_and_one_scaler(optimizer, clip_norm):
    theirs = counted("PyTorch's scaler", optimizer, SMALL[:40], clip_norm, optimizers=2)
    ours = counted("drop-in", optimizer, SMALL[:40], clip_norm, optimizers=2)
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


def then(way, further):
    """Has something done after each step."""
    before = way.step
    way.step = lambda: (before(), further())


def monitor(way):
    parameters = [
        p for inner in way.inners for group in inner.param_groups for p in group["params"]
    ]
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    way.monitor = lossscale.torch.Monitor(way.scaler, named, every=100)
    then(way, way.monitor.step)


def guard(way):
    scheduler = torch.optim.lr_scheduler.StepLR(way.inners[0], 1)
    then(way, lossscale.torch.guard(scheduler, way.scaler).step)


def guarded_buffers(way):
    model = torch.nn.BatchNorm1d(2).to("cuda")
    lossscale.torch.guard(model, way.scaler)
    step = way.step
    way.step = lambda: (model(torch.ones(4, 2, device="cuda")), step())


def unscaled_together(way):
    way.step = lambda: (
        *map(way.scaler.unscale_, way.inners),
        *map(way.scaler.step, way.inners),
        way.scaler.update(),
    )


WAITS = {
    "nothing": (lambda way: None, 0),
    "a repr": (lambda way: then(way, lambda: repr(way.scaler)), 0),
    "unscaled together": (unscaled_together, 0),
    # Once for each optimizer.
    "a hook of skips": (
        lambda way: way.scaler.register_step_skipped_hook(lambda optimizer: None),
        2,
    ),
    # And once more for the scale, which it tells.
    "a monitor": (monitor, 3),
    "a guard": (guard, 1),
    # The device chooses.
    "guarded buffers": (guarded_buffers, 0),
    "a number": (lambda way: then(way, way.scaler.get_scale), 1),
}


@pytest.mark.parametrize(("before", "waits"), WAITS.values(), ids=WAITS)
def test_what_makes_the_drop_in_wait(before, waits):
    found = counted("drop-in", "AdamW fused", SMALL[:4], optimizers=2, prepare=before)
    assert len(found.waits) == waits


@pytest.fixture
def of_two_processes():
    """The arguments of the first of two processes. Nothing that is sent arrives anywhere."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield {"settings": {"process_group": distributed.group.WORLD}}
    distributed.destroy_process_group()


@pytest.mark.parametrize("optimizer", ["SGD fused", "AdamW fused"])
@pytest.mark.parametrize("name", ["drop-in", "device", "device, of two processes"])
def test_the_host_decides_on_a_first_step_without_state(name, optimizer, of_two_processes):
    name, _, more = name.partition(", ")
    way, loss = prepared(name, optimizer, SMALL[:4], None, **(of_two_processes if more else {}))
    assert [len(step(way, loss)) for _ in range(3)] == [1, 0, 0]
