"""Inner methods, strange optimizers and strange gradients, beside plain training."""

import copy
import functools
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
    scaler,
    train_step,
    wrapped,
)
from lossscale.errors import CallOrderError, UnsupportedError
from lossscale.torch import GradScaler

SGD = torch.optim.SGD


def leaf(*values, dtype=torch.float32):
    """A tensor to train. A copy of an `nn.Parameter` would lose its gradient."""
    return torch.tensor(values or (1.0, 2.0), dtype=dtype, requires_grad=True)


# Methods of the inner optimizer.


class Methods(SGD):
    """Has the methods of SAM, Sophia and Schedule-Free, and notes the gradients they find."""

    def __init__(self, given):
        super().__init__(given, lr=0.5)
        self.found = []

    def first_step(self):
        self.found.append([p.grad.clone() for g in self.param_groups for p in g["params"]])

    update_hessian = train = eval = first_step


METHODS = ["first_step", "update_hessian", "train", "eval"]


@pytest.mark.parametrize("way", ["verb", "unscaled"])
@pytest.mark.parametrize("several", [False, True])
@ends_as_without_scaling
def test_inner_methods_find_true_gradients(wrap, way, several):
    a, b = leaf(), leaf(3.0)
    parts = [Methods([a]), Methods([b])] if several else Methods([a, b])
    optimizer = wrap(parts)
    called = parts if several and optimizer is parts else [optimizer]
    derive(optimizer, (a * a).sum() + (b**3).sum(), way)
    for name in (*METHODS, "step"):
        for each in called:
            getattr(each, name)()
    return bits([a, b, [each.found for each in (parts if several else [parts])]])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
def test_inner_methods_on_scaled_or_overflowed_gradients_are_an_error(name, several, overflows):
    a = leaf()
    inner = Methods([a])
    optimizer = wrapped([inner, Methods([leaf()])] if several else inner)
    factor, way, words = (torch.inf, "verb", "overflowed") if overflows else (1, "scaled", "scale")
    derive(optimizer, (a * factor).sum(), way)
    with pytest.raises(CallOrderError, match=rf"{name}\(\) of .* would use gradients .*{words}"):
        getattr(optimizer, name)()
    assert inner.found == []
    if not overflows:
        # A step by the inner name, alone.
        with pytest.raises(CallOrderError, match=r"step\(\) of Methods .*optimizer.backward\("):
            inner.step()
    optimizer.step()
    assert a.tolist() == ([1.0, 2.0] if overflows else [0.5, 1.5])


@pytest.mark.parametrize("several", [False, True])
def test_a_step_by_the_inner_name_of_a_copy_is_an_error_on_scaled_gradients_alone(several):
    inner = SGD([leaf()], lr=0.5, fused=True)
    optimizer = copy.deepcopy(wrapped([inner, SGD([leaf()], lr=0.5)] if several else inner))
    inner = optimizer.optimizers[0] if several else optimizer.inner_optimizer
    [a] = inner.param_groups[0]["params"]
    optimizer.scale_loss(a.sum()).backward()
    with pytest.raises(CallOrderError, match=r"step\(\) of SGD .*optimizer.backward\(loss\)"):
        inner.step()
    assert a.tolist() == [1.0, 2.0]
    optimizer.unscale_()
    inner.step()
    assert a.tolist() == [0.5, 1.5]


# Optimizers that cannot be wrapped, or are of a strange kind.


class PostLocalSGDOptimizer(SGD):
    """PyTorch's communicates in its step."""


def test_what_steps_inside_of_backward_or_alone_is_refused():
    a = leaf()
    inner = SGD([a], lr=0.5)
    local = PostLocalSGDOptimizer([leaf()], lr=0.5)
    for each in (local, [local, inner]):
        with pytest.raises(UnsupportedError, match=r"process_group=torch\.distributed\.group"):
            wrapped(each)
    wrapped(local, process_group=[])
    for owner, name, words in (
        (inner, "_overlap_with_ddp", "ZeroRedundancyOptimizer"),
        (a, "_in_backward_optimizers", "_apply_optimizer_in_backward"),
    ):
        setattr(owner, name, True)
        with pytest.raises(UnsupportedError, match=f"{words}.* inside backward"):
            wrapped(inner)
        delattr(owner, name)


class Unhashable(SGD):
    __hash__ = None


class Equal(SGD):
    __hash__ = SGD.__hash__

    def __eq__(self, other):
        return isinstance(other, Equal)


class Slots:
    """An optimizer of somebody's own, which cannot be referred to weakly."""

    __slots__ = ("param_groups", "state")

    def __init__(self, given, lr):
        self.param_groups, self.state = [{"params": list(given), "lr": lr}], {}

    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.5)


@pytest.mark.parametrize("cls", [Unhashable, Equal, Slots])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_scaler_tells_optimizers_apart_that_are_equal_or_have_no_hash(cls, as_list):
    """The first of two overflows once: it is skipped by itself, or both are in a list."""
    a, b = leaf(), leaf()
    parts, scaler = [cls([a], lr=0.5), cls([b], lr=0.5)], GradScaler("cpu", init_scale=8.0)
    for factor in (torch.inf, 1.0):
        a.grad = b.grad = None
        scaler.scale((a * factor).sum() + b.sum()).backward()
        for each in [parts] if as_list else parts:
            scaler.step(each)
        scaler.update()
    assert (a.tolist(), b.tolist()) == ([0.5, 1.5], [0.5, 1.5] if as_list else [0.0, 1.0])


@pytest.mark.parametrize("kind", ["verb", "scale_loss", "device", "scaler"])
def test_no_gradient_in_ten_steps_is_warned_of_once(kind):
    trained, inner = leaf(), SGD([leaf()], lr=0.5, fused=True)
    if kind == "scaler":
        optimizer = scaler(inner)
    else:
        optimizer = wrapped(inner, decide="device" if kind == "device" else "host")
    said = []
    for _ in range(22):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(optimizer, trained.sum(), kind)
        said.append([str(each.message) for each in caught])
    assert [number for number, each in enumerate(said) if each] == [9]
    assert "No parameter of SGD has had a gradient in 10 steps" in said[9][0]


# Gradients that are not tensors of their own.

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -4.0]])
WAYS = ["verb", "scaled", "unscaled", "scaler"]
LOSSES = {
    # Autograd hands one tensor to both terms.
    "summed": lambda a, b: ((a + b) * X).sum(),
    "expanded": lambda a, b: a.sum() * 3 + b.sum(),
    "negated": lambda a, b: (torch.view_as_complex(torch.stack([a, b], -1)).conj().imag * X).sum(),
    "conjugated": lambda a, b: (torch.complex(a, b).conj() * torch.complex(X, -X)).real.sum(),
    "transposed": lambda a, b: (a.T @ b).square().mean() / 2**12,
    "squared": lambda a, b: (a + b).square().sum(),
}


def overlap(a, b):
    """Both share the rows in the middle."""
    whole = torch.cat([a, b])
    return whole[: len(a)], whole[1 : len(a) + 1]


PLACES = {
    "of its own": lambda a, b: (a, b),
    "one tensor": lambda a, b: (a, a),
    "a view": lambda a, b: (a, a.view(a.shape)),
    "detached": lambda a, b: (a, a.detach()),
    "overlap": overlap,
}
SETTINGS = {
    "host": {},
    "device": {"decide": "device"},
    "fixed": {"rule": lossscale.FixedScale(8.0)},
    "needs": {"rule": lossscale.FixedScale(8.0, skip_nonfinite=True)},
}
SHARED = [
    *((name, place, way, "host", 0) for name in LOSSES for place in PLACES for way in WAYS),
    # In a later step, too, when much is known of the gradients.
    *(
        ("squared", place, way, each, 6)
        for place in PLACES
        for way in WAYS[:3]
        for each in SETTINGS
    ),
]


@pytest.mark.parametrize(("name", "place", "way", "settings", "first"), SHARED)
def test_gradients_that_share_memory_or_are_views(name, place, way, settings, first):
    def run(wrap):
        a, b = torch.arange(6.0).reshape(2, 3).requires_grad_(), torch.ones(2, 3).requires_grad_()
        optimizer = wrap(SGD([a, b], lr=0.0625, momentum=0.5, fused=name == "squared"))
        for number in range(first + 3):
            optimizer.zero_grad()
            derive(optimizer, LOSSES[name](a, b), "scaled" if way == "unscaled" else way)
            if number >= first:
                a.grad, b.grad = PLACES[place](a.grad, b.grad)
            if way == "unscaled" and wrap is not alone:
                optimizer.unscale_()
            optimizer.step()
        return bits([a, b])

    ours = scaler if way == "scaler" else functools.partial(wrapped, **SETTINGS[settings])
    assert run(ours) == run(alone)


def test_get_unscaled_gradients_keeps_none_of_them():
    model, kept = torch.nn.Linear(4, 3), []
    optimizer = wrapped(SGD(model.parameters(), lr=0.5))
    for _ in range(8):
        loss = optimizer.get_scaled_loss(model(torch.ones(1, 4)).sum())
        given = torch.autograd.grad(loss, list(model.parameters()))
        found = optimizer.get_unscaled_gradients(given)
        kept += map(weakref.ref, (*given, *found))
        del loss, given, found
        assert len(optimizer._record.divided) <= 4
    assert not any(reference() is not None for reference in kept)
