"""Rules that look at how large gradients are, in the drop-in and in what is special to PyTorch.

The wrapper is held to NumPy with all other shells, in tests/conformance/test_what_rules_see.py.
"""

import copy

import pytest
import torch

import lossscale
from frameworks.torch.scaling import OPTIMIZERS, parameters
from frameworks.torch.seeing import EDGES, Noting, expected, noted
from frameworks.torch.support import fill, wrapped
from lossscale import Needs
from lossscale.errors import UnsupportedError
from lossscale.torch.grad_scaler.scaler import GradScaler

GRADIENTS = [torch.tensor([0.5, -1.0, 2.0]), torch.tensor([-4.0, -0.125, 0.0])]
SPOILED = [GRADIENTS[0], torch.tensor([-4.0, torch.inf, 0.0])]


def scaler_with(weights, gradients, **settings):
    scaler = GradScaler("cpu", rule=Noting(**settings))
    give(scaler, weights, gradients)
    return scaler


def give(scaler, weights, gradients):
    factor = scaler.scale(torch.ones(()))
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = None if gradient is None else (gradient * factor).to(weight.dtype)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_a_scaler_sees_what_the_wrapper_sees(name, unscale):
    weights = parameters(2)
    optimizer = OPTIMIZERS[name](weights)
    scaler = scaler_with(weights, GRADIENTS)
    for gradients in (GRADIENTS, SPOILED, [None, GRADIENTS[0]], GRADIENTS):
        give(scaler, weights, gradients)
        scale = scaler.get_scale()
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, 0.001)
        scaler.step(optimizer)
        scaler.update()
        given = [gradient for gradient in gradients if gradient is not None]
        assert noted(scaler.state_dict()) == expected(given, scale)
    assert scaler.get_scale() == 4
    assert scaler.steps_skipped == 1


def test_a_scaler_sees_all_of_its_optimizers_together():
    weights = parameters(2)
    scaler = scaler_with(weights, GRADIENTS)
    # One of them has no gradient.
    optimizers = [OPTIMIZERS["sgd"](given) for given in ([weights[0]], [weights[1]], parameters(1))]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert noted(scaler.state_dict()) == expected(GRADIENTS, 8.0)


def test_a_scaler_sees_float16_gradients_that_a_fused_optimizer_divides():
    weights = [torch.nn.Parameter(weight.detach().half()) for weight in parameters(2)]
    optimizer = OPTIMIZERS["adamw-fused"](weights)
    scaler = scaler_with(weights, GRADIENTS)
    scaler.step(optimizer)
    scaler.update()
    assert noted(scaler.state_dict()) == expected(GRADIENTS, 8.0)


def test_what_a_scaler_saw_is_saved_and_loaded():
    weights = parameters(2)
    scaler = scaler_with(weights, GRADIENTS)
    scaler.step(OPTIMIZERS["sgd"](weights))
    scaler.update()
    other = GradScaler("cpu", rule=Noting())
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() == copy.deepcopy(scaler).state_dict()


def test_a_step_without_gradients_moves_nothing():
    weights = parameters(2)
    scaler = scaler_with(weights, [None, None])
    before = scaler.state_dict()
    scaler.step(OPTIMIZERS["sgd"](weights))
    scaler.update()
    assert scaler.state_dict() == before


def test_a_scaler_whose_subclass_measures_nothing_says_so():
    class Replacing(GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            return {found_inf.device: found_inf}

    weights = parameters(2)
    scaler = Replacing("cpu", rule=Noting())
    give(scaler, weights, GRADIENTS)
    scaler.step(OPTIMIZERS["sgd"](weights))
    with pytest.raises(UnsupportedError, match=r"Replacing replaces `_unscale_grads_`.*super"):
        scaler.update()


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("needs", [Needs(), Needs(True), Needs(False, EDGES), Needs(True, EDGES)])
def test_a_rule_that_does_not_check_is_moved_all_the_same(needs, decide, clip):
    """A schedule of scales, or one that follows the largest gradient."""
    weights = parameters(2)
    rule = Noting(checks_gradients=False, needs=needs)
    inner = OPTIMIZERS["adamw-fused"](weights)
    optimizer = wrapped(inner, rule=rule, decide=decide, clip_norm=clip)
    for _ in range(2):
        fill(optimizer, weights, GRADIENTS)
        optimizer.step()
    assert int(optimizer.dynamic_counter) == 2
    largest, low, high, elements = expected(GRADIENTS, 8.0)
    counts = [low, high, elements] if needs.counts_from else [0.0] * 3
    saved = noted(optimizer.state_dict())
    assert saved == [largest if needs.largest else 0.0, *counts]


class Counting(lossscale.FixedScale):
    """A fixed scale that counts finite steps all the same."""

    def update(self, state, seen, *, xp):
        return state._replace(good_steps=xp.where(seen.finite, state.good_steps + 1, 0))


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_a_fixed_scale_may_remember_something(name):
    weights = parameters(2)
    optimizer = wrapped(OPTIMIZERS[name](weights), rule=Counting(8.0))
    for _ in range(3):
        fill(optimizer, weights, GRADIENTS)
        optimizer.step()
    assert int(optimizer._scales.state.good_steps) == 3
    assert float(optimizer.loss_scale) == 8.0
