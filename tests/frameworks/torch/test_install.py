"""The drop-in in the places of PyTorch's scaler, and out of them again."""

import importlib
import subprocess
import sys

import pytest
import torch

import lossscale.torch
from frameworks.torch.scaling import OPTIMIZERS, numbers, one_step, parameters
from lossscale.torch.installation import _PLACES, _SHARDED

PLACES = [(place, "GradScaler") for place in _PLACES] + [(_SHARDED, "ShardedGradScaler")]


def now():
    return {place: getattr(importlib.import_module(place), name) for place, name in PLACES}


def test_in_every_place_and_out_again():
    before = now()
    with lossscale.torch.install():
        for place, scaler in now().items():
            assert issubclass(scaler, lossscale.torch.GradScaler), place
        assert torch.amp.GradScaler is torch.GradScaler is lossscale.torch.GradScaler
    assert now() == before
    assert not any(issubclass(scaler, lossscale.torch.GradScaler) for scaler in before.values())


def test_pytorchs_own_classes_are_not_made_of_what_stands_in_their_places():
    """Also where install() is the first that imports one of them."""
    program = (
        "import lossscale.torch; lossscale.torch.install().undo();"
        "import torch.distributed.fsdp.sharded_grad_scaler as sharded;"
        "print([cls.__module__ for cls in sharded.ShardedGradScaler.__mro__[:2]])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str([_SHARDED, "torch.amp.grad_scaler"])


def test_as_plain_calls_in_any_order_and_out_again_after_an_error():
    before = now()
    first, second = lossscale.torch.install(), lossscale.torch.install()
    first.undo()
    first.undo()
    assert torch.amp.GradScaler is lossscale.torch.GradScaler
    second.undo()
    assert now() == before
    with pytest.raises(OSError), lossscale.torch.install():
        raise OSError
    assert now() == before


def test_a_program_that_runs_unedited():
    with lossscale.torch.install():
        weights = parameters(1)
        optimizer = OPTIMIZERS["adamw-fused"](weights)
        # The beginning of PyTorch's own warning, which programs filter by.
        message = r"`torch\.cpu\.amp\.GradScaler\(args\.\.\.\)` is deprecated\."
        with pytest.warns(FutureWarning, match=message) as caught:
            scaler = torch.cpu.amp.GradScaler(8.0, growth_interval=1)
        assert caught[0].filename == __file__
        one_step(scaler, optimizer, weights, torch.inf)
        assert scaler.get_scale() == 4
        assert numbers(weights) == [[1.0] * 3]
    one_step(scaler, optimizer, weights)
    assert scaler.get_scale() == 8
    assert isinstance(scaler, torch.amp.GradScaler)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_the_one_of_cuda():
    with (
        lossscale.torch.install(),
        pytest.warns(FutureWarning),
        pytest.warns(UserWarning, match="Disabling"),
    ):
        assert not torch.cuda.amp.GradScaler(2.0**10).is_enabled()


def test_the_sharded_one_has_its_own_order_of_arguments():
    sharded = importlib.import_module(_SHARDED)
    with lossscale.torch.install():
        scaler = sharded.ShardedGradScaler("cpu", 8.0, 0.25, 4.0, 7)
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_factor() == 4
    assert scaler.get_growth_interval() == 7
