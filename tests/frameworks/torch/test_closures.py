"""Steps with a closure: evaluated once, or by LBFGS as often as it likes."""

import contextlib

import pytest
import torch

from frameworks.torch.support import (
    alone,
    assert_same_without_scaling,
    bits,
    derive,
    parameters,
    snapshot,
    wrapped,
)
from lossscale import DynamicScale, LossScaleWarning
from lossscale.errors import ArgumentTypeError, GradientsError
from recording_rule import RecordingRule


def closure_of(optimizer, loss_fn, clip=None, way="scale_loss"):
    """A closure; that of an optimizer which is not wrapped scales nothing."""

    def closure():
        optimizer.zero_grad()
        loss = loss_fn()
        derive(optimizer, loss, way)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        return loss

    return closure


def starting_point():
    return torch.nn.Parameter(torch.tensor([-1.2, 1.0]))


def rosenbrock(point):
    x, y = point
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def without_a_finite_gradient(point):
    """A loss of 0."""
    return (point - point.detach()).abs().sum().sqrt()


@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
@pytest.mark.parametrize("scale", [2.0**15, 2.0**124])
@pytest.mark.parametrize("way", ["verb", "scale_loss"])
def test_lbfgs_ends_bit_identical_to_no_loss_scaling(scale, line_search, way):
    def run(wrap):
        point, evaluations = starting_point(), []
        inner = torch.optim.LBFGS([point], lr=0.5, line_search_fn=line_search, max_iter=5)
        optimizer = wrap(inner, rule=DynamicScale(scale))
        closure = closure_of(optimizer, lambda: evaluations.append(1) or rosenbrock(point), way=way)
        losses = [optimizer.step(closure).detach() for _ in range(8)]
        return snapshot([point], optimizer), bits(losses), len(evaluations), optimizer

    *ours, evaluations, optimizer = run(wrapped)
    *plain, plain_evaluations, _ = run(alone)
    assert ours == plain
    again = evaluations - plain_evaluations
    assert (again > 0) is (scale == 2.0**124)
    # An evaluation that was made again is no skipped step.
    assert optimizer.steps_skipped == 0
    assert optimizer.iterations == 8
    assert float(optimizer.loss_scale) == scale / 2.0**again


def test_lbfgs_is_not_stepped_where_no_scale_helps():
    point, scales = starting_point(), []
    optimizer = wrapped(torch.optim.LBFGS([point]), initial_scale=4)
    before = snapshot([point], optimizer)

    def loss_fn():
        scales.append(float(optimizer.loss_scale))
        return without_a_finite_gradient(point)

    optimizer.step(closure_of(optimizer, loss_fn))
    assert snapshot([point], optimizer) == before
    assert scales == [4.0, 2.0, 1.0]
    assert (optimizer.steps_skipped, optimizer.last_step_skipped) == (1, True)
    evaluations = []
    nan = closure_of(optimizer, lambda: evaluations.append(1) or (point * torch.nan).sum())
    optimizer.step(nan)
    assert len(evaluations) == 1
    assert snapshot([point], optimizer) == before


def test_lbfgs_lowers_the_scale_by_a_rule_that_looks():
    point, scales = starting_point(), []
    inner = torch.optim.LBFGS([point], line_search_fn="strong_wolfe")
    optimizer = wrapped(inner, rule=RecordingRule())

    def loss_fn():
        scales.append(float(optimizer.loss_scale))
        loss = point.square().sum()
        return loss if len(scales) > 2 else loss + without_a_finite_gradient(point)

    optimizer.step(closure_of(optimizer, loss_fn))
    assert scales[:4] == [8.0, 4.0, 2.0, 2.0]
    assert optimizer.steps_skipped == 0


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_a_closure_is_evaluated_once_and_its_loss_returned(cls):
    def run(wrap, factors):
        given, left = parameters((3,)), list(factors)
        optimizer = wrap(cls(given, lr=0.1))

        def loss_fn():
            assert torch.is_grad_enabled()
            return given[0].square().sum() * left.pop(0)

        with torch.no_grad():
            losses = [optimizer.step(closure_of(optimizer, loss_fn)) for _ in factors]
        assert left == []
        return bits([losses[0], losses[-1]]), snapshot(given, optimizer)

    assert run(wrapped, (1, torch.inf, 1)) == run(alone, (1, 1))


# Mistakes.


WRONG = {
    "none": (lambda o, p: None, TypeError, "closure"),
    "returns the scaled loss": (
        lambda o, p: closure_of(o.inner_optimizer, lambda: o.scale_loss(rosenbrock(p))),
        GradientsError,
        "returned the scaled loss.*LBFGS",
    ),
    "returns nothing": (
        lambda o, p: lambda: o.scale_loss(rosenbrock(p)).backward(),
        ArgumentTypeError,
        "must return the loss: LBFGS",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_lbfgs_and_a_wrong_closure(case):
    make, error, words = WRONG[case]
    point = starting_point()
    optimizer = wrapped(torch.optim.LBFGS([point]))
    before = bits(point)
    with pytest.raises(error, match=words):
        optimizer.step(make(optimizer, point))
    assert bits(point) == before


def test_lbfgs_and_a_closure_that_scales_nothing():
    def run(wrap):
        point = starting_point()
        optimizer = wrap(inner := torch.optim.LBFGS([point]))
        warns = pytest.warns(LossScaleWarning, match="^The optimizer has scaled no loss")
        with contextlib.nullcontext() if optimizer is inner else warns:
            optimizer.step(closure_of(inner, lambda: rosenbrock(point)))
        return bits(point)

    assert_same_without_scaling(run)


def test_an_evaluation_that_scales_nothing_does_not_lower_the_scale():
    point = starting_point()
    optimizer = wrapped(inner := torch.optim.LBFGS([point]))
    with pytest.warns(LossScaleWarning, match=r"optimizer.backward\(loss\)"):
        optimizer.step(closure_of(inner, lambda: without_a_finite_gradient(point)))
    assert float(optimizer.loss_scale) == 2.0**15
    assert point.tolist() == pytest.approx([-1.2, 1.0])
