"""Rules that look at how large gradients are, in the drop-in and in what is special to PyTorch.

The wrapper is held to NumPy with all other wrappers, in tests/conformance/test_what_rules_see.py.
"""

import copy

import pytest
import torch

import lossscale
from frameworks.torch.scaling import OPTIMIZERS, parameters
from frameworks.torch.support import WithScaler, expected_stats, fill, noted, scaler, step, wrapped
from lossscale import StatsRequest
from lossscale.torch.grad_scaler import GradScaler
from recording_rule import EDGES, RecordingRule

GRADIENTS = [torch.tensor([0.5, -1.0, 2.0]), torch.tensor([-4.0, -0.125, 0.0])]
SPOILED = [GRADIENTS[0], torch.tensor([-4.0, torch.inf, 0.0])]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_a_scaler_sees_what_the_wrapper_sees(name, unscale):
    weights = parameters(2)
    run = scaler(OPTIMIZERS[name](weights), rule=RecordingRule())
    for gradients in (GRADIENTS, SPOILED, [None, GRADIENTS[0]], GRADIENTS):
        fill(run, weights, gradients)
        scale = run.scaler.get_scale()
        if unscale:
            run.unscale()
            torch.nn.utils.clip_grad_norm_(weights, 0.001)
        run.step()
        given = [gradient for gradient in gradients if gradient is not None]
        assert noted(run.saved()) == expected_stats(given, scale)
    assert run.scaler.get_scale() == 4
    assert run.scaler.steps_skipped == 1
    # What it saw is saved, loaded and copied.
    other = GradScaler("cpu", rule=RecordingRule())
    other.load_state_dict(run.saved())
    assert other.state_dict() == run.saved() == copy.deepcopy(run.scaler).state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(run.saved())
    assert theirs.get_scale() == 4
    fill(run, weights, [None, None])
    run.step()
    assert run.saved() == other.state_dict()


def test_a_scaler_sees_all_of_its_optimizers_together_and_what_a_kernel_divides():
    weights = parameters(2)
    seeing = GradScaler("cpu", rule=RecordingRule())
    # One of them has no gradient.
    groups = ([weights[0]], [weights[1]], parameters(1))
    runs = [WithScaler(OPTIMIZERS["sgd"](given), seeing) for given in groups]
    fill(runs[0], weights, GRADIENTS)
    for run in runs:
        seeing.step(run.optimizer)
    seeing.update()
    assert noted(seeing.state_dict()) == expected_stats(GRADIENTS, 8.0)
    weights = [torch.nn.Parameter(weight.detach().half()) for weight in parameters(2)]
    run = scaler(OPTIMIZERS["adamw-fused"](weights), rule=RecordingRule())
    step(run, weights, GRADIENTS)
    assert noted(run.saved()) == expected_stats(GRADIENTS, 8.0)


class Counting(lossscale.FixedScale):
    """A fixed scale that counts finite steps all the same."""

    def update(self, state, seen, *, xp):
        return state._replace(good_steps=xp.where(seen.finite, state.good_steps + 1, 0))


class Following(RecordingRule):
    growth_interval = 1


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_a_rule_of_the_user_remembers_and_counts_beyond_its_interval(name):
    weights = parameters(2)
    optimizer = wrapped(OPTIMIZERS[name](weights), rule=Counting(8.0))
    run = scaler(OPTIMIZERS[name](weights), rule=Following())
    for _ in range(3):
        step(optimizer, weights, GRADIENTS)
        step(run, weights, GRADIENTS)
    assert int(optimizer._engine.scale.state.good_steps) == 3
    assert float(optimizer.loss_scale) == 8.0
    assert run.saved()["_growth_tracker"] == 3


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize(
    "needs",
    [StatsRequest(), StatsRequest(True), StatsRequest(False, EDGES), StatsRequest(True, EDGES)],
)
def test_a_rule_that_does_not_check_is_moved_all_the_same(needs, decide, clip):
    """A schedule of scales, or one that follows the largest gradient."""
    weights = parameters(2)
    rule = RecordingRule(checks_gradients=False, needs=needs)
    inner = OPTIMIZERS["adamw-fused"](weights)
    optimizer = wrapped(inner, rule=rule, decide=decide, clip_norm=clip)
    for _ in range(2):
        step(optimizer, weights, GRADIENTS)
    assert int(optimizer.dynamic_counter) == 2
    largest, low, high, elements = expected_stats(GRADIENTS, 8.0)
    counts = [low, high, elements] if needs.counts_from else [0.0] * 3
    saved = noted(optimizer.state_dict())
    assert saved == [largest if needs.largest else 0.0, *counts]
