"""Steps with a closure: evaluated once, or by LBFGS as often as it likes."""

import pytest
import torch

import lossscale
from frameworks.torch.support import bits, parameters, snapshot, wrapped
from lossscale import DynamicScale


def rosenbrock(point):
    x, y = point
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def minimized(wrap, scale=2.0**15, line_search="strong_wolfe", steps=8):
    point = torch.nn.Parameter(torch.tensor([-1.2, 1.0]))
    inner = torch.optim.LBFGS([point], lr=0.5, line_search_fn=line_search, max_iter=5)
    optimizer = wrapped(inner, rule=DynamicScale(scale)) if wrap else inner
    evaluations, losses = [0], []

    def closure():
        evaluations[0] += 1
        optimizer.zero_grad()
        loss = rosenbrock(point)
        (optimizer.scale_loss(loss) if wrap else loss).backward()
        return loss

    for _ in range(steps):
        losses.append(optimizer.step(closure).detach())
    return point, optimizer, evaluations[0], losses


@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
@pytest.mark.parametrize("scale", [2.0**15, 2.0**124])
def test_lbfgs_ends_bit_identical_to_no_loss_scaling(scale, line_search):
    point, optimizer, evaluations, losses = minimized(True, scale, line_search)
    plain, bare, plain_evaluations, plain_losses = minimized(False, line_search=line_search)
    assert snapshot([point], optimizer) == snapshot([plain], bare)
    assert bits(losses) == bits(plain_losses)
    again = evaluations - plain_evaluations
    assert (again > 0) is (scale == 2.0**124)
    # An evaluation that was made again is no skipped step.
    assert optimizer.steps_skipped == 0
    assert optimizer.iterations == 8
    assert float(optimizer.loss_scale) == scale / 2.0**again


def test_lbfgs_is_not_stepped_where_no_scale_helps():
    [point] = parameters((2,))
    optimizer = wrapped(torch.optim.LBFGS([point]), initial_scale=4)
    evaluations = []

    def closure():
        evaluations.append(float(optimizer.loss_scale))
        optimizer.zero_grad()
        # A finite loss whose gradient never is.
        loss = (point - point.detach()).abs().sum().sqrt()
        optimizer.scale_loss(loss).backward()
        return loss

    before = snapshot([point], optimizer)
    optimizer.step(closure)
    assert snapshot([point], optimizer) == before
    assert evaluations == [4.0, 2.0, 1.0]
    assert (optimizer.steps_skipped, optimizer.last_step_skipped) == (1, True)

    def spoiled():
        evaluations.append(None)
        optimizer.zero_grad()
        loss = (point * torch.nan).sum()
        optimizer.scale_loss(loss).backward()
        return loss

    optimizer.step(spoiled)
    assert evaluations.count(None) == 1
    assert snapshot([point], optimizer) == before


def test_lbfgs_without_a_closure_says_so():
    optimizer = wrapped(torch.optim.LBFGS(parameters((2,))))
    with pytest.raises(TypeError, match="closure"):
        optimizer.step()


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_a_closure_is_evaluated_once_and_its_loss_returned(cls):
    runs = []
    for wrap in (True, False):
        given = parameters((3,))
        optimizer = cls(given, lr=0.1)
        optimizer = wrapped(optimizer) if wrap else optimizer
        calls = []

        def closure(optimizer=optimizer, given=given, calls=calls, wrap=wrap):
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = given[0].square().sum() * (torch.inf if len(calls) == 2 and wrap else 1)
            (optimizer.scale_loss(loss) if wrap else loss).backward()
            return loss

        with torch.no_grad():
            losses = [optimizer.step(closure) for _ in range(3 if wrap else 2)]
        assert calls == [True] * len(losses)
        runs.append((bits([losses[0], losses[-1]]), snapshot(given, optimizer)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_minimize_with_lbfgs(clip):
    runs = []
    for wrap in (True, False):
        point = torch.nn.Parameter(torch.tensor([-1.2, 1.0]))
        inner = torch.optim.LBFGS([point], line_search_fn="strong_wolfe")
        if wrap:
            optimizer = lossscale.torch.LossScaleOptimizer(inner, clip_norm=clip)
            for _ in range(3):
                optimizer.minimize(lambda point=point: rosenbrock(point))
        else:
            optimizer = inner

            def closure(point=point, inner=inner):
                inner.zero_grad()
                loss = rosenbrock(point)
                loss.backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_([point], clip)
                return loss

            for _ in range(3):
                optimizer.step(closure)
        runs.append(snapshot([point], optimizer))
    assert runs[0] == runs[1]
