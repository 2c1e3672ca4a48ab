"""`optimizer.backward(loss)` leaves the gradients of plain training, bit for bit; closures.

With every optimizer it trains in test_every_optimizer.py, in every order of calls in
test_scaled_gradients.py.
"""

import warnings
import weakref

import pytest
import torch

import lossscale
from frameworks.torch.support import (
    alone,
    bits,
    derive,
    ends_as_without_scaling,
    parameter,
    parameters,
    wrapped,
)
from lossscale.torch import MasterWeights


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(number, rows=4):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))


def sgd(given, lr=0.1):
    return torch.optim.SGD(given, lr=lr)


def gradients_of(given):
    return bits([p.grad for p in given])


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


# Steps with a closure.


class EvaluatesFirst(torch.optim.SGD):
    """As optimizers are written outside of PyTorch, Schedule-Free's among them."""

    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        super().step()
        return loss


class TakesNone(torch.optim.SGD):
    def step(self):
        super().step()


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("way", ["verb", "scale_loss"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, EvaluatesFirst, TakesNone])
def test_a_closure_is_evaluated_once_before_the_step_and_its_loss_returned(cls, way, masters):
    def run(wrap, factors):
        given, left = parameters((3,)), list(factors)
        inner = cls(given, lr=0.1)
        optimizer = wrap(MasterWeights(inner) if masters else inner)

        def closure():
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = given[0].square().sum() * left.pop(0)
            derive(optimizer, loss, way)
            return loss

        with torch.no_grad():
            if optimizer is inner and cls is TakesNone:
                losses = [(torch.enable_grad()(closure)(), inner.step())[0] for _ in factors]
            else:
                losses = [optimizer.step(closure) for _ in factors]
        assert left == []
        return bits([losses[0], losses[-1]]), bits(given)

    assert run(wrapped, (1, torch.inf, 1)) == run(alone, (1, 1))


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
