"""What this release of PyTorch has of what it does not document."""

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from lossscale.torch import overflow_check
from lossscale.torch.fused import steps_as_torch


@pytest.mark.parametrize("look", [overflow_check._kernel, overflow_check._in_two_passes])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_one_pass_and_two_give_the_same(look, bad):
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([4.0 if bad is None else bad])]
    found = torch.zeros(())
    look(tensors, found, torch.tensor(0.5))
    assert bool(found) == (bad is not None)
    assert tensors[0].tolist() == [0.5, 1.0]


def test_writing_to_a_tensor_is_counted():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.fill_(1.0)
    assert tensor._version > before
    # Reading is not.
    before = tensor._version
    tensor.tolist()
    assert tensor._version == before


def test_casting_is_switched_off_by_an_attribute_that_entering_reads():
    casting = torch.autocast("cpu", torch.bfloat16)
    assert casting._enabled
    casting._enabled = False
    with casting:
        assert not torch.is_autocast_enabled("cpu")
    casting._enabled, casting.fast_dtype = True, torch.float16
    with casting:
        assert torch.get_autocast_dtype("cpu") == torch.float16


def test_hooks_are_where_they_are_shared():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    handle = optimizer.register_step_pre_hook(lambda *given: None)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    handle.remove()
    assert len(optimizer._optimizer_step_pre_hooks) == 0


def test_some_have_more():
    sparse = torch.tensor([1.0, 0.0]).to_sparse()
    assert sparse._values().tolist() == [1.0]
    scaler = torch.amp.GradScaler("cpu")
    assert callable(scaler._check_inf_per_device)
    fused = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5, fused=True)
    assert fused._step_supports_amp_scaling
    assert torch_optimizer._global_optimizer_pre_hooks == {}
    torch.optim.lr_scheduler.StepLR(fused, 1)
    counted = vars(fused)["step"]
    assert hasattr(counted, "_wrapped_by_lr_sched") or hasattr(counted, "_with_counter")
    assert steps_as_torch(fused)
