"""Each defect of PyTorch's scaler: what it does where that is cheap to show, and what ours does."""

import contextlib
import pathlib

import pytest
import torch

import lossscale
from frameworks.torch.scaling import (
    MAKERS,
    OPTIMIZERS,
    made,
    numbers,
    one_step,
    parameters,
    scale_and_tracker,
)
from lossscale.errors import ArgumentError, LossScaleWarning
from lossscale.torch.grad_scaler import GradScaler

both = pytest.mark.parametrize(
    ("make", "mended"), [(make, name == "lossscale") for name, make in MAKERS.items()], ids=MAKERS
)


def is_finite(weights):
    return all(bool(p.isfinite().all()) for p in weights)


@both
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_d1_no_number_of_overflows_destroys_the_parameters(make, mended, name):
    weights, optimizer, scaler = made(name, make)
    scaler.scale(torch.ones(()))
    for _ in range(170):
        weights[0].grad = torch.full((3,), torch.inf)
        scaler.step(optimizer)
        scaler.update()
    one_step(scaler, optimizer, weights)
    assert is_finite(weights) == mended
    if mended:
        assert scaler.get_scale() == 2.0**-126
        assert numbers(weights) != [[1.0] * 3]


@both
@pytest.mark.parametrize("unscale", [False, True])
def test_d2_an_overflow_on_the_first_step_of_fused_sgd(make, mended, unscale):
    right = []
    for _ in range(4):
        weights = [torch.nn.Parameter(torch.ones(4096))]
        optimizer = OPTIMIZERS["sgd-fused"](weights)
        scaler = make("cpu", init_scale=8.0)
        scaler.scale((weights[0] * torch.inf).sum()).backward()
        # Memory that was in use before: what is not written to is not zero.
        used = [torch.full((4096,), torch.nan) for _ in range(8)]
        if unscale:
            scaler.unscale_(optimizer)
        del used
        scaler.step(optimizer)
        scaler.update()
        one_step(scaler, optimizer, weights)
        right.append(torch.equal(weights[0].detach(), torch.full((4096,), 0.5)))
    assert all(right) == mended


@both
def test_d3_overflows_on_two_devices_are_one_overflow(make, mended):
    """Two devices are two entries; that of a second one is put there by hand."""
    weights, optimizer, scaler = made("adamw-fused", make, init_scale=8.0)
    one_step(scaler, optimizer, weights)
    before, steps = numbers(weights), int(optimizer.state[weights[0]]["step"])
    scaler.scale((weights[0] * torch.inf).sum()).backward()
    scaler.unscale_(optimizer)
    scaler._found_inf_per_device(optimizer)[torch.device("meta")] = torch.ones(())
    scaler.step(optimizer)
    scaler.update()
    assert (numbers(weights) == before) == mended
    assert (int(optimizer.state[weights[0]]["step"]) == steps) == mended
    assert scaler.get_scale() == 4


# D4 and D5 need several processes: test_processes.py; D23 is in test_compile.py.


SHORTEN = {
    "set": lambda scaler: scaler.set_growth_interval(3),
    "load": lambda scaler: scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 3}),
    "write": lambda scaler: setattr(scaler, "_growth_interval", 3),
}


@both
@pytest.mark.parametrize("how", SHORTEN)
def test_d6_a_shorter_interval_takes_effect(make, mended, how):
    weights, optimizer, scaler = made("sgd", make, init_scale=8.0, growth_interval=100)
    for _ in range(5):
        one_step(scaler, optimizer, weights, 0.0)
    SHORTEN[how](scaler)
    for _ in range(4):
        one_step(scaler, optimizer, weights, 0.0)
    # The next step, and three after it.
    assert scaler.get_scale() == (32.0 if mended else 8.0)


OF_TORCH = [{"growth_factor": 1.0}, {"backoff_factor": 1.0}]
"""What PyTorch refuses as well."""

ARGUMENTS = [
    *({"backoff_factor": value} for value in (0.0, -0.5)),
    *({"growth_interval": value} for value in (0, -1)),
    *({"init_scale": value} for value in (0.0, -1.0, float("nan"), float("inf"))),
    *({"growth_factor": value} for value in (float("inf"), float("nan"))),
]


@both
@pytest.mark.parametrize("arguments", [*ARGUMENTS, *OF_TORCH], ids=str)
def test_d7_useless_numbers_are_refused(make, mended, arguments):
    if not mended and arguments in ARGUMENTS:
        make("cpu", **arguments)
        return
    name = next(iter(arguments)).replace("init_scale", "initial_scale")
    words = rf"`{name}` must .*Received" if mended else "factor"
    with pytest.raises(AssertionError, match=words) as caught:
        make("cpu", **arguments)
    assert isinstance(caught.value, ArgumentError) == mended


SETS = {
    "growth_factor": (1.0, "2"),
    "backoff_factor": (1.5, 0.0),
    "growth_interval": (0, 2.5),
    "new_scale": (0, -1.0, float("nan"), float("inf"), 2.0**127, "4", [4.0], True),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in SETS.items() for value in values]
)
def test_d7_a_useless_number_that_is_set_changes_nothing(name, value):
    scaler = GradScaler("cpu")
    before = scaler.state_dict()
    calls = [scaler.update]
    if name != "new_scale":
        calls = [getattr(scaler, f"set_{name}"), lambda value: setattr(scaler, f"_{name}", value)]
    for call in calls:
        with pytest.raises(ArgumentError, match=name):
            call(value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("new", [4, 4.0, torch.tensor(4.0), torch.tensor([4])])
def test_d7_update_takes_every_number(new):
    scaler = GradScaler("cpu")
    scaler.update(new)
    assert scaler.get_scale() == scaler.scale(torch.ones(())) == 4
    scaler.update(2)
    assert scaler._scale == 2


@both
@pytest.mark.parametrize("optimizer", ["LBFGS", "SGD"])
def test_d7_d24_a_closure_by_place_is_refused(make, mended, optimizer):
    weights = parameters(1)
    inner = getattr(torch.optim, optimizer)(weights, lr=0.1)
    scaler = make("cpu", init_scale=8.0)
    seen = []

    def closure():
        inner.zero_grad()
        loss = scaler.scale((weights[0] ** 2).sum())
        loss.backward()
        seen.append(float(loss.detach()))
        return loss

    closure()
    if mended:
        before = numbers(weights)
        for arguments in ({"closure": closure}, {}):
            with pytest.raises(RuntimeError, match="takes no closure"):
                scaler.step(inner, *(() if arguments else (closure,)), **arguments)
        assert numbers(weights) == before
        # As Accelerate and torch.distributed.checkpoint call it.
        scaler.step(inner, None) if optimizer == "SGD" else None
    else:
        # It trains on losses that are 8 times too large.
        scaler.step(inner, closure)
        assert seen[1] == 24.0


@both
@pytest.mark.parametrize("name", ["adam", "adam-fused", "sgd-fused", "adagrad-fused"])
def test_only_an_optimizer_that_skips_by_itself_is_called_on_a_skip(make, mended, name):
    weights, optimizer, scaler = made(name, make)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for slope in (1.0, torch.inf, 1.0):
        before = numbers(weights)
        one_step(scaler, optimizer, weights, slope)
        assert (numbers(weights) == before) == (slope == torch.inf)
    assert len(calls) == (2 if name == "adam" else 3)


@both
def test_d20_a_scale_below_one_lets_no_infinity_through(make, mended):
    weights, optimizer, scaler = made("sgd", make, init_scale=2.0**-20)
    scaler.scale(weights[0].sum()).backward()
    weights[0].grad = torch.full((3,), 3e38)
    scaler.step(optimizer)
    scaler.update()
    assert is_finite(weights) == mended
    if mended:
        assert numbers(weights) == [[1.0] * 3]
        assert scaler.get_scale() == 2.0**-21


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", ["sgd-fused", "adamw-fused"])
def test_a_grad_scale_of_the_user_divides_too_and_is_used_up(make, name):
    weights, optimizer, scaler = made(name, make, init_scale=8.0)
    same, plain, _ = made(name)
    # PyTorch's class cannot multiply None.
    for divides in (4.0, 4.0, *[None] * (make is GradScaler)):
        optimizer.grad_scale = divides and torch.tensor(divides)
        one_step(scaler, optimizer, weights)
        assert not hasattr(optimizer, "grad_scale")
        same[0].grad = torch.full((3,), 1 / (divides or 1))
        plain.step()
    assert numbers(weights) == numbers(same)


@both
def test_d25_a_step_that_fails_leaves_nothing_on_the_optimizer(make, mended):
    class Failing(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            assert isinstance(self.grad_scale, torch.Tensor)
            assert isinstance(self.found_inf, torch.Tensor)
            raise OSError

    weights = parameters(1)
    optimizer = Failing(weights)
    optimizer._step_supports_amp_scaling = True
    scaler = make("cpu")
    scaler.scale(weights[0].sum()).backward()
    with pytest.raises(OSError):
        scaler.step(optimizer)
    assert hasattr(optimizer, "grad_scale") != mended
    assert hasattr(optimizer, "found_inf") != mended


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_no_gradients_are_neither_a_good_nor_a_bad_step_where_pytorchs_class_raises(name):
    for make in MAKERS.values():
        _, optimizer, scaler = made(name, make, init_scale=8.0, growth_interval=1)
        scaler.scale(torch.ones(()))
        mended = make is GradScaler
        with contextlib.nullcontext() if mended else pytest.raises(AssertionError):
            scaler.step(optimizer)
            scaler.update()
        assert not mended or not scaler.last_step_skipped
        assert scale_and_tracker(scaler) == (8.0, 0)


def test_a_warm_up_from_zero_is_a_step():
    weights, optimizer, scaler = made("adam")
    optimizer.param_groups[0]["lr"] = 0.0
    one_step(scaler, optimizer, weights)
    assert scale_and_tracker(scaler) == (65536.0, 1)


@pytest.mark.parametrize("on_host", [True, False])
def test_overflows_at_the_lowest_scale_are_warned_of_once(on_host):
    """When the host knows of them; a step that only a GPU knows of, when the scale is read."""
    weights, optimizer, scaler = made(
        "sgd" if on_host else "adamw-fused", init_scale=4.0, min_scale=2.0
    )
    if not on_host:
        one_step(scaler, optimizer, weights)
        scaler._warn_at_floor, warns = lambda number: None, scaler._warn_at_floor
    one_step(scaler, optimizer, weights, torch.inf)
    assert scaler.get_scale() == 2.0
    if not on_host:
        one_step(scaler, optimizer, weights, torch.inf)
        scaler._warn_at_floor = warns
    with pytest.warns(
        LossScaleWarning, match=r"minimum loss scale, 2:.* GradScaler\(min_scale=2.0\*\*-24\)"
    ) as warned:
        one_step(scaler, optimizer, weights, torch.inf) if on_host else scaler.get_scale()
    package = pathlib.Path(lossscale.__file__).parent
    assert not pathlib.Path(warned[0].filename).is_relative_to(package)
    one_step(scaler, optimizer, weights, torch.inf) if on_host else scaler.get_scale()


@pytest.mark.parametrize("names", [("adamw-fused", "sgd-fused"), ("adamw-fused", "sgd")])
def test_a_list_of_optimizers_with_float16_parameters_of_fused_ones(names):
    weights = [
        torch.nn.Parameter(torch.ones(3, dtype=torch.float16 if "fused" in name else torch.float32))
        for name in names
    ]
    optimizers = [OPTIMIZERS[name]([w]) for name, w in zip(names, weights, strict=True)]
    scaler = GradScaler("cpu", init_scale=16.0)
    for slope, number in ((1.0, 0), (torch.inf, 1), (torch.inf, 0), (1.0, 0)):
        before = numbers(weights)
        for each in optimizers:
            each.zero_grad()
        loss = sum(w.float().sum() * (slope if n == number else 1.0) for n, w in enumerate(weights))
        scaler.scale(loss).backward()
        scaler.step(optimizers)
        scaler.update()
        moved = [one != other for one, other in zip(before, numbers(weights), strict=True)]
        assert moved == [slope == 1.0] * 2
    assert (scaler.get_scale(), scaler.steps_skipped) == (4.0, 4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0])
def test_a_number_that_other_code_wrote_is_put_back_into_the_range_by_a_skip(value):
    weights, optimizer, scaler = made(init_scale=8.0, min_scale=0.5)
    one_step(scaler, optimizer, weights)
    scaler._scale.fill_(value)
    one_step(scaler, optimizer, weights, torch.nan)
    assert scaler.get_scale() == (2.0**126 if value == torch.inf else 0.5)
    one_step(scaler, optimizer, weights, 0.0)
    assert is_finite(weights)


@both
def test_a_replaced_unscale_grads_allows_float16_parameters_as_trainers_write_it(make, mended):
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.float16))]
    optimizer, scaler = torch.optim.SGD(weights, lr=0.5), make("cpu", init_scale=16.0)
    replaced = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda *given: replaced(*given[:3], True)
    for _ in range(2):
        one_step(scaler, optimizer, weights, unscale=True)
    assert numbers(weights) == [[0.0] * 3]
