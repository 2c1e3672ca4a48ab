"""Two wrappers, and a loss of one that reaches the parameters of both."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lossscale
from frameworks.torch.support import (
    alone,
    assert_same_without_scaling,
    derive,
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
def test_an_overflow_that_a_skipped_step_left_behind_is_none_of_a_later_loss(way, decide):
    """The generator's loss reaches the critic, whose own loss has overflowed."""
    given, (generator, critic) = pair(decide)
    for factor in (1.0, torch.inf, 1.0):
        critic.zero_grad()
        derive(critic, given[1].sum() * factor, way)
        critic.step()
        generator.zero_grad()
        derive(generator, loss_of(given, None), way)
        generator.step()
    assert [int(each.steps_skipped) for each in (generator, critic)] == [0, 1]
    assert given[0].tolist() == [1.0 - 3 / 2**10] * 2


@pytest.mark.parametrize("decide", DECIDES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps_first", [0, 1])
def test_an_overflow_whose_step_is_still_to_come_is_none_of_a_later_loss(steps_first, way, decide):
    """The critic has not yet skipped its step when the generator's loss reaches it."""
    given, (generator, critic) = pair(decide)
    derive(critic, given[1].sum() * torch.inf, way)
    derive(generator, loss_of(given, None), way)
    for each in (generator, critic) if steps_first == 0 else (critic, generator):
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
def test_a_group_that_is_added_within_a_step_trains_right_or_is_refused(added, has_gradients, way):
    def run(wrap):
        trained, late = parameter(), parameter()
        optimizer = wrap(sgd(trained, lr=0.5))

        def adds(now):
            if now == added:
                optimizer.add_param_group({"params": [late]})

        adds("before backward")
        loss = (trained * (late if has_gradients else late.detach())).sum() * 5.0
        loss.backward() if wrap is alone else derive(optimizer, loss, way)
        adds("before unscale_")
        if wrap is not alone:
            optimizer.unscale_()
        adds("before step")
        optimizer.step()
        return [p.tolist() for p in (trained, late)]

    refused = has_gradients and (
        added == "before step" or (added == "before unscale_" and way == "scale_loss")
    )
    if not refused:
        assert run(wrapped) == run(alone)
        return
    with pytest.raises(lossscale.errors.CallOrderError, match="group with gradients was added"):
        run(wrapped)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other_way", WAYS)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_a_group_whose_gradients_another_wrapper_has_brought(shares, unscales, other_way, way):
    """Its own loss is still scaled when the group comes."""

    def run(wrap):
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

    assert_same_without_scaling(run)


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


WITHIN_A_STEP = {
    "unscales": lambda optimizer: optimizer.unscale_(),
    "loads": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "nothing": lambda optimizer: None,
}


@pytest.mark.parametrize("does", WITHIN_A_STEP)
def test_a_refused_group_changes_nothing_and_zero_grad_goes_on(does):
    trained, late = parameter(), parameter()
    optimizer = wrapped(sgd(trained, lr=0.5))
    optimizer.scale_loss((trained * late).sum()).backward()
    WITHIN_A_STEP[does](optimizer)
    optimizer.add_param_group({"params": [late]})
    before = [t.tolist() for p in (trained, late) for t in (p, p.grad)]
    for call in (optimizer.step, lambda: optimizer.scale_loss((trained * late).sum()).backward()):
        with pytest.raises(lossscale.errors.CallOrderError, match="group with gradients was added"):
            call()
        assert [t.tolist() for p in (trained, late) for t in (p, p.grad)] == before
    optimizer.zero_grad()
    optimizer.scale_loss((trained * late).sum()).backward()
    optimizer.step()
    assert (trained.tolist(), late.tolist()) == ([0.5, 0.5], [0.5, 0.5])


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


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_another_wrapper_clears_in_place_are_zeros_to_apply(way):
    given, (first, second) = pair("host")
    other = wrapped(sgd(given[0], fused=True))
    derive(first, loss_of(given, None), way)
    other.zero_grad(set_to_none=False)
    for each in (first, second):
        each.step()
    assert [p.tolist() for p in given] == [[1.0, 1.0], [1.0 - 2.0**-10] * 2]


@pytest.mark.parametrize("decide", DECIDES)
@pytest.mark.parametrize("way", WAYS)
def test_states_of_two_wrappers_of_which_one_has_no_gradients(way, decide):
    given, made = pair(decide)
    derive(made[0], given[1].sum(), way)
    states = [each.state_dict() for each in made]
    for each, state in zip(made, states, strict=True):
        each.load_state_dict(state)
    made[1].step()
    assert given[1].tolist() == [1.0 - 2.0**-10] * 2


@pytest.mark.parametrize("decide", DECIDES)
@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("decide", DECIDES)
@pytest.mark.parametrize("way", WAYS)
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


def trained_with(kind, given, steps, **settings):
    """The parameters, and the scales, after steps of two optimizers with a scaler each."""
    inners = [sgd(each, lr=2.0**-10) for each in given]
    scalers = [kind("cpu", init_scale=scale, **settings) for scale in (2.0**16, 2.0**10)]
    for number, loss in steps:
        inners[number].zero_grad()
        scalers[number].scale(loss()).backward()
        scalers[number].step(inners[number])
        scalers[number].update()
    return [p.tolist() for p in given], [each.get_scale() for each in scalers]


@pytest.mark.parametrize("kept", [0, 1])
def test_scalers_of_optimizers_that_share_parameters_train_as_plain_ones(kept):
    def run(kind):
        weight = parameter()
        steps = [(number, lambda: (weight**2).sum()) for number in (kept, 1 - kept, kept)]
        return trained_with(kind, [weight, weight], steps)

    assert run(lossscale.torch.GradScaler) == run(torch.amp.GradScaler)


def test_two_scalers_decide_each_by_its_own_gradients_as_those_of_pytorch():
    def run(kind):
        given = [parameter(), parameter()]
        steps = [(n % 2, lambda n=n: loss_of(given, n % 3)) for n in range(24)]
        return trained_with(kind, given, steps, growth_interval=3)

    assert run(lossscale.torch.GradScaler) == run(torch.amp.GradScaler)
