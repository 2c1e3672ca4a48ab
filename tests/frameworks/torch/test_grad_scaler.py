"""The drop-in takes the way of PyTorch's scaler, refuses what that refuses, has no defect of it."""

import collections
import contextlib
import copy
import importlib
import pathlib
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp.grad_scaler import OptState

import lossscale
import lossscale.torch
from core.oracle import trace
from forks import Program
from frameworks.torch.support import (
    MAKERS,
    OPTIMIZERS,
    bits,
    numbers,
    one_step,
    raised_by,
    scale_and_tracker,
    weights_of,
    with_scaler,
)
from lossscale import DynamicScale, LossScaleError
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleWarning
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.installation import _PLACES, _SHARDED


@settings(max_examples=60, deadline=None)
@given(
    finite=st.lists(st.booleans(), min_size=1, max_size=40),
    init=st.integers(-120, 120),
    growth=st.sampled_from([2.0, 4.0, 1.1, 1.5]),
    backoff=st.sampled_from([0.5, 0.25, 0.7, 2.0**-40]),
    interval=st.integers(1, 5),
    limits=st.sampled_from([(2.0**-126, None), (1.0, 2.0**24), (3.0, 5000.0)]),
)
def test_the_scale_takes_the_way_of_the_rule(finite, init, growth, backoff, interval, limits):
    lowest, highest = limits
    first = min(max(2.0**init, lowest), 2.0**126 if highest is None else highest)
    arguments = {
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "min_scale": lowest,
        "max_scale": highest,
    }
    weights, optimizer, scaler = with_scaler(init_scale=first, **arguments)
    scaler.scale(torch.zeros(1))
    shown = []
    for good in finite:
        weights[0].grad = torch.full((3,), 0.0 if good else torch.nan)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == float(scaler._scale)
        shown.append((float(scaler._scale), int(scaler._growth_tracker)))
    rule = DynamicScale(initial_scale=first, **arguments)
    assert shown == moved_as_by_torch(rule, finite)
    if rule.powers_of_two:
        assert shown == trace(rule, finite)


def moved_as_by_torch(rule, finite):
    """PyTorch multiplies in float64 and rounds to float32; a move past a limit is the rule's."""
    scale, good_steps, shown = rule.initial_scale, 0, []
    for good in finite:
        good_steps = good_steps + 1 if good else 0
        if not good:
            scale = max(float(np.float32(scale * rule.backoff_factor)), rule.min_scale)
        elif good_steps == rule.growth_interval:
            grown = float(np.float32(scale * rule.growth_factor))
            scale, good_steps = scale if grown > rule.ceiling else grown, 0
        shown.append((scale, good_steps))
    return shown


Pair = collections.namedtuple("Pair", "a b")


def test_nests_of_losses():
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(())
    assert scaler.scale([one, (one, [one])]) == [4, (4, [4])]
    assert scaler.scale(Pair(one, one)) == Pair(4, 4)
    with pytest.raises(TypeError):
        torch.amp.GradScaler("cpu").scale(Pair(one, one))
    assert scaler.scale({"x": one, "y": [one]}) == {"x": 4, "y": [4]}
    assert scaler.scale([]) == []
    for iterable in (iter([one, one]), {"a": one}.values()):
        assert next(scaler.scale(iterable)) == 4
    # Without a tensor no scale is made.
    fresh = GradScaler("cpu")
    assert fresh.scale({"a": []}) == {"a": []}
    assert fresh._scale is None


def test_a_step_passes_arguments_on_and_returns_what_the_optimizer_returns():
    class Returning(torch.optim.SGD):
        def step(self, word, *, closure=None, number):
            super().step(closure)
            return word, number

    weights, scaler = weights_of(1), GradScaler("cpu", init_scale=8.0)
    optimizer = Returning(weights, lr=1.0)
    for factor, returned in ((1.0, ("word", 3)), (torch.inf, None)):
        scaler.scale((weights[0] * factor).sum()).backward()
        assert scaler.step(optimizer, "word", number=3) == returned
        scaler.update()


@pytest.mark.parametrize("first", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("second", ["sgd", "adamw-fused"])
def test_skips_of_several_optimizers_before_one_update_count_once(first, second):
    weights, scaler = weights_of(2), GradScaler("cpu", init_scale=8.0)
    optimizers = [OPTIMIZERS[name]([w]) for name, w in zip((first, second), weights, strict=True)]
    seen = []
    for factors in ((torch.inf, torch.inf), (1.0, torch.inf), (torch.inf, 1.0), (1.0, 1.0)):
        loss = sum(w.sum() * factor for w, factor in zip(weights, factors, strict=True))
        for each in optimizers:
            each.zero_grad()
        scaler.scale(loss).backward()
        for each in optimizers:
            scaler.step(each)
            seen.append((scaler.last_step_skipped, scaler.steps_skipped))
        scaler.update()
    flags, counts = zip(*seen, strict=True)
    assert flags == (True, True, False, True, True, False, False, False)
    assert counts == (1, 1, 1, 2, 3, 3, 3, 3)


def test_optimizers_may_step_in_the_backward_pass():
    """One for each parameter, in a hook, as soon as its gradient is there."""
    weights, scaler = weights_of(2), GradScaler("cpu", init_scale=8.0)
    optimizers = {weight: OPTIMIZERS["sgd-momentum"]([weight]) for weight in weights}

    def hook(weight):
        scaler.step(optimizers[weight])
        optimizers[weight].zero_grad()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(hook)
    for factor in (1.0, torch.inf, 1.0):
        scaler.scale(sum((weight * factor).sum() for weight in weights)).backward()
        scaler.update()
    # By 0.5, and by 0.5 * 1.9 with the momentum.
    assert weights[0].tolist() == pytest.approx([1.0 - 1.45] * 3)
    assert weights[1].tolist() == pytest.approx([2.0 - 1.45] * 3)
    assert (scaler.get_scale(), scaler.steps_skipped) == (4.0, 1)


def test_the_tensors_are_changed_in_place():
    weights, optimizer, scaler = with_scaler(init_scale=8.0, growth_interval=1)
    one_step(scaler, optimizer, weights)
    scale, tracker = scaler._scale, scaler._growth_tracker
    assert scale.dtype == torch.float32
    assert tracker.dtype == torch.int32
    one_step(scaler, optimizer, weights, torch.inf)
    scaler.update(32)
    scaler.load_state_dict({"scale": 2.0, "_growth_tracker": 1})
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker
    assert scale.item() == 2


def test_other_code_reads_and_writes_its_numbers_in_any_mode():
    weights, optimizer, scaler = with_scaler(init_scale=8.0, growth_interval=3)
    with torch.inference_mode():
        assert scaler.scale(torch.ones(())) == 8
    one_step(scaler, optimizer, weights)
    scaler._growth_tracker.fill_(2)
    one_step(scaler, optimizer, weights)
    assert scale_and_tracker(scaler) == (16.0, 0)
    for slope in (4.0, torch.inf):
        # Before anything was scaled.
        weights, optimizer, scaler = with_scaler()
        weights[0].grad = torch.full((3,), slope)
        inverse, found = torch.tensor(0.25), torch.zeros(1)
        by_device = scaler._unscale_grads_(optimizer, inverse, found, False)
        assert [bool(each) for each in by_device.values()] == [slope == torch.inf]
        assert weights[0].grad.tolist() == [slope / 4.0] * 3


def test_disabled():
    weights, optimizer, scaler = with_scaler(enabled=False, growth_interval=7)
    loss = weights[0].sum()
    assert scaler.scale(loss) is loss
    assert scaler.scale("anything") == "anything"
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer, closure=lambda: 1.0)
    for number in ((), (3.0,)):
        scaler.update(*number)
    scaler.load_state_dict({})
    assert numbers(weights) == [[0.5] * 3]
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1, {}, False)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)
    assert (scaler.get_growth_interval(), scaler.last_step_skipped) == (7, False)
    assert copy.deepcopy(scaler).state_dict() == {}


# What is refused changes nothing. What PyTorch's class refuses has its type.


def of_float16():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones(2, dtype=torch.float16)
    return torch.optim.SGD([weight], lr=1.0)


def around(optimizer):
    return lossscale.torch.LossScaleOptimizer(torch.optim.SGD(optimizer.param_groups[0]["params"]))


LISTED = r"scaler.step\(first\) and scaler.step\(second\)"
REFUSED = {
    "float16": (lambda s, a, b: s.step(of_float16()), "float16"),
    "closure": (lambda s, a, b: s.step(a, closure=lambda: 1.0), "no closure"),
    "number": (lambda s, a, b: s.scale(3), "tensor"),
    "two scales": (lambda s, a, b: s.update(torch.ones(2)), "new_scale"),
    "gradient": (lambda s, a, b: s.update(torch.ones(1, requires_grad=True)), "new_scale"),
}
ONLY_OURS = {
    "closure by place": (lambda s, a, b: s.step(a, lambda: 1.0), "no closure"),
    "no optimizer": (lambda s, a, b: s.step(3), "steps an optimizer"),
    "no optimizer, unscale_": (lambda s, a, b: s.unscale_(torch.nn.Linear(1, 1)), "Linear"),
    "wrapper": (lambda s, a, b: s.step(around(a)), "Use it without.*its inner optimizer"),
    "wrapper, unscale_": (lambda s, a, b: s.unscale_(around(a)), "its inner optimizer"),
    "list": (lambda s, a, b: s.step([a, b]), LISTED),
    "list, unscaled": (lambda s, a, b: s.step((a, b)), LISTED),
    "list, unscale_": (lambda s, a, b: s.unscale_([a, b]), LISTED),
}
"""The misuse of a scaler and two optimizers, and words of the error."""


def misused(make, names, case):
    """The error, what there was before it and what there is after it."""
    misuse, _ = (REFUSED | ONLY_OURS)[case]
    weights, scaler = weights_of(2), make("cpu", init_scale=8.0)
    optimizers = [OPTIMIZERS[name]([w]) for name, w in zip(names, weights, strict=True)]
    scaler.scale(sum(w.sum() for w in weights)).backward()
    if case == "list, unscaled":
        scaler.unscale_(optimizers[0])

    def shown():
        stages = [state["stage"] for state in scaler._per_optimizer_states.values()]
        states = [each.state_dict() for each in (*optimizers, scaler)]
        kept = bits([weights, [w.grad for w in weights], states])
        return kept, [stage for stage in stages if stage is not OptState.READY]

    before = shown()
    return raised_by(misuse, scaler, *optimizers), before, shown()


@pytest.mark.parametrize("case", REFUSED | ONLY_OURS)
@pytest.mark.parametrize("names", [("sgd-momentum", "adamw-fused"), ("adamw-fused", "sgd")])
def test_what_is_refused_changes_nothing_and_has_the_type_of_pytorchs_error(names, case):
    error, before, after = misused(GradScaler, names, case)
    assert isinstance(error, LossScaleError)
    assert re.search((REFUSED | ONLY_OURS)[case][1], str(error))
    assert after == before
    assert isinstance(error, TypeError) or "list" not in case
    if case in REFUSED:
        assert isinstance(error, type(misused(torch.amp.GradScaler, names, case)[0]))


INF, NAN = float("inf"), float("nan")
OUTSIDE = {
    # D7: PyTorch's class takes most of them.
    "backoff_factor": (0.0, -0.5, 1.0),
    "growth_interval": (0, -1),
    "growth_factor": (INF, NAN, 1.0),
    "init_scale": (0.0, -1.0, NAN, INF, "8"),
}
OF_ANOTHER_TYPE = [({"process_group": "world"}, "process_group")]
ARGUMENTS = [
    *OF_ANOTHER_TYPE,
    ({"device": 65536.0}, r"torch\.cuda\.amp\.GradScaler"),
    ({"enabled": 1}, "`enabled`"),
    ({"min_scale": 2.0, "init_scale": 1.0}, "`initial_scale` must be between"),
    ({"max_scale": 2.0**127}, "`max_scale`"),
    *(
        ({name: value}, rf"`{name.replace('init_', 'initial_')}` must .*Received")
        for name, values in OUTSIDE.items()
        for value in values
    ),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=str)
def test_arguments(arguments, message):
    is_type = (arguments, message) in OF_ANOTHER_TYPE
    with pytest.raises(ArgumentTypeError if is_type else AssertionError, match=message) as caught:
        GradScaler(**{"device": "cpu", **arguments})
    assert is_type or isinstance(caught.value, ArgumentError)


# In the places of PyTorch's scaler, and out of them again.


PLACES = [(place, "GradScaler") for place in _PLACES] + [(_SHARDED, "ShardedGradScaler")]


def now():
    return {place: getattr(importlib.import_module(place), name) for place, name in PLACES}


def test_in_every_place_and_out_again():
    before = now()
    with lossscale.torch.install():
        for place, scaler in now().items():
            assert issubclass(scaler, lossscale.torch.GradScaler), place
        assert torch.amp.GradScaler is torch.GradScaler is lossscale.torch.GradScaler
    assert now() == before
    assert not any(issubclass(scaler, lossscale.torch.GradScaler) for scaler in before.values())
    # By plain calls, of which the first one's counts, and after an error.
    first, second = lossscale.torch.install(), lossscale.torch.install()
    for each in (second, second, first):
        assert torch.amp.GradScaler is lossscale.torch.GradScaler
        each.undo()
    assert now() == before
    with pytest.raises(OSError), lossscale.torch.install():
        raise OSError
    assert now() == before


def test_pytorchs_own_classes_are_not_made_of_what_stands_in_their_places():
    """Also where install() is the first that imports one of them."""
    program = (
        "import sys, lossscale.torch; name = 'torch.distributed.fsdp.sharded_grad_scaler';"
        "assert name not in sys.modules; lossscale.torch.install().undo();"
        "print([cls.__module__ for cls in sys.modules[name].ShardedGradScaler.__mro__[:2]])"
    )
    ran = Program(program, module="torch").finished()
    assert ran.stdout.strip() == str([_SHARDED, "torch.amp.grad_scaler"]), ran.stderr


def test_the_sharded_one_has_its_own_order_of_arguments():
    sharded = importlib.import_module(_SHARDED)
    with lossscale.torch.install():
        scaler = sharded.ShardedGradScaler("cpu", 8.0, 0.25, 4.0, 7)
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor()) == (0.25, 4)
    assert scaler.get_growth_interval() == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_without_cuda_they_disable_themselves_with_a_warning():
    with lossscale.torch.install():
        for make in (lambda: torch.cuda.amp.GradScaler(2.0**10), GradScaler):
            with pytest.warns(UserWarning, match="CUDA is not available. *Disabling"):
                scaler = make()
            assert not scaler.is_enabled()
            weights = weights_of(1)
            one_step(scaler, OPTIMIZERS["sgd"](weights), weights)
            assert numbers(weights) == [[0.5] * 3]


# Each defect of PyTorch's scaler: what it does where that is cheap to show, and what ours does. D1,
# overflows without end, is in test_the_scale_takes_the_way_of_the_rule; D2, a first fused step that
# overflows, in test_every_optimizer.py; D4 and D5 need several processes: test_processes.py; D23 is
# in test_compile.py.


both = pytest.mark.parametrize(
    ("make", "mended"), [(make, name == "lossscale") for name, make in MAKERS.items()], ids=MAKERS
)


def is_finite(weights):
    return all(bool(p.isfinite().all()) for p in weights)


@both
def test_d3_overflows_on_two_devices_are_one_overflow(make, mended):
    """Two devices are two entries; that of a second one is put there by hand."""
    weights, optimizer, scaler = with_scaler("adamw-fused", make, init_scale=8.0)
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


SHORTEN = {
    "set": lambda scaler: scaler.set_growth_interval(3),
    "load": lambda scaler: scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 3}),
    "write": lambda scaler: setattr(scaler, "_growth_interval", 3),
}


@both
@pytest.mark.parametrize("how", SHORTEN)
def test_d6_a_shorter_interval_takes_effect(make, mended, how):
    weights, optimizer, scaler = with_scaler("sgd", make, init_scale=8.0, growth_interval=100)
    for _ in range(5):
        one_step(scaler, optimizer, weights, 0.0)
    SHORTEN[how](scaler)
    for _ in range(4):
        one_step(scaler, optimizer, weights, 0.0)
    # The next step, and three after it.
    assert scaler.get_scale() == (32.0 if mended else 8.0)


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
    weights, optimizer, scaler = with_scaler()
    scaler.scale((weights[0] * INF).sum()).backward()
    scaler.step(optimizer)
    before = scaler.state_dict()
    calls = [scaler.update]
    if name != "new_scale":
        calls = [getattr(scaler, f"set_{name}"), lambda value: setattr(scaler, f"_{name}", value)]
    for call in calls:
        with pytest.raises(ArgumentError, match=name):
            call(value)
    assert scaler.state_dict() == before
    # It takes every other number, and counts the skipped step once.
    for new in (4, 4.0, torch.tensor(4.0), torch.tensor([4])):
        scaler.update(new)
        assert scaler.get_scale() == scaler.scale(torch.ones(())) == 4
        assert scaler.steps_skipped == 1
    # Also before its first loss.
    fresh = GradScaler("cpu")
    fresh.update(4.0)
    assert fresh.get_scale() == 4.0


@both
def test_d20_a_scale_below_one_lets_no_infinity_through(make, mended):
    weights, optimizer, scaler = with_scaler("sgd", make, init_scale=2.0**-20)
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
    weights, optimizer, scaler = with_scaler(name, make, init_scale=8.0)
    same, plain, _ = with_scaler(name)
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

    weights = weights_of(1)
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
        _, optimizer, scaler = with_scaler(name, make, init_scale=8.0, growth_interval=1)
        scaler.scale(torch.ones(()))
        mended = make is GradScaler
        with contextlib.nullcontext() if mended else pytest.raises(AssertionError):
            scaler.step(optimizer)
            scaler.update()
        assert not mended or not scaler.last_step_skipped
        assert scale_and_tracker(scaler) == (8.0, 0)


@pytest.mark.parametrize("is_monitored", [False, True])
def test_overflows_at_the_lowest_scale_are_warned_of_once(is_monitored):
    weights, optimizer, scaler = with_scaler("sgd", init_scale=4.0, min_scale=2.0)
    monitor = is_monitored and lossscale.torch.Monitor(scaler, [("weight", weights[0])])

    def skip():
        one_step(scaler, optimizer, weights, torch.inf)
        if is_monitored:
            monitor.step()

    skip()
    assert scaler.get_scale() == 2.0
    # It takes no rule.
    words = r"minimum loss scale, 2.*batches out\. .* use min_scale=2.0\*\*-24\."
    with pytest.warns(LossScaleWarning, match=words) as warned:
        skip()
    package = pathlib.Path(lossscale.__file__).parent
    assert not pathlib.Path(warned[0].filename).is_relative_to(package)
    skip()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0])
def test_a_number_that_other_code_wrote_is_put_back_into_the_range_by_a_skip(value):
    weights, optimizer, scaler = with_scaler(init_scale=8.0, min_scale=0.5)
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
