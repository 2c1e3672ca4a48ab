"""`optimizer.backward(loss)` leaves the gradients of plain training, bit for bit; closures.

With every optimizer it trains in test_every_optimizer.py, in every order of calls in
test_scaled_gradients.py.
"""

import contextlib
import math
import warnings
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lossscale
from frameworks.torch.support import (
    Sam,
    alone,
    bits,
    derive,
    ends_as_without_scaling,
    parameter,
    parameters,
    snapshot,
    wrapped,
)
from lossscale import DynamicScale, FixedScale, LossScaleWarning
from lossscale.errors import ArgumentTypeError, GradientsError
from lossscale.torch import Monitor
from recording_rule import RecordingRule


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(number, rows=4):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))


def sgd(given, lr=0.1):
    return torch.optim.SGD(given, lr=lr)


def gradients_of(given):
    return bits([p.grad for p in given])


FORWARDS = ["autocast", "checkpoint reentrant", "checkpoint", "compiled"]


@pytest.mark.parametrize("kind", FORWARDS)
def test_forward_passes_of_other_kinds(kind):
    def run(wrap):
        net = model()
        optimizer = wrap(sgd(net.parameters()))
        forward = torch.compile(net, backend="aot_eager") if kind == "compiled" else net
        for number in range(3):
            x = batch(number).requires_grad_("reentrant" in kind)
            if kind.startswith("checkpoint"):
                y = checkpoint(net, x, use_reentrant="reentrant" in kind)
            else:
                with torch.autocast("cpu", torch.float16, enabled=kind == "autocast"):
                    y = forward(x)
            derive(optimizer, y.float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in net.parameters()]

    # Of float16 plain training loses what is small.
    close = 1e-2 * (kind == "autocast")
    torch.testing.assert_close(run(wrapped), run(alone), rtol=0, atol=close)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        raise RuntimeError("no")


def test_gradient_and_inputs_and_an_error_that_leaves_true_gradients():
    net, x, given = model(), torch.ones(2, 8), torch.ones(2, 4)
    weights = list(net.parameters())
    optimizer = wrapped(sgd(weights))
    optimizer.backward(net(x), gradient=given)
    found = gradients_of(weights)
    optimizer.zero_grad()
    net(x).backward(given)
    assert found == gradients_of(weights)
    optimizer.zero_grad()
    optimizer.backward(net(x).sum(), inputs=weights[:2])
    assert weights[2].grad is None
    before = gradients_of(weights)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.backward(Fails.apply(net(x)).sum())
    assert gradients_of(weights) == before
    assert optimizer.step() is None
    assert optimizer.iterations == 1


def test_retained_and_second_derivatives():
    def run(wrap):
        net = model()
        weights = list(net.parameters())
        optimizer = wrap(sgd(weights))
        hidden = net(torch.ones(2, 8))
        derive(optimizer, hidden.abs().mean(), retain_graph=True)
        # PyTorch warns of `create_graph`.
        with warnings.catch_warnings(action="ignore"):
            derive(optimizer, hidden.square().mean(), create_graph=True)
        first = [p.grad for p in weights]
        second = torch.autograd.grad(first, weights, [torch.ones_like(p) for p in weights])
        return bits(first), second

    (first, second), (expected, of_plain) = run(wrapped), run(alone)
    assert first == expected
    torch.testing.assert_close(second, of_plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@ends_as_without_scaling
def test_sparse_complex_wide_and_shared_and_leaves_that_are_not_of_the_optimizer(wrap, dtype):
    torch.manual_seed(0)
    table = torch.nn.Embedding(10, 3, sparse=True, dtype=dtype)
    number = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    other, x = model(), batch(1).requires_grad_()
    optimizer = wrap(sgd([*table.parameters(), number]))
    for _ in range(2):
        rows = table(torch.tensor([1, 1, 2])).float()
        loss = rows.square().mean() + (number * number).abs().sum()
        derive(optimizer, loss * other(x).square().mean())
    return gradients_of([table.weight, number, *other.parameters(), x])


def test_only_the_last_gradient_is_kept_until_the_step():
    given = [parameter(), parameter()]
    optimizer = wrapped(sgd(given))
    optimizer.backward(given[0].sum() + given[1].sum())
    gradients = [weakref.ref(p.grad) for p in given]
    given[0].grad = None
    assert gradients[0]() is None
    optimizer.step()
    given[1].grad = None
    assert gradients[1]() is None


@pytest.mark.parametrize(("scale", "overflow"), [(2.0**15, None), (2.0**126, None), (2.0**15, 1)])
@ends_as_without_scaling
def test_a_closure_that_moves_first_is_evaluated_lower_or_skipped(wrap, scale, overflow):
    net = model()
    optimizer = wrap(Sam(net.parameters(), rho=0.5), initial_scale=scale)
    for number in range(3):
        if number == overflow and wrap is alone:
            continue
        factor = torch.inf if number == overflow else 1.0

        def loss_fn(number=number, factor=factor):
            return net(batch(number)).square().mean() * factor

        optimizer.step(closure_of(optimizer, loss_fn, "verb"))
    assert wrap is alone or optimizer.steps_skipped == (overflow is not None)
    return bits(list(net.parameters()))


@pytest.mark.parametrize("overflows", [False, True])
def test_gradients_that_are_combined_after_zero_grad_are_applied_without_a_warning(overflows):
    weight = parameter()
    optimizer = wrapped(sgd([weight], lr=0.5))
    grads = []
    for slope in (1.0, torch.inf if overflows else 2.0):
        optimizer.zero_grad()
        assert optimizer.backward((weight * slope).sum()).item() is (slope < torch.inf)
        grads.append(weight.grad.clone())
    optimizer.zero_grad()
    weight.grad = grads[0] + grads[1]
    optimizer.step()
    assert weight.tolist() == ([1.0, 1.0] if overflows else [-0.5, -0.5])
    # Each overflow lowers the scale once, when `zero_grad` clears it.
    assert float(optimizer.loss_scale) == 2.0 ** (15 - overflows)


# Steps with a closure: evaluated once, or by LBFGS as often as it likes.


def closure_of(optimizer, loss_fn, way="scale_loss"):
    """A closure; that of an optimizer which is not wrapped scales nothing."""

    def closure():
        optimizer.zero_grad()
        loss = loss_fn()
        derive(optimizer, loss, way)
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
        closure = closure_of(optimizer, lambda: evaluations.append(1) or rosenbrock(point), way)
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
    # An evaluation that scales nothing does not lower the scale.
    optimizer = wrapped(inner := torch.optim.LBFGS([point]))
    with pytest.warns(LossScaleWarning, match=r"optimizer.backward\(loss\)"):
        optimizer.step(closure_of(inner, lambda: without_a_finite_gradient(point)))
    assert float(optimizer.loss_scale) == 2.0**15
    assert point.tolist() == pytest.approx([-1.2, 1.0])


@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_lbfgs_is_put_back_if_a_later_evaluation_is_not_finite(factor, line_search):
    def run(steps):
        point, evaluations = starting_point(), []
        inner = torch.optim.LBFGS([point], lr=0.5, line_search_fn=line_search, max_iter=5)
        rule = FixedScale(8.0, skip_nonfinite=True)
        optimizer = wrapped(inner, rule=rule)
        monitor = Monitor(optimizer, [("point", point)], on_floor="ignore")
        for is_broken in steps:
            evaluations.clear()

            def loss_fn(is_broken=is_broken):
                evaluations.append(1)
                later = factor if is_broken and len(evaluations) > 2 else 1.0
                return rosenbrock(point) * later

            optimizer.step(closure_of(optimizer, loss_fn))
            assert optimizer.last_step_skipped == is_broken
            monitor.step(1.0)
            assert monitor.last_record.skipped == is_broken
            assert bool(monitor.last_record.nonfinite) == is_broken
        state = inner.state_dict()["state"]
        return bits([point]), {k: bits(v) for k, v in state[0].items() if torch.is_tensor(v)}, state

    *broken, state = run([False, True, False, True, False])
    *without, other = run([False, False, False])
    assert broken == without
    assert state[0]["n_iter"] == other[0]["n_iter"]


def test_lbfgs_lowers_the_scale_by_a_custom_rule():
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


def returning_the_scaled_loss(o, p):
    return closure_of(o.inner_optimizer, lambda: o.scale_loss(rosenbrock(p)))


def returning_nothing(o, p):
    return lambda: o.scale_loss(rosenbrock(p)).backward()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda o, p: None, TypeError, "closure"),
        (returning_the_scaled_loss, GradientsError, "returned the scaled loss.*LBFGS"),
        (returning_nothing, ArgumentTypeError, "must return the loss: LBFGS"),
    ],
)
def test_lbfgs_and_a_wrong_closure(make, error, words):
    point = starting_point()
    optimizer = wrapped(torch.optim.LBFGS([point]))
    before = bits(point)
    with pytest.raises(error, match=words):
        optimizer.step(make(optimizer, point))
    assert bits(point) == before


@ends_as_without_scaling
def test_lbfgs_and_a_closure_that_scales_nothing(wrap):
    point = starting_point()
    optimizer = wrap(inner := torch.optim.LBFGS([point]))
    warns = pytest.warns(LossScaleWarning, match="^The optimizer has scaled no loss")
    with contextlib.nullcontext() if optimizer is inner else warns:
        optimizer.step(closure_of(inner, lambda: rosenbrock(point)))
    return bits(point)


CHANGES = {
    "one number": lambda a, b: a.grad[0].fill_(torch.inf),
    "all": lambda a, b: torch._foreach_div_([a.grad, b.grad], 0.0),
    "replaced": lambda a, b: setattr(a, "grad", a.grad + torch.nan),
    "clipped": lambda a, b: (torch.nn.utils.clip_grad_norm_([a, b], 0.1), a.grad.mul_(torch.inf)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("settings", [{}, {"decide": "device"}, {"clip_norm": 1.0}])
def test_a_gradient_that_is_spoiled_after_it_was_checked_skips_the_step(change, settings):
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in "ab")
    inner = torch.optim.SGD([a, b], lr=0.5, fused=True)
    optimizer = lossscale.torch.LossScaleOptimizer(inner, initial_scale=8.0, **settings)
    optimizer.backward((a + b).sum() * 0.1)
    change(a, b)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert (a.tolist(), b.tolist(), float(optimizer.loss_scale)) == ([1.0] * 2, [1.0] * 2, 4.0)
