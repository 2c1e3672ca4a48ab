"""What a step of the wrapper does with the gradients, and what it leaves alone.

tests/conformance has what every wrapper promises: what is skipped, how the scale moves, what is bit
for bit the optimizer inside, in the rows torch-native of its table.
"""

import copy
import pickle
import warnings

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import lossscale
from frameworks.torch.support import (
    KINDS,
    ONES,
    OURS,
    SHAPES,
    backward,
    bits,
    fill,
    made,
    parameter,
    parameters,
    raised_by,
    scaler,
    sgd,
    snapshot,
    step,
    train_step,
    wrapped,
    wrapper,
)
from lossscale import DynamicScale, FixedScale, LossScaleWarning


def test_the_front_makes_it_too_and_it_is_all_that_is_asked_for():
    given = parameters((2,))
    inner = torch.optim.AdamW(given)
    optimizer = lossscale.LossScaleOptimizer(inner, initial_scale=8)
    assert type(optimizer) is lossscale.torch.LossScaleOptimizer
    assert isinstance(optimizer, lossscale.LossScaleOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.inner_optimizer is inner
    for name in ("param_groups", "state", "defaults"):
        assert getattr(optimizer, name) is getattr(inner, name)
    assert optimizer.loss_scale == torch.tensor(8.0)
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (8.0, 2000)
    assert optimizer.dynamic


@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_hooks_run_on_applied_steps_and_find_and_change_unscaled_gradients(kind):
    given, on_device = parameters(*SHAPES), kind == "device"
    inner = torch.optim.Adam(given, **KINDS.get(kind, KINDS["fused"]))
    optimizer = wrapped(inner, decide="device" if on_device else "host")
    called, found = [], []

    def clips(opt, *_):
        called.append(("pre", opt))
        found.append(bits([p.grad for p in given]))
        given[0].grad[0] = 0.0

    handles = [
        optimizer.register_step_pre_hook(clips),
        optimizer.register_step_post_hook(lambda opt, *_: called.append(("post", opt))),
        register_optimizer_step_post_hook(lambda opt, *_: called.append(("global", opt))),
        optimizer.register_state_dict_post_hook(lambda *_: called.append("save")),
        optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("load")),
    ]
    try:
        for finite in (False, True, False):
            step(optimizer, given, ONES if finite else [g * torch.nan for g in ONES])
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        for handle in handles:
            handle.remove()
    # Where the device decides they run on a skipped step, too, after the first.
    steps = [("pre", inner), ("post", inner), ("global", inner)] * (1 + on_device)
    assert called == [*steps, "save", "load"]
    assert found[0] == bits(ONES)
    average = inner.state[given[0]]["exp_avg"]
    assert average.tolist() == pytest.approx([0.0, 0.1, 0.1])


def test_a_step_whose_loss_nobody_scaled_hands_over_what_it_gets():
    given, optimizer = made(rule=DynamicScale(8.0, growth_interval=1))
    for p in given:
        p.grad = torch.zeros_like(p)
    with warnings.catch_warnings(action="error"):
        # torch.distributed.checkpoint makes such a step.
        optimizer.step()
    for p in given:
        p.grad = torch.ones_like(p)
    expected = [p.detach() - 0.5 for p in given]
    with pytest.warns(LossScaleWarning, match="has scaled no loss.*unless a GradScaler") as warned:
        optimizer.step()
    # And not a line of PyTorch or of the library.
    assert warned[0].filename == __file__
    assert bits(given) == bits(expected)
    before = snapshot(given, optimizer)
    given[0].grad[0] = torch.nan
    optimizer.step()
    assert snapshot(given, optimizer) == before
    assert float(optimizer.loss_scale) == 8.0
    assert (optimizer.steps_skipped, optimizer.last_step_skipped) == (1, True)
    assert optimizer.iterations == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", OURS)
def test_what_breaks_after_unscaling_reaches_the_parameters(by, kind):
    """PyTorch's tests demand it of what is done in between."""
    given = parameters(*SHAPES)
    run = OURS[by](torch.optim.Adam(given, lr=0.5, **KINDS[kind]))
    backward(run, given, ONES)
    run.unscale_()
    given[0].grad[0] = torch.inf
    run.step()
    assert not given[0].isfinite().all()


@pytest.mark.parametrize("by", OURS)
@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_loss_is_scaled_in_float32_or_wider(dtype, shape, by):
    first = "init_scale" if by == "scaler" else "initial_scale"
    run = OURS[by](sgd(parameter()), **{first: 2.0**20})
    loss = torch.full(shape, 1000.0, dtype=dtype, requires_grad=True)
    scaled = run.scale_loss(loss)
    assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (scaled == 1000 * 2.0**20).all()
    scaled.sum().backward()
    assert loss.grad.dtype == dtype


def test_attributes_of_the_inner_optimizer_are_read_and_those_of_users_are_kept():
    class Warm(torch.optim.SGD):
        warmup = 3

        def restart(self, warmup):
            self.warmup = warmup

    _, optimizer = made()
    for name, words in (
        ("lr", r"param_groups\[i\]\['lr'\]"),
        ("learning_rate", r"param_groups\[i\]\['lr'\]"),
        ("momentum", r"param_groups\[i\]\['momentum'\]"),
        ("momentun", "SGD, has an attribute 'momentun'"),
    ):
        assert not hasattr(optimizer, name)
        with pytest.raises(AttributeError, match=words):
            getattr(optimizer, name)
    optimizer.epoch_of_mine = 3
    assert copy.deepcopy(optimizer).epoch_of_mine == 3
    optimizer = wrapped(inner := Warm(parameters((2,))))
    optimizer.restart(warmup=5)
    assert optimizer.warmup == inner.warmup == 5
    several = wrapped([Warm(parameters((2,))), torch.optim.SGD(parameters((2,)))])
    for each, place in ((optimizer, "inner_optimizer"), (several, r"optimizers\[i\]")):
        with pytest.raises(AttributeError, match=rf"optimizer\.{place}\.warmup = \.\.\."):
            each.warmup = 7
    assert (inner.warmup, several.optimizers[0].warmup) == (5, 3)
    # What every optimizer of PyTorch has is written, too.
    optimizer.defaults = {**optimizer.defaults, "lr": 0.25}
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.5}]
    optimizer.state = {}
    assert (inner.defaults["lr"], inner.param_groups[0]["lr"], inner.state) == (0.25, 0.5, {})


@pytest.mark.parametrize("bad", [False, True])
def test_gradients_of_all_kinds_together(bad):
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.complex64
    given = [p for dtype in dtypes for p in parameters((3,), dtype=dtype)]
    given += parameters((6, 2), (2, 3, 4, 5))
    for place in range(len(given)):
        optimizer = wrapped(torch.optim.SGD(given, lr=0.5))
        scale = optimizer.scale_loss(torch.ones(()))
        expected = []
        for number, p in enumerate(given):
            gradient = torch.ones_like(p)
            if number == 4:
                index = torch.tensor([[1, 1, 5]])
                values = torch.ones(3, 2)
                gradient = torch.sparse_coo_tensor(index, values, p.shape, check_invariants=True)
            if number == 5:
                gradient = gradient.to(memory_format=torch.channels_last)
            expected.append(gradient.clone())
            p.grad = gradient * scale.to(gradient.dtype)
        if bad:
            stored = given[place].grad
            stored = stored._values() if stored.is_sparse else stored
            stored[-1] = torch.inf if place != 3 else complex(0.0, torch.nan)
        strides = given[5].grad.stride()
        optimizer.step()
        assert optimizer.last_step_skipped is bad
        if not bad:
            assert bits([p.grad for p in given]) == bits(expected)
            assert given[4].grad.is_sparse
            assert given[5].grad.stride() == strides


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_float16_parameters_are_refused_before_anything_changes():
    weight, half = torch.nn.Parameter(torch.ones(2)), *parameters((3,), dtype=torch.float16)
    optimizer = wrapped(torch.optim.SGD([weight, half], lr=0.5))
    loss = (weight**2).sum() + half.float().sum()
    # A gradient with a graph is replaced, not divided.
    optimizer.scale_loss(loss).backward(create_graph=True)
    gradient, before = weight.grad, bits([weight, weight.grad, half, half.grad])
    for call in (optimizer.step, optimizer.unscale_, lambda: optimizer.backward(half.sum())):
        with pytest.raises(ValueError, match=r"MasterWeights.*parameters in float32"):
            call()
    assert weight.grad is gradient
    assert bits([weight, weight.grad, half, half.grad]) == before
    assert optimizer.iterations == 0


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_kernel_does_not_divide_a_gradient_that_has_a_graph():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = wrapped(torch.optim.SGD([weight], lr=0.5, fused=True), rule=FixedScale(8.0))
    optimizer.scale_loss((weight**2).sum()).backward(create_graph=True)
    gradient = weight.grad
    optimizer.step()
    assert (gradient.tolist(), weight.tolist()) == ([16.0, 16.0], [0.0, 0.0])


REGISTER = {
    "wrapper": lambda o: o.register_step_pre_hook,
    "inner": lambda o: o.inner_optimizer.register_step_pre_hook,
    "part": lambda o: o.inner_optimizer.optimizers[0].register_step_pre_hook,
    "global": lambda o: register_optimizer_step_pre_hook,
}


@pytest.mark.parametrize("place", REGISTER)
@pytest.mark.parametrize("kind", ["fixed", "float16", "masters"])
def test_a_pre_hook_of_a_fused_optimizer_finds_unscaled_gradients(kind, place):
    """So no kernel may divide them. Those of float16 parameters nothing else divides."""
    dtype = torch.float32 if kind == "fixed" else torch.float16
    weight, found = torch.nn.Parameter(torch.ones(2, dtype=dtype)), []
    inner = torch.optim.SGD([weight], lr=0.5, fused=True)
    inner = lossscale.torch.MasterWeights(inner) if kind == "masters" else inner
    optimizer = wrapped([inner] if place == "part" else inner, rule=FixedScale(8.0))
    optimizer.scale_loss(weight.float().sum()).backward()
    handle = REGISTER[place](optimizer)(lambda *_: found.append(weight.grad.tolist()))
    try:
        error = raised_by(optimizer.step)
    finally:
        handle.remove()
    is_refused = kind == "float16"
    assert ("MasterWeights" in str(error)) == is_refused
    assert (found, weight.tolist()) == (([], [1.0] * 2) if is_refused else ([[1.0] * 2], [0.5] * 2))


class Raises(torch.optim.SGD):
    handed_over = None

    def step(self, closure=None):
        if self.handed_over is None:
            self.handed_over = "grad_scale" in vars(self)
            raise OSError("no")
        return super().step(closure)


@pytest.mark.parametrize("rule", [DynamicScale(), FixedScale(8.0)], ids=str)
def test_an_optimizer_that_raises_can_be_stepped_again(rule):
    given = parameters(*SHAPES)
    inner = Raises(given, lr=0.5, fused=True)
    optimizer = wrapped(inner, rule=rule)
    before = [p.detach().clone() for p in given]
    fill(optimizer, given, ONES)
    with pytest.raises(OSError, match="no"):
        optimizer.step()
    # What is left behind would mislead whoever steps it next.
    assert not {"grad_scale", "found_inf"} & set(vars(inner))
    assert inner.handed_over or rule.checks_gradients
    assert optimizer.iterations == 0
    optimizer.step()
    assert bits(given) == bits([p - 0.5 for p in before])
    assert optimizer.iterations == 1


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_float16_parameters_are_divided_in_the_kernel_of_fused_optimizers(decide, clip_norm):
    """To the last bit as the drop-in does it; clipped, within the rounding of float16."""
    given, twins = (parameters(*SHAPES, dtype=torch.float16) for _ in range(2))
    ours, dropped_in = (torch.optim.AdamW(p, lr=0.1, fused=True) for p in (given, twins))
    optimizer = wrapped(ours, initial_scale=8.0, decide=decide, clip_norm=clip_norm)
    dropped_in = scaler(dropped_in)
    norm = sum(g.square().sum() for g in ONES).sqrt()
    for factor in (1.0, torch.inf, 2.0**-20, 1.0):
        step(optimizer, given, [g * factor for g in ONES])
        shrunk = min(1.0, (clip_norm or torch.inf) / float(norm * factor))
        step(dropped_in, twins, [g * factor * shrunk for g in ONES])
        for p, twin in zip(given, twins, strict=True):
            if clip_norm is None:
                assert torch.equal(p, twin)
            torch.testing.assert_close(p, twin, rtol=2e-3, atol=2e-3)
    assert (int(optimizer.steps_skipped), dropped_in.scaler.steps_skipped) == (1, 1)
    fill(optimizer, given, ONES)
    with pytest.raises(ValueError, match="MasterWeights"):
        optimizer.unscale_()


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_float16_gradients_that_a_kernel_would_divide_to_infinity_are_skipped(name, decide):
    """float16 reaches beyond float32 divided by a scale under 2**-112."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    inner = getattr(torch.optim, name)([weight], lr=2.0**-14, fused=True)
    rule = DynamicScale(2.0**-120, min_scale=2.0**-126)
    run = wrapper(inner, rule=rule, decide=decide)
    largest = float(torch.finfo(torch.float32).max) * 2.0**-120
    for value, skipped in [(60000.0, True), (largest / 4, False), (-largest * 2, True)]:
        before = weight.detach().clone()
        run.scale_loss(torch.ones(()))
        weight.grad = torch.tensor([value, 0.0, 0.0], dtype=torch.float16)
        run.step()
        assert bool(run.last_step_skipped) == skipped
        assert not skipped or torch.equal(weight, before)


def test_others_that_take_a_verdict_are_handed_one():
    seen = []

    class Own(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            seen.append((float(self.grad_scale), float(self.found_inf)))

    given = parameters(*SHAPES)
    step(wrapped(Own(given)), given, ONES)
    assert seen == [(1.0, 0.0)]
    assert bits([p.grad for p in given]) == bits(ONES)


class Counting(lossscale.torch.LossScaleOptimizer):
    """A user's subclass."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def scale_loss(self, loss):
        self.calls.append("scaled")
        return super().scale_loss(loss)

    def step(self, closure=None):
        self.calls.append("stepped")
        return super().step(closure)


def test_a_subclass_overrides_verbs_and_has_attributes_of_its_own():
    given = parameters((3,))
    optimizer = Counting(torch.optim.SGD(given, lr=0.5))
    before = given[0].detach().clone()
    train_step(optimizer, given[0].sum(), "scale_loss")
    assert optimizer.calls == ["scaled", "stepped"]
    assert bits(given[0]) == bits(before - 0.5)
    other = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(other, Counting)
    assert other.calls == optimizer.calls
    optimizer.calls = ["written"]
    assert (optimizer.calls, hasattr(optimizer.inner_optimizer, "calls")) == (["written"], False)


CHANGES = {
    "a momentum": lambda optimizer, fresh: optimizer.param_groups[0].update(momentum=0.9),
    "empty states": lambda optimizer, fresh: [s.clear() for s in optimizer.state.values()],
    "no states": lambda optimizer, fresh: optimizer.state.clear(),
    "a load": lambda optimizer, fresh: optimizer.load_state_dict(fresh),
    "a gradient that comes late": lambda optimizer, fresh: None,
}
NEW = {
    "SGD": lambda given, momentum: sgd(*given, momentum=momentum, fused=True),
    "AdamW": lambda given, _: torch.optim.AdamW(given, fused=True),
}


@pytest.mark.parametrize("make", [scaler, lambda o: wrapper(o, decide="device")], ids=["s", "w"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", NEW)
def test_no_kernel_makes_a_state_on_a_skip(make, change, kind):
    """That of SGD would be uninitialized memory: the host decides on a first step."""
    if (change, kind) == ("a momentum", "AdamW"):
        pytest.skip("it has no setting that makes a state")
    given = weight, late = [parameter(), parameter()]
    inner = NEW[kind](given, 0.9 * (change != "a momentum"))
    run, fresh = make(inner), copy.deepcopy(inner.state_dict())
    for _ in range(2):
        weight.grad = late.grad = None
        backward(run, [weight], [torch.ones(2)])
        run.step()
    weight.grad = None
    before = bits(given)
    CHANGES[change](getattr(run, "optimizer", run), fresh)
    backward(run, given, [torch.full((2,), torch.inf)] * 2)
    run.step()
    assert not inner.state.get(late)
    assert "late" in change or not any(inner.state.values())
    assert bits(given) == before
