"""What a rule asks to see of the gradients: the same numbers on every wrapper, and NumPy's.

A rule that asks for nothing but the verdict pays for nothing else.
"""

import dataclasses
import importlib
import itertools
from typing import NamedTuple

import numpy as np
import pytest

from conformance.recordings import GRADIENTS, VALUES, spoiled
from conformance.wrappers import BACKEND
from lossscale.rules import DynamicScale, ScaleRule, StatsRequest
from noting import EDGES, Noting


def gradients(factor, spoil=None):
    made = [gradient * np.float32(factor) for gradient in GRADIENTS]
    if spoil is not None:
        made[1][0, 1] = spoil
    return made


def magnitudes(given):
    return np.abs(np.concatenate([gradient.ravel() for gradient in given]))


def test_a_rule_sees_what_numpy_sees(wrapper):
    harness = wrapper.make(VALUES, "sgd", Noting())
    # One after the other on one optimizer, which is compiled once.
    for spoil, factor in itertools.product((None, np.inf, -np.inf, np.nan, None), (1.0, 0.25)):
        given = gradients(factor, spoil)
        scale = float(harness.scale())
        harness.step(given)
        recorded = harness.rule_state()
        flat = magnitudes(given)
        finite = np.isfinite(flat).all()
        # Also where the host updates nothing, since such a rule has to see more than a verdict.
        assert harness.counters()[2] == (not finite)
        assert float(recorded.largest) == (flat.max() if finite else np.inf)
        assert [float(recorded.low), float(recorded.high)] == [
            (flat * scale >= e).sum() for e in EDGES
        ]
        assert float(recorded.elements) == 5
        assert float(recorded.scale) == (scale if finite else scale / 2)


class Scale(NamedTuple):
    scale: float
    good_steps: int


@dataclasses.dataclass(frozen=True)
class TailScale(ScaleRule):
    """Grows until more than a share of all elements is large, whatever overflows."""

    share: float = 0.3
    powers_of_two = True
    needs = StatsRequest(counts_from=(2.0**5,))

    def init(self):
        return Scale(1.0, 0)

    def update(self, state, stats, *, xp):
        may_grow = stats.finite & (stats.counts[0] <= stats.elements * self.share)
        return Scale(xp.where(may_grow, state.scale * 2.0, state.scale * 0.5), state.good_steps)

    def get_config(self):
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class FollowsTheLargest(ScaleRule):
    """Keeps the largest scaled gradient between 2**6 and 2**7."""

    powers_of_two = True
    needs = StatsRequest(largest=True)

    def init(self):
        return Scale(1.0, 0)

    def update(self, state, stats, *, xp):
        top = stats.largest * state.scale
        moved = xp.where(top < 2.0**6, state.scale * 2.0, state.scale)
        return Scale(xp.where(top >= 2.0**7, state.scale * 0.5, moved), state.good_steps)

    def get_config(self):
        return {}


def tail_scale(scaled, scale):
    grows = np.isfinite(scaled).all() and (scaled >= 32).sum() <= 0.3 * 5
    return scale * 2 if grows else scale / 2


def following_scale(scaled, scale):
    top = scaled.max() if np.isfinite(scaled).all() else np.inf
    return scale / 2 if top >= 128 else scale * 2 if top < 64 else scale


@pytest.mark.parametrize(
    ("rule", "next_scale"),
    [(TailScale(), tail_scale), (FollowsTheLargest(), following_scale)],
    ids=["share", "largest"],
)
def test_a_rule_can_follow_what_it_sees(wrapper, rule, next_scale):
    harness = wrapper.make(VALUES, "sgd", rule)
    scales = [1.0]
    for factor in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 4.0, np.inf, 0.5, 0.5):
        given = gradients(1.0, np.inf) if factor == np.inf else gradients(factor)
        harness.step(given)
        scales.append(next_scale(magnitudes(given) * scales[-1], scales[-1]))
        assert float(harness.scale()) == scales[-1]
    assert len({*scales}) > 3
    assert harness.counters()[1] == 1


def test_without_a_gradient_a_variable_is_not_counted(wrapper):
    harness = wrapper.make(VALUES, "sgd", Noting())
    with wrapper.missing_gradient():
        harness.step([GRADIENTS[0], None])
    recorded = harness.rule_state()
    assert (float(recorded.largest), float(recorded.elements)) == (2.0, 3.0)


# --- A rule that asks for nothing -----------------------------------------------------------------


class Asking(DynamicScale):
    needs = StatsRequest(largest=True, counts_from=(1.0,))


@pytest.fixture
def looked(monkeypatch):
    """What was seen of gradients beyond whether they are finite."""
    room = "gradients" if BACKEND == "jax" else "gradient_stats"
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
