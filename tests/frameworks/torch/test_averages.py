"""Averages of float16 models, and their float32 state dictionaries.

The oracle averages float32 numbers by hand.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from frameworks.torch.support import bits, pairs, scaler, train_step, watched, wrapper
from frameworks.torch.test_master_weights import BF16, F16, F32, INF, X, adamw, net
from lossscale import errors
from lossscale.torch import MasterWeights, float32_state_dict, guard, unguard

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="PyTorch before 2.10"
)
# PyTorch cannot average counts by get_swa_multi_avg_fn.
AVERAGES = {
    "SWA": {"use_buffers": True},
    "SWA, one": {
        "avg_fn": lambda average, now, n: average + (now - average) / (n + 1),
        "use_buffers": True,
    },
    "SWA, all": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


class Adapted(nn.Module):
    """A norm in float32, and an adapter on a frozen base."""

    def __init__(self, dtype):
        super().__init__()
        self.base, self.adapter = net(dtype), net(dtype, 5)
        self.norm = nn.BatchNorm1d(4)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.norm((self.base(x) + self.adapter(x)).float())


def trainer(how, inner):
    """A function that trains by a loss, and what is passed as the optimizer."""
    if how in ("wrapper", "list"):
        run = wrapper([inner] if how == "list" else inner)
    else:
        run = scaler(inner, enabled=how == "scaler")
    passed = {"list": [run], "alone": inner}.get(how, watched(run))
    return functools.partial(train_step, run), passed


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("how", ["wrapper", "list", "scaler", "disabled", "alone"])
def test_averages_are_those_of_the_masters(how, name):
    dtype = F16 if how in ("wrapper", "list", "scaler") else BF16
    use_buffers = "use_buffers" in AVERAGES[name]
    expected, count, saved = None, 0, []
    for number, factor in enumerate((1.0, 1.0, INF, 1.0) if dtype == F16 else (1.0, 1.0, 1.0)):
        # A program that resumes all at the third step, which may be skipped.
        if number in (0, 2):
            model = Adapted(dtype)
            inner = MasterWeights(adamw(model.adapter))
            inner.add_param_group({"params": model.norm.parameters()})
            train, optimizer = trainer(how, inner)
            averaged = AveragedModel(copy.deepcopy(model).float(), **AVERAGES[name])
            averaged = guard(averaged, optimizer)
            parts = [model, inner, averaged, *(optimizer if how == "list" else [optimizer])]
            for part, state in zip(parts, saved, strict=False):
                part.load_state_dict(state)
        train(model(X.to(dtype)).square().mean() * factor)
        averaged.update_parameters(model)
        if factor == INF:
            continue
        masters = inner.masters
        now = [masters.get(p, p).detach().float() for p in model.parameters()]
        now += [b.float() for b in model.buffers()] if use_buffers else []
        rate = 0.1 if name == "EMA" else 1 / (count + 1)
        expected = expected or now
        expected = [a.lerp(b, rate) for a, b in pairs(expected, now)]
        count += 1
        saved = copy.deepcopy([part.state_dict() for part in parts])
    assert averaged.n_averaged == count == 3
    module = averaged.module
    found = [*module.parameters(), *(module.buffers() if use_buffers else ())]
    for average, hand in pairs(found, expected):
        # PyTorch truncates averages of counts.
        limit = 1e-7 if average.is_floating_point() else 1.0
        assert average.dtype == (F32 if average.is_floating_point() else torch.int64)
        assert torch.allclose(average.float(), hand, rtol=1e-6, atol=limit)
    if not use_buffers:
        for average, now in pairs(module.buffers(), model.buffers()):
            assert torch.equal(average, now)
    with pytest.raises(errors.ArgumentError, match=r"in torch.* stands still.*deepcopy"):
        guard(AveragedModel(model.adapter), optimizer)
    # Its parameters do not show that the model trains them.
    narrow = AveragedModel(model).requires_grad_(False)
    with pytest.raises(errors.ArgumentError, match="Average in float32"):
        guard(narrow, optimizer).update_parameters(model)
    assert unguard(averaged) is averaged


def tied(dtype=F16):
    model = nn.Sequential(net(dtype), nn.Linear(8, 6, bias=False).to(dtype), nn.BatchNorm1d(2))
    model[1].weight = model[0][0].weight
    return model


@pytest.mark.parametrize("how", ["wrapper", "list", "scaler", "alone"])
def test_a_float32_model_loads_the_masters(how):
    model = tied()
    frozen = model[0][3].requires_grad_(False)
    inner = MasterWeights(torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    train, optimizer = trainer(how, inner)
    train(model[0](X.half()).float().square().mean())
    weight, frozen = model[1].weight, frozen.weight
    for is_wide in (False, True):
        if is_wide:
            model.float()
        state = float32_state_dict(model, optimizer)
        assert list(state) == list(model.state_dict())
        assert bits(state["0.0.weight"]) == bits(inner.masters[weight]) != bits(weight.float())
        assert bits(state["0.3.weight"]) == bits(frozen.float())
        assert state["0.0.weight"] is state["1.weight"]
        assert state["2.num_batches_tracked"].dtype == torch.int64
        for key, value in state.items():
            assert type(value) is torch.Tensor
            assert not value.requires_grad
            assert not value.is_inference()
            assert value.data_ptr() != model.state_dict()[key].data_ptr()
    wide = tied(F32)
    wide.load_state_dict(state, assign=True)
    wide[0](X).mean().backward()
    torch.optim.SGD(wide.parameters(), lr=1.0).step()
    assert bits(wide[0][0].weight) != bits(inner.masters[weight])


def test_what_has_no_float32_weights():
    model = net()
    inner = MasterWeights(adamw(model[0]))
    with pytest.raises(errors.ArgumentError, match=r"'3.weight' is torch.float16 and has no mast"):
        float32_state_dict(model, inner)
    with pytest.raises(errors.ArgumentTypeError, match="With PyTorch's GradScaler, pass the"):
        float32_state_dict(model, torch.amp.GradScaler("cpu"))
    with pytest.raises(errors.ArgumentTypeError, match=r"pass the MasterWeights: guard\(averaged"):
        guard(AveragedModel(net(F32)), torch.amp.GradScaler("cpu"))
    both = [inner, MasterWeights(adamw(model[3]))]
    assert {v.dtype for v in float32_state_dict(model, both).values()} == {F32}


class Plain(nn.Linear):
    def state_dict(self):
        return super().state_dict()


def with_hook(change):
    """A module whose state dictionary is changed by its own code."""
    model = nn.Linear(6, 4)
    model.register_state_dict_post_hook(lambda module, state, prefix, _: change(module, state))
    return model


def split(module, state):
    weight = state.pop("weight")
    state["a"], state["b"] = weight[:1].clone(), weight[1:].T


SAVED = {
    "detached": lambda module, state: state.update({k: v.detach() for k, v in state.items()}),
    "data": lambda module, state: state.update({k: v.data.clone() for k, v in state.items()}),
    "split": split,
    "own": lambda module, state: state.update(weight=module.weight),
    "none": lambda module, state: None,
    "plain": None,
}


@pytest.mark.parametrize("how", SAVED)
def test_what_a_model_makes_of_its_state_is_made_of_the_masters(how):
    model = (Plain(6, 4) if how == "plain" else with_hook(SAVED[how])).half()
    inner = MasterWeights(adamw(model))
    trainer("wrapper", inner)[0](model(X.half()).float().square().mean())
    before = dict(model.named_parameters())
    with torch.inference_mode():
        state = float32_state_dict(model, inner)
    weight = torch.cat([state["a"], state["b"].T]) if how == "split" else state["weight"]
    assert bits(weight) == bits(inner.masters[model.weight]) != bits(model.weight.float())
    assert not any(v.requires_grad or v.is_inference() for v in state.values())
    assert all(model.get_parameter(name) is p for name, p in before.items())


def test_a_state_that_the_model_rounds_is_refused():
    model = with_hook(lambda module, state: state.update(weight=state["weight"].half())).half()
    weight, inner = model.weight, MasterWeights(adamw(model))
    with pytest.raises(errors.ArgumentError, match=r"'weight' of model.state_dict\(\) is torch.fl"):
        float32_state_dict(model, inner)
    assert model.weight is weight
