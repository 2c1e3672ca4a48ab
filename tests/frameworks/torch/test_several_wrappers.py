"""Losses that reach the parameters of several wrappers and passes within passes, row by row.

test_scaled_gradients.py has random programs of their calls, of groups and of deleted wrappers. The
oracle is plain training, or what is computed by hand.
"""

import cProfile
import gc
import itertools
import pstats
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lossscale
from frameworks.torch.support import alone, derive, parameter, sgd, wrapped

WAYS = ["verb", "scale_loss"]
each_way = pytest.mark.parametrize(
    ("way", "decide"), list(itertools.product(WAYS, ["host", "device"]))
)


def pair(decide):
    """Two parameters and a wrapper of each."""
    given = [parameter(), parameter()]
    return given, [wrapped(sgd(each, lr=2.0**-10, fused=True), decide=decide) for each in given]


def three(decide):
    """Two wrappers that share the first of three parameters."""
    given = [parameter() for _ in range(3)]
    owned = [given[0], given[1]], [given[2], given[0]]
    settings = {"decide": decide, "initial_scale": 8.0}
    return given, [wrapped(sgd(*own, lr=0.5, fused=True), **settings) for own in owned]


def loss_of(given, through_float16):
    """The sum of both; the gradient of one is infinite at scales above 2**9."""
    parts = [
        (each.half() * 64).sum().float() if number == through_float16 else each.sum()
        for number, each in enumerate(given)
    ]
    return parts[0] + parts[1]


def clear(how, tensors, optimizers):
    """By the optimizers, or by hand: the gradients are taken away, or filled with zeros."""
    for each in optimizers if how == "optimizer" else ():
        each.zero_grad()
    for each in tensors if how != "optimizer" else ():
        if each.grad is not None:
            each.grad = each.grad.zero_() if how == "in place" else None


# Overflows.


@each_way
@pytest.mark.parametrize(
    ("scales", "overflows", "first"), list(itertools.product((0, 1), repeat=3))
)
@pytest.mark.parametrize("clears", ["optimizer", "by hand", "in place"])
def test_the_scale_falls_until_the_gradients_of_both_are_finite(
    clears, scales, overflows, first, way, decide
):
    given, made = pair(decide)
    for _ in range(12):
        clear(clears, given, made)
        derive(made[scales], loss_of(given, overflows), way)
        for each in (made[first], made[1 - first]):
            each.step()
    # From 2**15 to 2**9 are 6 skips, of both: an overflow of one is a scale that is too large.
    assert [int(each.steps_skipped) for each in made] == [6, 6]
    assert [float(each.loss_scale) for each in made] == [2.0**9, 2.0**9]
    slope = [64.0 if number == overflows else 1.0 for number in (0, 1)]
    assert [p.tolist() for p in given] == [[1.0 - 6 * g / 2**10] * 2 for g in slope]


@each_way
@pytest.mark.parametrize("clears", ["optimizer", "by hand"])
def test_gradients_of_another_wrapper_that_are_cleared_are_no_step(clears, way, decide):
    given, (generator, critic) = pair(decide)
    for _ in range(8):
        clear(clears, given[1:], [critic])
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


def test_a_step_that_is_left_out_counts_if_another_loss_came_after_its_own():
    given, (generator, critic) = pair("host")
    critic.backward(given[1].sum() * torch.inf)
    generator.backward(loss_of(given, None))
    critic.zero_grad()
    assert (int(critic.steps_skipped), float(critic.loss_scale)) == (1, 2.0**14)


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


@each_way
def test_an_overflow_that_a_skip_left_behind_skips_a_wrapper_that_is_made_later(way, decide):
    # Which of the two is unscaled first depends on where they lie in memory.
    for _ in range(8):
        shared, own = parameter(), parameter()
        first = wrapped(sgd(shared, lr=0.5, fused=True), decide=decide)
        derive(first, shared.sum() * torch.inf, way)
        first.step()
        second = wrapped(sgd(own, shared, lr=0.5, fused=True), decide=decide)
        derive(second, own.sum(), way)
        second.step()
        assert [p.tolist() for p in (shared, own)] == [[1.0, 1.0]] * 2
        assert int(second.steps_skipped) == 1


@each_way
@pytest.mark.parametrize("clears", ["optimizer", "model", "by hand"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_a_step_that_is_left_out_after_an_overflow_lowers_the_scale_and_counts(
    shares, in_place, clears, way, decide
):
    """Another wrapper of the same parameter may have nothing to do with it."""
    model = torch.nn.ParameterList([parameter()])
    (weight,) = model
    optimizer = wrapped(sgd(weight, lr=2.0**-10, fused=True), decide=decide)
    other = wrapped(sgd(weight, fused=True), decide=decide) if shares else None
    for _ in range(12):
        loss = (weight.half() * 64).sum().float()
        finite = optimizer.backward(loss) if way == "verb" else None
        if finite is None:
            optimizer.scale_loss(loss).backward()
            finite = optimizer.unscale_()
        if finite:
            optimizer.step()
        if clears == "by hand":
            clear("in place" if in_place else clears, model, ())
        elif clears == "model" and in_place:
            model.zero_grad(set_to_none=False)
        else:
            (model if clears == "model" else optimizer).zero_grad(set_to_none=not in_place)
    # From 2**15 to 2**9 are 6 skips. A loss counts the step before after it was scaled itself.
    skips = 6 if clears == "optimizer" else 7
    assert (int(optimizer.steps_skipped), int(optimizer.iterations)) == (skips, 12)
    assert float(optimizer.loss_scale) == 2.0 ** (15 - skips)
    assert weight.tolist() == [1.0 - (12 - skips) * 64 / 2.0**10] * 2
    assert other is None or int(other.steps_skipped) == 0


# Backward passes within others.


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


def hooked(tensor, call):
    """A tensor of the same values whose gradient calls something first."""
    made = tensor * 1.0

    def hook(_):
        with torch.enable_grad():
            call()

    made.register_hook(hook)
    return made


@each_way
def test_a_loss_that_was_scaled_before_the_pass_that_it_runs_in_is_refused(way, decide):
    given, (first, second) = three(decide)
    before = second.scale_loss(given[0].sum())
    with pytest.raises(lossscale.errors.GradientsError, match=r"still running|already scaled"):
        derive(first, (hooked(given[1], before.backward) * given[0]).sum(), way)


@each_way
@pytest.mark.parametrize("other_way", WAYS)
def test_gradients_of_an_earlier_pass_in_another_one_that_has_the_same_number(
    other_way, way, decide
):
    def run(wrap):
        given = [parameter() for _ in range(3)]
        first, second, third = (wrap(sgd(each, lr=0.5, fused=True)) for each in given)
        derive(first, given[2].sum(), way)
        inner = hooked(given[0], lambda: derive(second, (given[1] * given[2]).sum(), other_way))
        derive(first, inner.square().sum(), way)
        for each in (first, second, third):
            each.step()
        return [p.tolist() for p in given]

    assert run(lambda inner: wrapped(inner, decide=decide)) == run(alone)


CALLS = {
    "step": lambda o: o.step(),
    "unscale": lambda o: o.unscale_(),
    "clear": lambda o: o.zero_grad(),
}


@each_way
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("has_arrived", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_call_of_its_optimizer_in_a_backward_pass_is_refused(
    accumulates, has_arrived, several, call, way, decide
):
    """Also if the gradient of its only parameter has arrived."""
    given = [parameter(), parameter()]
    optimizer = wrapped(sgd(*given[: 1 + several], lr=0.5, fused=True), decide=decide)
    if accumulates:
        derive(optimizer, given[0].sum(), way)
    loss = given[0].square()
    if has_arrived:
        handle = given[0].register_post_accumulate_grad_hook(lambda _: CALLS[call](optimizer))
    else:
        loss = hooked(loss, lambda: CALLS[call](optimizer))
    with pytest.raises(lossscale.errors.CallOrderError, match="before all gradients have arrived"):
        derive(optimizer, loss.sum(), way)
    if has_arrived:
        handle.remove()
    assert [p.tolist() for p in given] == [[1.0, 1.0]] * 2
    optimizer.zero_grad()
    derive(optimizer, given[0].sum(), way)
    optimizer.step()
    assert given[0].tolist() == [0.5, 0.5]


# Wrappers that come and go.


@pytest.mark.parametrize("other", ["none", "scales"])
def test_a_wrapper_made_over_gradients_of_different_scales_takes_each_as_it_is(other):
    """Those of one wrapper's loss, with those that nobody or another wrapper has scaled."""
    given = [parameter(), parameter()]
    first = wrapped(sgd(given[0]), initial_scale=8)
    derive(first, given[0].sum(), "scale_loss")
    second = sgd(given[1]) if other == "none" else wrapped(sgd(given[1]), initial_scale=64)
    derive(second, given[1].sum(), "scale_loss")
    both = wrapped(sgd(*given, lr=0.5))
    both.step()
    assert [each.tolist() for each in given] == [[0.5, 0.5]] * 2


def test_each_wrapper_of_a_parameter_that_is_deleted_divides_what_another_has_scaled():
    """By the same number, which lasts from one step of the other to the next."""
    given = [parameter(), parameter()]
    first = wrapped(sgd(given[0]))
    for _ in range(2):
        second = wrapped(sgd(given[1]))
        derive(first, sum(p.sum() for p in given), "scale_loss")
        del second
        assert given[1].grad.tolist() == [1.0, 1.0]
        first.step()
        given[1].grad = None


def test_wrappers_that_are_deleted_at_the_same_time_divide_once():
    given, made = three("host")
    made[0].scale_loss(sum(p.sum() for p in given)).backward()
    made[0].cycle = made
    del made
    gc.collect()
    assert [p.grad.tolist() for p in given] == [[1.0, 1.0]] * 3


@each_way
def test_float16_gradients_of_another_wrapper_are_refused_before_any_is_divided(way, decide):
    given = [parameter(), torch.nn.Parameter(torch.ones(2, dtype=torch.float16))]
    first, second = (
        wrapped(sgd(each, lr=0.5, fused=True), decide=decide, initial_scale=8.0) for each in given
    )
    loss = sum(p.float().sum() for p in given)
    if way == "verb":
        with pytest.raises(lossscale.errors.GradientsError, match="float16"):
            first.backward(loss)
    else:
        first.scale_loss(loss).backward()
    for each in (first, second):
        with pytest.raises(lossscale.errors.GradientsError, match="float16"):
            each.step()
    assert [p.grad.tolist() for p in given] == [[8.0, 8.0]] * 2
    assert [p.tolist() for p in given] == [[1.0, 1.0]] * 2


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


# What is assigned by hand.


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_assigned_after_scale_loss_counts_as_scaled(way):
    """As with PyTorch's scaler: `.grad` is taken away after each loss, and a sum is assigned."""
    weight = parameter()
    optimizer = wrapped(sgd(weight, lr=0.5), initial_scale=8.0)
    taken = []
    for _ in range(2):
        derive(optimizer, weight.sum(), way)
        taken.append(weight.grad)
        weight.grad = None
    weight.grad = sum(taken) / 2
    assert weight.grad.tolist() == ([1.0, 1.0] if way == "verb" else [8.0, 8.0])
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]


def test_an_unseen_loss_that_adds_to_gradients_of_another_scale_is_refused():
    given, (first, second) = three("host")
    second.loss_scale_state.load_state_dict({"loss_scale": 4.0})
    first.scale_loss(given[0].sum()).backward()
    # It needs no gradient, so that its `backward` cannot be seen.
    given[0].grad += second.scale_loss(torch.ones(2))
    with pytest.raises(lossscale.errors.GradientsError, match="Make one for both"):
        second.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_step_calls_no_more_functions_while_other_wrappers_are_alive(way):
    def calls():
        weight, unowned = parameter(), parameter()
        optimizer, _partner = wrapped(sgd(weight, lr=0.5)), wrapped(sgd(weight, lr=0.5))
        with cProfile.Profile() as profile:
            for factor in (1.0, unowned):
                optimizer.zero_grad()
                derive(optimizer, (weight * factor).sum(), way)
                optimizer.step()
        assert weight.tolist() == [0.0, 0.0]
        return pstats.Stats(profile).total_calls

    calls()
    alone, others = calls(), [wrapped(sgd(parameter())) for _ in range(200)]
    assert calls() < alone + len(others)
