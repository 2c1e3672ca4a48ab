"""`optimizer.backward(loss)` leaves the gradients of plain training, bit for bit.

With every optimizer it trains in test_every_optimizer.py, in every order of calls in
test_scaled_gradients.py.
"""

import warnings
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from frameworks.torch.support import (
    alone,
    assert_same_without_scaling,
    bits,
    derive,
    parameter,
    wrapped,
)


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


def test_leaves_that_are_not_of_the_optimizer():
    def run(wrap):
        trained, other, x = model(), model(), batch(1).requires_grad_()
        optimizer = wrap(sgd(trained.parameters()))
        for _ in range(2):
            derive(optimizer, (trained(x) * other(x)).mean())
        return gradients_of([*trained.parameters(), *other.parameters(), x])

    assert_same_without_scaling(run)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        raise RuntimeError("no")


def test_an_error_in_backward_leaves_true_gradients():
    net, x = model(), torch.ones(2, 8)
    optimizer = wrapped(sgd(net.parameters()))
    optimizer.backward(net(x).sum())
    before = gradients_of(net.parameters())
    with pytest.raises(RuntimeError, match="no"):
        optimizer.backward(Fails.apply(net(x)).sum())
    assert gradients_of(net.parameters()) == before
    optimizer.step()
    assert optimizer.iterations == 1


def test_gradient_and_inputs():
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
    assert optimizer.step() is None
    assert optimizer.iterations == 1


def test_retained_and_second_derivatives():
    def run(wrap):
        net = model()
        weights = list(net.parameters())
        optimizer = wrap(sgd(weights))
        hidden = net(torch.ones(2, 8))
        derive(optimizer, hidden.abs().mean(), retain_graph=True)
        with warnings.catch_warnings():
            # PyTorch warns of `create_graph`.
            warnings.simplefilter("ignore")
            derive(optimizer, hidden.square().mean(), create_graph=True)
        first = [p.grad for p in weights]
        second = torch.autograd.grad(first, weights, [torch.ones_like(p) for p in weights])
        return bits(first), second

    (first, second), (expected, of_plain) = run(wrapped), run(alone)
    assert first == expected
    torch.testing.assert_close(second, of_plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sparse_complex_wide_and_shared(dtype):
    def run(wrap):
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 3, sparse=True, dtype=dtype)
        number = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        optimizer = wrap(sgd([*table.parameters(), number]))
        for _ in range(2):
            rows = table(torch.tensor([1, 1, 2])).float()
            derive(optimizer, rows.square().mean() + (number * number).abs().sum())
        return gradients_of([table.weight, number])

    assert_same_without_scaling(run)


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


class Sam(torch.optim.SGD):
    """Moves before it evaluates its closure a second time."""

    @torch.no_grad()
    def step(self, closure=None):
        weights = self.param_groups[0]["params"]
        before = [p.clone() for p in weights]
        with torch.enable_grad():
            closure()
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        for p in weights:
            p.data.add_(p.grad / norm, alpha=0.5)
        with torch.enable_grad():
            loss = closure()
        for p, value in zip(weights, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


@pytest.mark.parametrize(("scale", "overflow"), [(2.0**15, None), (2.0**126, None), (2.0**15, 1)])
def test_a_closure_that_moves_first_is_evaluated_lower_or_skipped(scale, overflow):
    def run(wrap):
        net = model()
        optimizer = wrap(Sam(net.parameters(), lr=0.1), initial_scale=scale)
        for number in range(3):
            if number == overflow and wrap is alone:
                continue

            def closure(number=number):
                optimizer.zero_grad()
                loss = net(batch(number)).square().mean()
                derive(optimizer, loss * (torch.inf if number == overflow else 1.0))
                return loss

            optimizer.step(closure)
        assert wrap is alone or optimizer.steps_skipped == (overflow is not None)
        return bits(list(net.parameters()))

    assert_same_without_scaling(run)


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
