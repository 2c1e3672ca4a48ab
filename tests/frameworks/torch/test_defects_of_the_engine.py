"""What was found by trying to break it: one test for each."""

import copy
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import lossscale
from frameworks.torch.support import bits, wrapped
from lossscale.errors import ArgumentError, CallOrderError, StateDictError, UnsupportedError
from lossscale.torch import GradScaler, guard

INF = torch.inf


def parameter(size=2):
    return torch.nn.Parameter(torch.ones(size))


def sgd(*parameters, **settings):
    return torch.optim.SGD(list(parameters), **{"lr": 1.0, **settings})


# Scaled gradients that are added to unscaled ones.


def twice(o, a, b):
    for _ in range(2):
        o.scale_loss(a.sum()).backward()


def of_one_head(o, a, b):
    o.scale_loss(a.sum()).backward()


def of_another_parameter(o, a, b):
    b.grad = None
    o.scale_loss(b.sum()).backward()


@pytest.mark.parametrize(
    ("then", "wanted"),
    [(twice, (3.0, 1.0)), (of_one_head, (2.0, 1.0)), (of_another_parameter, (1.0, 1.0))],
)
def test_gradients_that_are_added_to_unscaled_ones_add_up(then, wanted):
    a, b = parameter(), parameter()
    o = wrapped(sgd(a, b))
    o.scale_loss(a.sum() + b.sum()).backward()
    o.unscale_()
    then(o, a, b)
    o.step()
    assert (a[0].item(), b[0].item()) == tuple(1.0 - each for each in wanted)


def test_of_several_optimizers_one_that_is_not_cleared():
    a, b = parameter(), parameter()
    o = wrapped([sgd(a), sgd(b)])
    o.scale_loss(a.sum() + b.sum()).backward()
    o.unscale_()
    o.optimizers[0].zero_grad()
    o.scale_loss(a.sum() + b.sum()).backward()
    o.step()
    assert (a[0].item(), b[0].item()) == (0.0, -1.0)


def test_a_scaled_loss_without_a_backward_leaves_gradients_unscaled():
    a = parameter()
    o = wrapped(sgd(a))
    o.scale_loss(a.sum()).backward()
    o.unscale_()
    with torch.no_grad():
        o.scale_loss(a.sum())
    o.step()
    assert a.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("clear", ["model", "zero_", "optimizer inside"])
@pytest.mark.parametrize("factor", [1.0, INF])
def test_gradients_that_are_cleared_where_they_are(clear, factor):
    model = torch.nn.Linear(2, 1)
    o = wrapped(sgd(*model.parameters()))
    for _ in range(3):
        o.scale_loss(model(torch.ones(1, 2)).sum() * factor).backward()
        o.unscale_()
        if clear == "model":
            model.zero_grad(set_to_none=False)
        elif clear == "zero_":
            for p in model.parameters():
                p.grad.zero_()
        else:
            o.inner_optimizer.zero_grad(set_to_none=False)
    before = [p.detach().clone() for p in model.parameters()]
    o.scale_loss(model(torch.ones(1, 2)).sum()).backward()
    o.step()
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value - 1.0)
    # What was left out on an overflow has lowered the scale.
    skipped = 3 if factor == INF else 0
    assert (o.steps_skipped, float(o.loss_scale)) == (skipped, 2.0 ** (15 - skipped))


# Where the device decides, after the state was loaded or cleared.


@pytest.mark.parametrize("how", ["load", "clear"])
@pytest.mark.parametrize(
    "make",
    [
        lambda *p: sgd(*p, momentum=0.9, fused=True),
        lambda *p: torch.optim.AdamW(p, fused=True),
    ],
    ids=["SGD", "AdamW"],
)
def test_a_first_step_after_a_load_is_decided_by_the_host(how, make):
    def run(decide, factors):
        a, b = parameter(), parameter()
        fresh = make(a, b).state_dict()
        o = wrapped(make(a, b), decide=decide)
        for number, factor in enumerate(factors):
            if number == 2:
                if how == "load":
                    o.load_state_dict(copy.deepcopy(fresh))
                else:
                    o.state.clear()
            o.zero_grad()
            o.scale_loss((a.sum() + b.sum()) * factor).backward()
            o.step()
        return bits([a, b, list(o.inner_optimizer.state_dict()["state"].values())])

    for factors in ((1.0, 1.0, INF), (1.0, 1.0, INF, 1.0, INF, 1.0)):
        assert run("device", factors) == run("host", factors)


def test_what_the_device_cannot_decide_is_refused():
    with pytest.raises(UnsupportedError, match="This LBFGS cannot"):
        wrapped(torch.optim.LBFGS([parameter()]), decide="device")
    with pytest.raises(ArgumentError, match="with parameters"):
        wrapped(torch.optim.SGD([{"params": []}], lr=0.1), decide="device")


# Copies, reports, failures.


@pytest.mark.parametrize("how", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.filterwarnings("ignore:Seems like .optimizer.step..:UserWarning")
def test_a_copied_guard_with_a_scaler_is_held_back_at_once(how):
    w = parameter()
    inner = sgd(w)
    scaler = GradScaler("cpu", init_scale=8.0)
    scheduler = guard(torch.optim.lr_scheduler.ExponentialLR(inner, 0.5), scaler)

    def step(w, inner, scaler, scheduler, factor=1.0):
        inner.zero_grad()
        scaler.scale((w * factor).sum()).backward()
        scaler.step(inner)
        scaler.update()
        scheduler.step()
        return scheduler.get_last_lr()

    everything = (w, inner, scaler, scheduler)
    for _ in range(3):
        step(*everything)
    copied = how(everything)
    assert step(*everything, INF) == step(*copied, INF) == [0.125]


def test_the_parameters_that_overflow_are_named_of_all_that_are_skipped_together():
    a, b = parameter(), parameter()
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.name_overflows([("a", a), ("b", b)])
    parts = [sgd(a), torch.optim.AdamW([b])]
    for bad, expected in ((a, ["a"]), (b, ["b"])):
        for part in parts:
            part.zero_grad()
        scaler.scale(a.sum() + b.sum() + (bad * INF).sum()).backward()
        scaler.step(parts)
        scaler.update()
        assert [each.name for each in scaler.last_nonfinite] == expected


def test_a_step_of_a_list_that_fails_leaves_nothing():
    scaler = GradScaler("cpu")
    with pytest.raises(CallOrderError):
        scaler.step([sgd(parameter())])
    copy.deepcopy(scaler)

    class TakesAScaler(torch.optim.SGD):
        def step(self, closure=None, grad_scaler=None):
            raise AssertionError

    scaler.scale(torch.ones(()))
    with pytest.raises(UnsupportedError, match="cannot be one of several"):
        scaler.step([TakesAScaler([parameter()], lr=1.0), sgd(parameter())])


def test_half_after_wrapping():
    model = torch.nn.Linear(2, 1)
    o = wrapped(sgd(*model.parameters(), fused=True), initial_scale=8.0)
    model.half()
    before = model.bias.detach().clone()
    o.scale_loss(model(torch.ones(1, 2).half()).sum()).backward()
    o.step()
    assert torch.equal(model.bias, before - 1.0)


# States.


def test_to_ask_for_the_state_of_several_makes_none():
    a, b = parameter(), parameter()
    o = wrapped([torch.optim.Adam([p], fused=True) for p in (a, b)], decide="device")
    o.scale_loss((a + b * INF).sum()).backward()
    o.step()
    assert o.state.get(a) is None
    assert o.state_dict()["state"] == {}
    o.zero_grad()
    model = torch.nn.ParameterDict({"a": a, "b": b})
    assert get_optimizer_state_dict(model, o)["state"]["a"].keys() == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


class WithMore(torch.optim.SGD):
    """Has a state that is of no parameter, and a key of its own in the dictionary."""

    def __init__(self, *given, number=0, **settings):
        super().__init__(*given, **settings)
        self.state["global"] = {"number": number}
        self.slow = number

    def state_dict(self):
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict):
        self.slow = state_dict["slow"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "slow"})


def test_what_is_of_no_parameter_is_kept_for_each_of_several():
    def made(*numbers):
        return wrapped([WithMore([parameter()], lr=1.0, number=number) for number in numbers])

    saved, loaded = made(1, 2), made(3, 4)
    loaded.load_state_dict(saved.state_dict())
    assert [each.slow for each in loaded] == [1, 2]
    assert [each.state["global"]["number"] for each in loaded] == [1, 2]


def test_a_list_of_dictionaries_of_wrappers_leaves_no_numbers_behind():
    states = [wrapped(sgd(parameter())).state_dict() for _ in range(2)]
    o = wrapped([sgd(parameter()), sgd(parameter())])
    o.load_state_dict(states)
    assert float(o.param_groups[0]["loss_scale"]) == 2.0**15
    assert "loss_scale" not in o.param_groups[1]


def test_a_load_of_several_that_fails_changes_nothing():
    def refuse(optimizer, state_dict):
        raise OSError("no")

    parts = [sgd(parameter(), lr=0.5), sgd(parameter(), lr=0.5)]
    o = wrapped(parts)
    other = wrapped([sgd(parameter(), lr=0.25), sgd(parameter(), lr=0.25)])
    handle = parts[1].register_load_state_dict_pre_hook(refuse)
    with pytest.raises(OSError, match="no"):
        o.load_state_dict(other.state_dict())
    handle.remove()
    assert [group["lr"] for group in o.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0),
    ],
)
def test_schedules_that_look_for_momentum(make):
    o = wrapped([sgd(parameter(), momentum=0.9), sgd(parameter(), momentum=0.9)])
    make(o)
    with pytest.raises(ValueError, match="momentum"):
        make(wrapped([sgd(parameter(), momentum=0.9), torch.optim.Adagrad([parameter()])]))


class Saved:
    """DeepSpeed saves its scaler as an object."""

    def __init__(self):
        self.cur_scale, self.cur_iter, self.last_overflow_iter = 512.0, 8, 0
        self.scale_factor, self.scale_window, self.delayed_shift = 2.0, 1000, 1


def test_a_scaler_that_was_saved_itself():
    scaler = GradScaler("cpu")
    scaler.load_state_dict({"loss_scaler": Saved(), "dynamic_loss_scale": True})
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (512.0, 7)
    with pytest.raises(StateDictError, match="not the state of a gradient scaler"):
        scaler.load_state_dict({"loss_scaler": 5})
    o = wrapped(sgd(parameter()))
    with pytest.raises(ArgumentError, match="must be a number"):
        o.loss_scale_state.load_state_dict({"loss_scale": 10**400})


def test_a_list_goes_to_the_public_class_as_well():
    o = lossscale.LossScaleOptimizer([sgd(parameter()), sgd(parameter())])
    assert type(o) is lossscale.torch.LossScaleOptimizer
    assert len(o) == 2


def test_unscaling_in_a_compiled_loop_is_not_compiled_for_a_scale():
    w = parameter()
    o = wrapped(sgd(w), dynamic_growth_steps=1)

    def loop():
        o.zero_grad()
        o.scale_loss(w.sum()).backward()
        o.unscale_()
        o.step()

    compiled = torch.compile(loop, backend="eager")
    for _ in range(2):
        compiled()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            compiled()
    assert float(o.loss_scale) == 2.0**20
