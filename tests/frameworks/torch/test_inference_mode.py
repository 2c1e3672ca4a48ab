"""What is made or changed in inference mode can be trained on."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lossscale
from benchmarks.frameworks.torch_native import Way
from frameworks.torch.support import DEVICE, bits
from frameworks.torch.test_master_weights import INF, adamw, loss_of, net
from lossscale.torch import MasterWeights, guard

pytestmark = [
    pytest.mark.usefixtures("on_the_device"),
    pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="PyTorch before 2.10"),
]


def kept_tensors(root):
    """All tensors that an object of this library, or what it holds, refers to."""
    stack, seen = [root], set()
    while stack:
        each = stack.pop()
        if id(each) in seen or isinstance(each, (torch.Size, type)):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, collections.abc.Mapping):
            stack += [*dict(each).keys(), *dict(each).values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            stack += each
        elif type(each).__module__.startswith(("lossscale", "torch")) and hasattr(each, "__dict__"):
            stack.append(vars(each))


def trained_in(mode, verb):
    """A training run, all of which is made, and does what `backward` does not, in a mode."""
    model, late = net(), net(seed=7)[3].requires_grad_(False)
    model.append(nn.BatchNorm1d(4).to(DEVICE))
    model.forward = lambda x: model[:4](x) + model[4](late(model[0](x)).float())
    averaged = AveragedModel(copy.deepcopy(model).float())
    with mode():
        inner = MasterWeights(adamw(model, fused=True))
        way = Way(verb, [inner], scale=2.0**8, device=DEVICE)
        steppers = [way.scaler] if way.scaler else way.wrappers
        _ = guard(averaged, steppers), guard(model, steppers)
        watched = () if verb == "device" else steppers
        monitors = [lossscale.torch.Monitor(each, model, log=len) for each in watched]
    for number in range(4):
        with mode():
            if number == 2:
                way.optimizers[0].add_param_group({"params": [late.requires_grad_().weight]})
                inner.set_masters(inner.masters)
        loss = loss_of(model, INF if number == 1 else 1.0)
        if verb != "backward":
            with mode():
                way.scaled(loss.detach())
        way.backward(loss)
        with mode():
            way.step()
            for monitor in monitors:
                monitor.step(2.0)
            averaged.update_parameters(model)
            for each in (*way.wrappers, inner):
                each.zero_grad(number % 2)
    kept = list(kept_tensors([steppers, inner, averaged, monitors]))
    return kept, [*model.parameters(), *averaged.parameters(), *inner.masters.values()]


@pytest.mark.parametrize("verb", ["backward", "scale_loss", "device", "drop-in"])
def test_no_tensor_that_outlives_a_call_is_one_of_inference_mode(verb):
    """Masters, scales, counts, records, what a guard copies, averages and monitors."""
    made, expected = (trained_in(mode, verb) for mode in (torch.inference_mode, torch.no_grad))
    assert [each for each in made[0] if each.is_inference()] == []
    assert len(made[0]) == len(expected[0]) > 20
    assert list(map(bits, made[1])) == list(map(bits, expected[1]))
