"""What a diagnosis leaves behind: nothing."""

import random

import numpy as np
import pytest
import torch

import lossscale
from frameworks.torch.modules import MODELS, batches_of, kernels_of, loss_fn, model_of
from frameworks.torch.support import bits

diagnose = lossscale.torch.diagnose


class Counting(torch.nn.Module):
    """Counts its calls, replaces a buffer, and draws from every generator there is."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.calls = 0
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().mean((0, 1))
        self.cache = x
        return self.inner(x) * torch.rand(()) * np.random.rand() * random.random()


def everything(model):
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return (
        bits({name: (tensor, tensor.grad) for name, tensor in model.named_parameters()}),
        bits(dict(model.named_buffers())),
        [(id(tensor), tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())],
        [(id(m), m.training, sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()],
        [part.tolist() if hasattr(part, "tolist") else str(part) for part in generators],
        (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.autocast.__enter__,
        ),
    )


@pytest.mark.parametrize("kind", [*MODELS, "counting"])
@pytest.mark.parametrize("ends", ["well", "by an exception"])
def test_nothing_is_left_behind(kind, ends):
    model = Counting() if kind == "counting" else model_of(kind)
    batches = batches_of("linear" if kind == "counting" else kind, 1)
    model.train(kind != "batch norm")
    loss_fn(model, batches[0]).backward()
    before, data = everything(model), bits(batches)
    calls = []

    def loss(model, batch):
        calls.append(model.training)
        if ends != "well" and len(calls) > 2:
            raise KeyboardInterrupt
        return loss_fn(model, batch.mul_(2))

    try:
        with kernels_of(kind):
            diagnose(model, loss, batches)
    except KeyboardInterrupt:
        assert ends != "well"
    assert everything(model) == before
    assert bits(batches) == data
    assert all(calls)
    assert len(calls) > 2
    if kind == "counting":
        assert model.calls == 1


def test_a_scripted_model_keeps_its_mode():
    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.ReLU())).eval()
    diagnose(model, loss_fn, batches_of("linear", 1))
    assert not any(module.training for module in model.modules())


def test_modes_within_a_model_in_training_are_kept():
    model = model_of("batch norm")
    model[1].eval()
    seen = set()

    def loss(model, batch):
        seen.add((model.training, model[1].training))
        return loss_fn(model, batch)

    diagnose(model, loss, batches_of("batch norm", 1))
    assert seen == {(True, False)}


@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_it_finds_the_same_wherever_it_is_asked(around):
    model, batches = model_of("linear"), batches_of("linear", 1)
    expected = diagnose(model, loss_fn, batches)
    with around():
        assert diagnose(model, loss_fn, batches) == expected


def test_hooks_that_step_at_once_are_not_called():
    model = model_of("linear")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.data.zero_())
    before = bits(model.state_dict())
    diagnose(model, loss_fn, batches_of("linear", 1))
    assert bits(model.state_dict()) == before
