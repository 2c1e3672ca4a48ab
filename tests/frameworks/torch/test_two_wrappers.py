"""Two wrappers, and a loss of one that reaches the parameters of both."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lossscale
from frameworks.torch.support import (
    alone,
    bits,
    derive,
    ends_as_without_scaling,
    parameter,
    sgd,
    wrapped,
)
from lossscale.torch.engine import Engine

WAYS = ["verb", "scale_loss"]
DECIDES = ["host", "device"]


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


@pytest.mark.parametrize("decide", DECIDES)
@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("decide", DECIDES)
@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("decide", DECIDES)
@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("decide", DECIDES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other_way", WAYS)
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("kind", ["eager", "reentrant"])
def test_an_overflow_by_the_loss_of_another_wrapper_of_the_same_parameter(
    kind, extra, other_way, way, decide
):
    """The first has checked the gradients that the second then makes infinite."""
    shared, *own = (parameter() for _ in range(3))
    first, second = (
        wrapped(sgd(shared, *[each] * extra, lr=0.5, fused=True), decide=decide) for each in own
    )
    derive(first, shared.sum() + own[0].sum(), way)
    if way == "scale_loss":
        first.unscale_()
    x = torch.ones(2, requires_grad=True)
    product = (
        checkpoint(lambda x: x * shared, x, use_reentrant=True) if kind == "reentrant" else shared
    )
    derive(second, (product * torch.inf).sum(), other_way)
    for each in (first, second):
        each.step()
    assert [p.tolist() for p in (shared, own[0])] == [[1.0, 1.0]] * 2
    assert [int(each.steps_skipped) for each in (first, second)] == [1, 1]


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


def test_a_loss_that_nobody_scaled_is_warned_of_after_gradients_of_another_were_cleared():
    given, (generator, critic) = pair("host")
    derive(generator, given[0].sum() + given[1].sum(), "verb")
    critic.zero_grad()
    given[1].sum().backward()
    with pytest.warns(lossscale.LossScaleWarning, match="scaled no loss"):
        critic.step()


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
    info = Engine.info
    monkeypatch.setattr(Engine, "info", lambda self: asked.append(self) or info(self))
    derive(optimizer, (weight * x * plain).sum(), way)
    optimizer.step()
    optimizer.zero_grad()
    assert set(asked) == {optimizer._engine}
    assert len(others) == 20


HOOKS = {
    "step": lambda o, p: o.step(),
    "unscale": lambda o, p: (o.unscale_(), o.step()),
    "clip": lambda o, p: (o.unscale_(), torch.nn.utils.clip_grad_norm_([p], 0.25), o.step()),
}


@pytest.mark.parametrize("decide", DECIDES)
@pytest.mark.parametrize("way", WAYS)
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
