"""What a rule asks to see of the gradients: the same numbers on every wrapper, and NumPy's.

A rule that asks for nothing but the verdict pays for nothing else.
"""

import importlib
import itertools

import numpy as np
import pytest

from conformance.recordings import GRADIENTS, VALUES, spoiled
from conformance.wrappers import BACKEND
from lossscale.rules import DynamicScale, ScaleRule, StatsRequest
from recording_rule import ALL, EDGES, RecordingRule


def gradients(factor, spoil=None):
    made = [gradient * np.float32(factor) for gradient in GRADIENTS]
    if spoil is not None:
        made[1][0, 1] = spoil
    return made


class Following(RecordingRule):
    """Doubles the scale until the largest gradient is large or many are, as far as it sees them."""

    # As of a rule that says nothing of its scales.
    powers_of_two, lowest_scale = ScaleRule.powers_of_two, ScaleRule.lowest_scale

    def update(self, state, seen, *, xp):
        noted = super().update(state, seen, xp=xp)
        is_crowded = (noted.largest * state.scale >= 64.0) | (noted.high > 0.3 * noted.elements)
        followed = xp.where(is_crowded, state.scale * 0.5, state.scale * 2.0)
        return noted._replace(scale=xp.where(seen.finite, followed, noted.scale))


NEEDS = {
    "both": ALL,
    "largest": StatsRequest(largest=True),
    "counts": StatsRequest(counts_from=EDGES),
}


@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
def test_a_rule_sees_what_numpy_sees_and_can_follow_it(wrapper, needs):
    harness = wrapper.make(VALUES, "sgd", Following(needs=needs))
    # One after the other on one optimizer, which is compiled once.
    spoils = (None, 2.0**10, np.inf, -np.inf, np.nan, None)
    for spoil, factor in itertools.product(spoils, (1.0, 0.25)):
        given = gradients(factor, spoil)
        scale = float(harness.scale())
        harness.step(given)
        recorded = harness.rule_state()
        flat = np.abs(np.concatenate([gradient.ravel() for gradient in given]))
        finite = np.isfinite(flat).all()
        # Also where the host updates nothing, since such a rule has to see more than a verdict.
        assert harness.counters()[2] == (not finite)
        largest = (flat.max() if finite else np.inf) if needs.largest else 0.0
        counts, elements = [0, 0], 0
        if needs.counts_from:
            counts, elements = [(flat * scale >= edge).sum() for edge in EDGES], 5
        found = [recorded.largest, recorded.low, recorded.high, recorded.elements]
        assert [float(each) for each in found] == [largest, *counts, elements]
        grows = finite and largest * scale < 64 and counts[1] <= 0.3 * elements
        assert float(harness.scale()) == float(recorded.scale) == scale * (2.0 if grows else 0.5)


def test_without_a_gradient_a_variable_is_not_counted(wrapper):
    harness = wrapper.make(VALUES, "sgd", RecordingRule())
    with wrapper.missing_gradient():
        harness.step([GRADIENTS[0], None])
    recorded = harness.rule_state()
    assert (float(recorded.largest), float(recorded.elements)) == (2.0, 3.0)


class Asking(DynamicScale):
    needs = StatsRequest(largest=True, counts_from=(1.0,))


@pytest.fixture
def looked(monkeypatch):
    """What was seen of gradients beyond whether they are finite."""
    room = "gradients" if BACKEND in ("jax", "torch") else "overflow_check"
    stats = importlib.import_module(f"lossscale.{BACKEND}.{room}")
    found, seen = [], stats.GradientStats
    monkeypatch.setattr(
        stats, "GradientStats", lambda *all_of: found.extend(all_of[1:]) or seen(*all_of)
    )
    return found


def steps(wrapper, rule):
    harness = wrapper.make(VALUES, "sgd", rule)
    for gradients in (GRADIENTS, spoiled(np.nan), GRADIENTS):
        harness.step(gradients)
    # A loop within a compiled function runs when its result is asked for.
    harness.parameters()


def test_gradients_are_measured_for_a_rule_that_asks_and_for_no_other(wrapper, looked):
    if wrapper.like:
        pytest.skip(f"it moves its rule as {wrapper.like} does")
    steps(wrapper, DynamicScale(8.0))
    assert looked == []
    steps(wrapper, Asking(8.0))
    assert looked
