"""What is refused: with the type that PyTorch raises, and nothing is changed."""

import copy
import itertools
import pickle

import pytest
import torch

import lossscale.torch
from frameworks.torch.scaling import MAKERS, OPTIMIZERS, made, numbers, one_step, parameters
from frameworks.torch.support import bits
from lossscale import DynamicScale, FixedScale, LossScaleError
from lossscale.errors import AlreadyWrappedError, ArgumentTypeError
from lossscale.torch.grad_scaler import GradScaler


def scaled(make):
    weights, optimizer, scaler = made("sgd", make)
    scaler.scale(weights[0].sum()).backward()
    return scaler, optimizer, weights


def of_float16():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones(2, dtype=torch.float16)
    return torch.optim.SGD([weight], lr=1.0)


MISUSES = {
    "unscale_ twice": ("unscale_", lambda s, o: s.unscale_(o)),
    "unscale_ after step": ("step", lambda s, o: s.unscale_(o)),
    "step twice": ("step", lambda s, o: s.step(o)),
    "float16": (None, lambda s, o: s.step(of_float16())),
    "pickle in between": ("step", lambda s, o: pickle.dumps(s)),
    "copy in between": ("unscale_", lambda s, o: copy.deepcopy(s)),
    "update alone": (None, lambda s, o: s.update()),
    "closure": (None, lambda s, o: s.step(o, closure=lambda: 1.0)),
    "number": (None, lambda s, o: s.scale(3)),
    "two scales": (None, lambda s, o: s.update(torch.ones(2))),
    "gradient": (None, lambda s, o: s.update(torch.ones(1, requires_grad=True))),
    "empty state": (None, lambda s, o: s.load_state_dict({})),
    "first step": (None, lambda s, o: type(s)("cpu").step(o)),
    "first unscale_": (None, lambda s, o: type(s)("cpu").unscale_(o)),
    "first update": (None, lambda s, o: type(s)("cpu").update()),
    "first look": (None, lambda s, o: type(s)("cpu")._check_inf_per_device(o)),
    "no growth": (None, lambda s, o: type(s)("cpu", growth_factor=1.0)),
}
"""What is called before it, and the misuse."""

OF_TORCH = {
    *("unscale_ after step", "step twice"),
    "pickle in between",
    "copy in between",
    "update alone",
    *("first step", "first unscale_", "first update", "first look"),
}
"""Misuses that PyTorch's own methods refuse."""


def misused(make, case):
    """The error that a misuse raises, and the state before and after it."""
    first, misuse = MISUSES[case]
    scaler, optimizer, _ = scaled(make)
    if first:
        getattr(scaler, first)(optimizer)
    before = scaler.state_dict()
    with pytest.raises(Exception) as caught:
        misuse(scaler, optimizer)
    return caught.value, before, scaler.state_dict()


@pytest.mark.parametrize("case", MISUSES)
def test_what_torch_raises_is_caught_by_the_same_clause(case):
    theirs, _, _ = misused(MAKERS["torch"], case)
    ours, before, after = misused(GradScaler, case)
    assert isinstance(ours, type(theirs))
    assert isinstance(ours, LossScaleError) == (case not in OF_TORCH)
    if case in OF_TORCH:
        assert str(ours) == str(theirs)
    assert after == before


WRAPPER = lossscale.torch.LossScaleOptimizer
OF_LISTS = {
    "one has stepped": (lambda s, a, b: s.step(b), lambda s, a, b: s.step([a, b])),
    "unscaled, one has stepped": (
        lambda s, a, b: (s.unscale_(a), s.step(b)),
        lambda s, a, b: s.step([a, b]),
    ),
    "twice in it": (None, lambda s, a, b: s.step([a, b, a])),
    "closure": (None, lambda s, a, b: s.step([a, b], closure=None)),
    "closure by place": (None, lambda s, a, b: s.step([a, b], lambda: 1.0)),
    "float16": (None, lambda s, a, b: s.step([a, b, of_float16()])),
    "no optimizer": (None, lambda s, a, b: s.step([a, b, 3])),
    "list": (None, lambda s, a, b: s.step([a, [b]])),
    "wrapper": (None, lambda s, a, b: s.step([a, WRAPPER(of_float16())])),
    "unscale_": (None, lambda s, a, b: s.unscale_([a, b])),
}
"""What is called before it, and the misuse."""


@pytest.mark.parametrize("case", OF_LISTS)
@pytest.mark.parametrize(
    "names", list(itertools.product(["sgd-momentum", "adamw-fused"], repeat=2))
)
def test_what_one_of_several_optimizers_raises_changes_none(names, case):
    first, misuse = OF_LISTS[case]
    weights, scaler = parameters(2), GradScaler("cpu", init_scale=8.0)
    optimizers = [OPTIMIZERS[name]([w]) for name, w in zip(names, weights, strict=True)]
    scaler.scale(sum(w.sum() for w in weights)).backward()
    if first:
        first(scaler, *optimizers)

    def shown():
        stages = {key: state["stage"] for key, state in scaler._per_optimizer_states.items()}
        states = [each.state_dict() for each in (*optimizers, scaler)]
        return bits([weights, [w.grad for w in weights], states]), stages

    before = shown()
    with pytest.raises(LossScaleError):
        misuse(scaler, *optimizers)
    assert shown() == before


def test_after_a_misuse_the_loop_goes_on():
    scaler, optimizer, weights = scaled(GradScaler)
    for misuse in (
        lambda: scaler.step(optimizer, closure=print),
        lambda: scaler.scale("loss"),
        scaler.update,
    ):
        with pytest.raises((RuntimeError, ValueError, AssertionError)):
            misuse()
    scaler.step(optimizer)
    scaler.update()
    assert numbers(weights) == [[0.5] * 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": 65536.0}, r"torch\.cuda\.amp\.GradScaler"),
        ({"enabled": 1}, "`enabled`"),
        ({"min_scale": 2.0, "init_scale": 1.0}, "`initial_scale` must be between"),
        ({"max_scale": 2.0**127}, "`max_scale`"),
        ({"init_scale": "8"}, "`initial_scale` must be a number"),
        ({"rule": FixedScale(8.0), "growth_factor": 3.0}, "`rule` already says.*growth_factor=3.0"),
        ({"rule": DynamicScale(), "min_scale": 2.0}, "`rule` already says.*min_scale=2.0"),
    ],
    ids=str,
)
def test_arguments(arguments, message):
    with pytest.raises(AssertionError, match=message) as caught:
        GradScaler(**{"device": "cpu", **arguments})
    assert isinstance(caught.value, ValueError)


def test_rules_and_groups():
    with pytest.raises(ArgumentTypeError, match="process_group"):
        GradScaler("cpu", process_group="world")
    with pytest.raises(ArgumentTypeError, match="scaling rule"):
        GradScaler("cpu", rule=8.0)
    fixed = GradScaler("cpu", rule=FixedScale(8.0))
    for misuse in (lambda: fixed.set_growth_factor(3.0), lambda: fixed.update(4.0)):
        with pytest.raises(LossScaleError, match="rule"):
            misuse()
    assert fixed.get_scale() == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_without_cuda_it_disables_itself_with_a_warning():
    with pytest.warns(UserWarning, match="CUDA is not available. *Disabling"):
        scaler = GradScaler()
    assert not scaler.is_enabled()
    weights = parameters(1)
    one_step(scaler, OPTIMIZERS["sgd"](weights), weights)
    assert numbers(weights) == [[0.5] * 3]


def test_what_is_stepped_is_checked():
    scaler, optimizer, weights = scaled(GradScaler)
    wrapper = lossscale.torch.LossScaleOptimizer(torch.optim.SGD(weights, lr=1.0))
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(AlreadyWrappedError, match="its inner optimizer"):
            call(wrapper)
        with pytest.raises(ArgumentTypeError, match=r"steps an optimizer.*Linear"):
            call(torch.nn.Linear(1, 1))
    assert not scaler._per_optimizer_states
    scaler.step(optimizer)
    assert numbers(weights) == [[0.5] * 3]


class WithoutHooks:
    """What looks like an optimizer, and has no hooks."""

    def __init__(self, weights):
        self.param_groups = [{"params": weights}]

    def step(self):
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight -= 0.5 * weight.grad


def test_an_optimizer_without_hooks_is_stepped_as_ever():
    weights = parameters(1)
    optimizer, scaler = WithoutHooks(weights), GradScaler("cpu", init_scale=8.0)
    scaler.scale(weights[0].sum()).backward()
    scaler.step(optimizer)
    assert numbers(weights) == [[0.5] * 3]
