"""What multiplies each `.grad`, after each call of random programs of two wrappers.

The oracle is the same program without loss scaling. Each gradient is that of the oracle times the
one number of the wrappers that have its parameter.
"""

import copy
import gc
import itertools
import os
import pathlib
import pickle
import re
import warnings
import weakref

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import lossscale
from frameworks.torch.support import (
    alone,
    bits,
    derive,
    ends_as_without_scaling,
    parameter,
    raised_by,
    sgd,
    wrapped,
)
from lossscale.torch.gradient_record import GradientRecord

PROGRAMS = int(os.environ.get("LOSSSCALE_SOAK_PROGRAMS", "1")) * 100
SCALES = 2.0**10, 2.0**4
# Fused, so that the device may decide.
INNER = {
    "SGD": lambda given: torch.optim.SGD(given, lr=2.0**-6, fused=True),
    "momentum": lambda given: torch.optim.SGD(given, lr=2.0**-6, momentum=0.5, fused=True),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=2.0**-6, fused=True),
}


class Run:
    """Two optimizers that share a tensor, or all; a loss may reach what only the other has."""

    def __init__(self, wraps, decide="host", moves=True, inner="SGD", same=False):
        self.how = {"decide": decide, "moves": moves, "inner": inner, "same": same}
        self.shared, self.first, self.second = (
            torch.tensor([value, -2.0 * value], requires_grad=True) for value in (0.5, 0.25, 0.75)
        )
        self.wraps = wraps
        given = [[self.shared, self.first], [self.second, self.shared]]
        optimizers = [INNER[inner](list(self.tensors) if same else each) for each in given]
        self.optimizers, self.seed, self.saved = optimizers, 0, None
        if wraps:
            self.optimizers = [
                lossscale.torch.LossScaleOptimizer(
                    each,
                    rule=lossscale.DynamicScale(scale, growth_interval=1 if moves else 1000),
                    decide=decide,
                )
                for each, scale in zip(optimizers, SCALES, strict=True)
            ]

    @property
    def tensors(self):
        return self.shared, self.first, self.second

    def loss(self, which, overflows=None):
        self.seed += 1
        weights = torch.randn(3, 2, generator=torch.Generator().manual_seed(self.seed))
        parts = {"shared": [0], "alone": [1], "first": [0, 1], "second": [0, 2], "all": [0, 1, 2]}[
            which
        ]
        terms = {i: (self.tensors[i] * weights[i]).tanh().sum() for i in parts}
        if overflows in terms:
            terms[overflows] = terms[overflows] * torch.inf
        return sum(terms.values())

    def verb(self, number, which, overflows=None):
        loss = self.loss(which, overflows)
        self.optimizers[number].backward(loss) if self.wraps else loss.backward()

    def scale(self, number, which, overflows=None):
        loss = self.loss(which, overflows)
        (self.optimizers[number].scale_loss(loss) if self.wraps else loss).backward()

    def step(self, number):
        self.optimizers[number].step()

    def unscale(self, number):
        if self.wraps:
            self.optimizers[number].unscale_()

    def clear(self, number):
        self.optimizers[number].zero_grad()

    def clear_all(self):
        for each in self.tensors:
            each.grad = None

    def with_gradients(self):
        return [each for each in self.tensors if each.grad is not None]

    def clear_in_place(self):
        for each in self.with_gradients():
            each.grad.zero_()

    def replace(self):
        """What code that clips by hand does."""
        for each in self.with_gradients():
            each.grad = each.grad.clone()

    def halve(self, in_place):
        for each in self.with_gradients():
            each.grad = each.grad.mul_(0.5) if in_place else each.grad * 0.5

    def copy(self):
        self.shared, self.first, self.second, self.optimizers = copy.deepcopy(
            (self.shared, self.first, self.second, self.optimizers)
        )

    def file(self, how):
        """New objects, and the gradients as they were."""
        kept = [None if t.grad is None else t.grad.clone() for t in self.tensors]
        if how == "pickle":
            loaded = pickle.loads(pickle.dumps((*self.tensors, self.optimizers)))
            self.shared, self.first, self.second, self.optimizers = loaded
        else:
            states = [copy.deepcopy(each.state_dict()) for each in self.optimizers]
            values = [t.detach().clone() for t in self.tensors]
            made = Run(self.wraps, **self.how)
            for tensor, value in zip(made.tensors, values, strict=True):
                tensor.data.copy_(value)
            if how == "restored before":
                made.restore(kept)
            for each, state in zip(made.optimizers, states, strict=True):
                each.load_state_dict(state)
            self.shared, self.first, self.second = made.tensors
            self.optimizers = made.optimizers
        self.restore(kept)

    def restore(self, kept):
        for tensor, gradient in zip(self.tensors, kept, strict=True):
            tensor.grad = None if gradient is None else gradient.clone()

    def check(self, plain, call):
        """Compares each gradient with that of the oracle, times what multiplies it."""
        records = [each._record for each in self.optimizers]
        for mine, theirs in zip(self.tensors, plain.tensors, strict=True):
            now = {r.multiplier for r in records if id(mine) in r.info().ids}
            numbers = {1.0 if m is None else float(m.scale_on(torch.device("cpu"))) for m in now}
            assert len(numbers) == 1, call
            (number,) = numbers
            expected = None if theirs.grad is None else theirs.grad * number
            assert bits(mine.grad) == bits(expected), (call, number, mine.grad, theirs.grad)
        assert bits(self.tensors) == bits(plain.tensors), call


def check(program, **how):
    ours, plain = Run(True, **how), Run(False, **how)
    # The wrapper of some steps has scaled no loss.
    with warnings.catch_warnings(action="ignore", category=lossscale.LossScaleWarning):
        for name, *arguments in program:
            error = raised_by(getattr(ours, name), *arguments)
            if error is not None and name == "step":
                # PyTorch's fused SGD cannot start one momentum after another.
                assert "got NoneType" in str(error), error
                assert str(raised_by(plain.step, *arguments)) == str(error)
                return
            assert error is None, error
            getattr(plain, name)(*arguments)
            ours.check(plain, (name, *arguments))


CALLS = [
    ("scale", 0, "all"),
    ("scale", 1, "second"),
    ("verb", 0, "first"),
    ("step", 0),
    ("step", 1),
    ("clear", 0),
    ("clear_all",),
]


# Who decides changes what a step does, not which calls it follows.
@pytest.mark.parametrize(("decide", "length"), [("host", 5), ("device", 4)])
def test_all_sequences_of_calls(decide, length):
    for program in itertools.product([CALLS[0], CALLS[2]], *[CALLS] * (length - 2)):
        check([*program, ("step", 0)], decide=decide)
        check([*program, ("step", 1)], decide=decide)


def of(name, *choices):
    return st.tuples(st.just(name), *map(st.sampled_from, choices))


LOSSES = ["shared", "alone", "first", "second", "all"]
calls = st.one_of(
    of("scale", [0, 1], LOSSES),
    of("scale", [0, 1], ["all"]),
    of("verb", [0, 1], LOSSES),
    of("step", [0, 1]),
    of("step", [0, 1]),
    of("unscale", [0, 1]),
    of("clear", [0, 1]),
    of("clear_all"),
    of("clear_in_place"),
    of("replace"),
    of("halve", [True, False]),
    of("copy"),
    of("file", ["pickle", "restored before", "restored after"]),
)


@pytest.mark.parametrize("decide", ["host", "device"])
@hypothesis.settings(max_examples=PROGRAMS, deadline=None)
@hypothesis.given(
    st.lists(calls, min_size=3, max_size=30),
    st.booleans(),
    st.sampled_from(list(INNER)),
    st.booleans(),
)
@hypothesis.example([("verb", 0, "first"), ("verb", 1, "second"), ("step", 0)], True, "SGD", True)
@hypothesis.example([("scale", 0, "first"), ("step", 1), ("step", 0)], True, "SGD", False)
@hypothesis.example(
    [("scale", 0, "first"), ("unscale", 0), ("scale", 1, "second"), ("step", 0)], True, "SGD", False
)
@hypothesis.example(
    [("scale", 0, "first"), ("step", 0), ("scale", 1, "second"), ("step", 1)], True, "SGD", True
)
# What the second has decided on is multiplied again, though the first's loss does not reach it.
@hypothesis.example(
    [("scale", 1, "second"), ("unscale", 1), ("scale", 0, "alone"), ("step", 1)], True, "SGD", False
)
def test_random_programs(decide, program, moves, inner, same):
    check(program, decide=decide, moves=moves, inner=inner, same=same)


losses_that_overflow = st.tuples(
    st.sampled_from(["scale", "verb"]),
    st.sampled_from([0, 1]),
    st.sampled_from(LOSSES),
    st.sampled_from([None, 0, 1, 2]),
)


@pytest.mark.parametrize("decide", ["host", "device"])
@hypothesis.settings(max_examples=PROGRAMS, deadline=None)
@hypothesis.given(
    st.lists(
        st.one_of(
            losses_that_overflow,
            of("step", [0, 1]),
            of("step", [0, 1]),
            of("unscale", [0, 1]),
            of("clear", [0, 1]),
            of("clear_all"),
        ),
        min_size=3,
        max_size=14,
    )
)
# What one wrapper's loss left in the shared tensor, the other's step must not apply.
@hypothesis.example(
    [("scale", 1, "all", 0), ("step", 1), ("step", 0), ("verb", 1, "all", None), ("step", 0)]
)
@hypothesis.example(
    [
        ("scale", 0, "first", 0),
        ("step", 0),
        ("scale", 1, "first", None),
        ("step", 1),
        ("step", 0),
        ("verb", 0, "all", 1),
        ("step", 0),
    ]
)
def test_programs_with_overflows_train_as_float32_without_the_skipped_steps(decide, program):
    ours, plain = Run(True, decide, moves=False), Run(False)
    with warnings.catch_warnings(action="ignore", category=lossscale.LossScaleWarning):
        for name, *arguments in program:
            skips = [int(each.steps_skipped) for each in ours.optimizers]
            getattr(ours, name)(*arguments)
            changed = skips != [int(each.steps_skipped) for each in ours.optimizers]
            if name != "step" or not changed:
                getattr(plain, name)(*arguments)
            assert all(t.isfinite().all() for t in plain.tensors), (name, *arguments)
            assert bits(ours.tensors) == bits(plain.tensors), (name, *arguments)


# A loss of one wrapper that reaches the parameters of both, row by row.

WAYS = ["verb", "scale_loss"]
each_way = pytest.mark.parametrize(
    ("way", "decide"), list(itertools.product(WAYS, ["host", "device"]))
)


def pair(decide):
    """Two parameters and a wrapper of each."""
    given = [parameter(), parameter()]
    return given, [wrapped(sgd(each, lr=2.0**-10, fused=True), decide=decide) for each in given]


def loss_of(given, through_float16):
    """The sum of both; the gradient of one is infinite at scales above 2**9."""
    parts = [
        (each.half() * 64).sum().float() if number == through_float16 else each.sum()
        for number, each in enumerate(given)
    ]
    return parts[0] + parts[1]


@each_way
@pytest.mark.parametrize(
    ("scales", "overflows", "first"), list(itertools.product((0, 1), repeat=3))
)
def test_the_scale_falls_until_the_gradients_of_both_are_finite(
    way, decide, scales, overflows, first
):
    given, made = pair(decide)
    for _ in range(12):
        for each in made:
            each.zero_grad()
        derive(made[scales], loss_of(given, overflows), way)
        for each in (made[first], made[1 - first]):
            each.step()
    # From 2**15 to 2**9 are 6 skips, of both: an overflow of one is a scale that is too large.
    assert [int(each.steps_skipped) for each in made] == [6, 6]
    assert [float(each.loss_scale) for each in made] == [2.0**9, 2.0**9]
    slope = [64.0 if number == overflows else 1.0 for number in (0, 1)]
    assert [p.tolist() for p in given] == [[1.0 - 6 * g / 2**10] * 2 for g in slope]


@each_way
@pytest.mark.parametrize("clear", ["optimizer", "by hand"])
def test_gradients_of_another_wrapper_that_are_cleared_are_no_step(way, decide, clear):
    given, (generator, critic) = pair(decide)
    for _ in range(8):
        if clear == "optimizer":
            critic.zero_grad()
        else:
            given[1].grad = None
        derive(critic, given[1].sum(), way)
        critic.step()
        generator.zero_grad()
        derive(generator, loss_of(given, 1), way)
        generator.step()
    assert (int(critic.steps_skipped), int(critic.iterations)) == (0, 8)
    assert float(critic.loss_scale) == 2.0**15
    assert int(generator.steps_skipped) == 6


@each_way
@pytest.mark.parametrize("critic_steps", ["before it", "first", "last"])
def test_an_overflow_of_the_critics_loss_is_none_of_a_later_loss_of_the_generator(
    critic_steps, way, decide
):
    given, (generator, critic) = pair(decide)
    steps = {"first": [critic, generator], "last": [generator, critic]}.get(critic_steps)
    derive(critic, given[1].sum() * torch.inf, way)
    if steps is None:
        # It leaves the infinity behind, which the generator's loss reaches.
        critic.step()
    derive(generator, loss_of(given, None), way)
    for each in steps or [generator]:
        each.step()
    assert [int(each.steps_skipped) for each in (generator, critic)] == [0, 1]
    assert [p.tolist() for p in given] == [[1.0 - 1 / 2**10] * 2, [1.0, 1.0]]


def test_a_loss_that_outlives_its_optimizer_is_in_nobodys_way():
    """Reentrant checkpointing asks all wrappers that are left."""
    gone, weight = parameter(), parameter()

    def kept():
        optimizer = wrapped(sgd(gone))
        loss = optimizer.scale_loss(gone.sum())
        loss.backward(retain_graph=True)
        optimizer.unscale_()
        gone.grad = None
        return loss

    loss, optimizer = kept(), wrapped(sgd(weight, lr=0.5))
    x = torch.ones(2, requires_grad=True)
    optimizer.backward(checkpoint(lambda x: x * weight, x, use_reentrant=True).sum())
    optimizer.step()
    assert loss.requires_grad
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("way", WAYS)
def test_an_own_loss_beside_that_of_another_counts(way):
    given, (first, second) = pair("host")
    derive(first, loss_of(given, 1), way)
    derive(second, given[1].sum(), way)
    if way == "scale_loss":
        second.unscale_()
    second.zero_grad()
    assert second.steps_skipped == 1
    first.step()
    assert first.steps_skipped == 1
    # Gradients of another were cleared; now nobody scales the loss.
    first.zero_grad()
    derive(first, loss_of(given, None), "verb")
    second.zero_grad()
    given[1].sum().backward()
    with pytest.warns(lossscale.LossScaleWarning, match="scaled no loss"):
        second.step()


INPUT = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("added", ["before backward", "before unscale_", "before step"])
@ends_as_without_scaling
def test_a_group_that_is_added_within_a_step_trains_right_or_is_refused(
    wrap, added, has_gradients, way
):
    """What is refused changes nothing, and goes on after `zero_grad`."""
    trained, late = parameter(), parameter()
    optimizer = wrap(sgd(trained, lr=0.5))
    early = added == "before unscale_" and way == "scale_loss"
    refused = has_gradients and (early or added == "before step")

    def adds(now):
        if now == added:
            optimizer.add_param_group({"params": [late]})

    def backpropagate():
        derive(optimizer, (trained * (late if has_gradients else late.detach())).sum() * 5.0, way)

    adds("before backward")
    backpropagate()
    adds("before unscale_")
    if wrap is not alone and not (refused and early):
        optimizer.unscale_()
    adds("before step")
    if refused:
        before = bits([trained, late, trained.grad, late.grad])
        calls = [optimizer.step, backpropagate, *[getattr(optimizer, "unscale_", None)] * early]
        for call in calls if wrap is not alone else ():
            with pytest.raises(lossscale.errors.CallOrderError, match="group with gradients"):
                call()
            assert bits([trained, late, trained.grad, late.grad]) == before
        optimizer.zero_grad()
        backpropagate()
    optimizer.step()
    return [p.tolist() for p in (trained, late)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other_way", WAYS)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("shares", [False, True])
@ends_as_without_scaling
def test_a_group_whose_gradients_another_wrapper_has_brought(
    wrap, shares, unscales, other_way, way
):
    """Its own loss is still scaled when the group comes."""
    first, late, other = (parameter() for _ in range(3))
    optimizer = wrap(sgd(first, lr=0.5))
    another = wrap(sgd(other, *[late] * shares, lr=0.25), initial_scale=8.0)
    derive(optimizer, (first * first).sum(), way)
    optimizer.add_param_group({"params": [late]})
    derive(another, (first * late * other).sum(), other_way)
    if unscales and wrap is not alone:
        optimizer.unscale_()
    optimizer.step()
    another.step()
    return [p.tolist() for p in (first, late, other)]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_asks_no_wrapper_that_its_loss_does_not_reach(way, monkeypatch):
    weight, x, plain = parameter(), torch.ones(2, requires_grad=True), parameter()
    optimizer, asked = wrapped(sgd(weight)), []
    others = [wrapped(sgd(parameter())) for _ in range(20)]
    info = GradientRecord.info
    monkeypatch.setattr(GradientRecord, "info", lambda self: asked.append(self) or info(self))
    derive(optimizer, (weight * x * plain).sum(), way)
    optimizer.step()
    optimizer.zero_grad()
    assert set(asked) == {optimizer._record}
    assert len(others) == 20


def test_a_group_that_is_added_after_a_state_is_loaded_within_a_step_is_refused():
    trained, late = parameter(), parameter()
    optimizer = wrapped(sgd(trained, lr=0.5))
    optimizer.scale_loss((trained * late).sum()).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(lossscale.errors.CallOrderError, match="group with gradients"):
        optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_group_whose_gradients_came_in_earlier_steps(way):
    """They are scaled by `scale_loss`, and `zero_grad` of the optimizer has not cleared them."""
    trained, late = parameter(), parameter()
    optimizer = wrapped(sgd(trained, lr=0.125))
    for _ in range(2):
        derive(optimizer, (trained + late).sum(), way)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.backward(trained.sum() * 0.0)
    optimizer.add_param_group({"params": [late]})
    if way == "scale_loss":
        for call in (optimizer.step, lambda: derive(optimizer, trained.sum(), "verb")):
            with pytest.raises(lossscale.errors.CallOrderError, match="group with gradients"):
                call()
        late.grad = None
    derive(optimizer, (trained + late).sum(), way)
    optimizer.step()
    # With `backward` those of three steps are applied.
    assert [trained[0].item(), late[0].item()] == [0.625, 0.875 if way == "scale_loss" else 0.625]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_another_wrapper_clears_in_place_are_zeros_to_apply(way):
    given, (first, second) = pair("host")
    other = wrapped(sgd(given[0], fused=True))
    derive(first, loss_of(given, None), way)
    other.zero_grad(set_to_none=False)
    for each in (first, second):
        each.step()
    assert [p.tolist() for p in given] == [[1.0, 1.0], [1.0 - 2.0**-10] * 2]


@each_way
def test_states_of_two_wrappers_of_which_one_has_no_gradients(way, decide):
    given, made = pair(decide)
    derive(made[0], given[1].sum(), way)
    states = [each.state_dict() for each in made]
    for each, state in zip(made, states, strict=True):
        each.load_state_dict(state)
    made[1].step()
    assert given[1].tolist() == [1.0 - 2.0**-10] * 2


@each_way
@pytest.mark.parametrize("loads", [False, True])
def test_a_wrapper_that_is_replaced_between_its_losses(loads, way, decide):
    def made(scale):
        return wrapped(sgd(weight, lr=0.25, fused=True), decide=decide, initial_scale=scale)

    weight = parameter()
    optimizer = made(2.0**15)
    derive(optimizer, weight.sum(), way)
    state = optimizer.state_dict()
    optimizer = made(8.0)
    if loads:
        optimizer.load_state_dict(state)
    derive(optimizer, weight.sum(), way)
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]


@each_way
@pytest.mark.parametrize("other_way", WAYS)
@pytest.mark.parametrize("reaches", [0, 1, 2])
def test_a_loss_within_the_backward_pass_of_another_is_right_or_refused(
    reaches, other_way, way, decide
):
    """A hook computes a loss: of its own parameter, one of both wrappers, or the first's."""

    def run(wrap):
        own, shared, other = (parameter() for _ in range(3))
        first = wrap(sgd(own, shared, lr=0.5, fused=True))
        second = wrap(sgd(other, *[shared] * (reaches > 0), lr=0.5, fused=True))

        def hook(_):
            with torch.enable_grad():
                parts = [other.sum(), shared.sum() + other.sum(), own.square().sum()]
                derive(second if reaches < 2 else first, parts[reaches], other_way)

        hidden = own.tanh()
        hidden.register_hook(hook)
        derive(first, (hidden * shared).sum(), way)
        first.step()
        second.step()
        return [p.tolist() for p in (own, shared, other)]

    if reaches == 0 or (reaches == 2 and way == other_way == "scale_loss"):
        assert run(lambda inner: wrapped(inner, decide=decide)) == run(alone)
        return
    with pytest.raises(lossscale.errors.GradientsError, match=r"still running|already scaled"):
        run(lambda inner: wrapped(inner, decide=decide))


HOOKS = {
    "step": lambda o, p: o.step(),
    "unscale": lambda o, p: (o.unscale_(), o.step()),
    "clip": lambda o, p: (o.unscale_(), torch.nn.utils.clip_grad_norm_([p], 0.25), o.step()),
}


@each_way
@pytest.mark.parametrize("does", HOOKS)
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("losses", [1, 2])
def test_wrappers_of_each_parameter_that_step_in_the_backward_pass(
    losses, clears, does, way, decide
):
    def run(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizers = {p: wrap(sgd(p, lr=0.5, fused=True)) for p in model.parameters()}

        def hook(p):
            if hooked:
                if wrap is alone:
                    optimizers[p].unscale_ = lambda: None
                HOOKS[does](optimizers[p], p)
                if clears:
                    optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        first = next(iter(optimizers.values()))
        for _ in range(3):
            for number in range(losses):
                hooked = number == losses - 1
                derive(first, model(INPUT).square().mean(), way)
        return [p.tolist() for p in model.parameters()]

    assert run(lambda inner: wrapped(inner, decide=decide)) == run(alone)


def test_an_optimizer_whose_loss_met_a_skip_that_only_the_device_knows_of_is_freed():
    spoiled, own = parameter(), parameter()
    fused = [torch.optim.SGD([each], lr=0.5, fused=True) for each in (spoiled, own)]
    first, second = (wrapped(each, decide="device") for each in fused)
    first.scale_loss((spoiled * torch.inf).sum()).backward()
    first.step()
    second.scale_loss((spoiled * own).sum()).backward()
    gone = weakref.ref(second._record)
    del fused, first, second
    gc.collect()
    assert gone() is None


def test_the_record_alone_changes_the_state_of_gradients():
    fields = re.findall(r"^        (\w+): ", GradientRecord.__doc__, re.M)
    written = rf"record\.({'|'.join({*fields} - {'leave_out', 'in_backward', 'warned'})}) = "
    for path in pathlib.Path(lossscale.torch.__file__).parent.glob("*.py"):
        assert not re.search(written, path.read_text("utf-8")) or path.stem == "gradient_record"
