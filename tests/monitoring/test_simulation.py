"""Simulations against the oracle, and the drift law against an independent calculation."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.oracle import float32, trace
from core.strategies import dynamic_scales
from lossscale import DynamicScale, FixedScale
from lossscale.monitoring import (
    critical_probability,
    expected_drift,
    simulate,
    simulate_gradients,
    simulate_random,
)
from lossscale.rules import ScaleRule

factors = st.sampled_from([(2.0, 0.5), (1.5, 0.8), (4.0, 0.5), (2.0, 0.25), (1.001, 0.999)])


def rule_of(interval, growth=2.0, backoff=0.5, **settings):
    return DynamicScale(
        growth_interval=interval, growth_factor=growth, backoff_factor=backoff, **settings
    )


@given(dynamic_scales(), st.lists(st.booleans(), min_size=1, max_size=60))
def test_given_overflows_move_the_scale_as_the_oracle_says(rule, overflows):
    simulation = simulate(rule, overflows)
    expected = [scale for scale, _ in trace(rule, [not overflow for overflow in overflows])]
    assert simulation.scales.tolist() == [[float32(rule.initial_scale), *expected[:-1]]]
    assert simulation.final_scales.tolist() == [expected[-1]]
    assert simulation.skipped.tolist() == [overflows]
    assert simulation.skip_rate == pytest.approx(np.mean(overflows))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_gradients_overflow_where_rounding_overflows():
    rng = np.random.default_rng(0)
    rule = DynamicScale(initial_scale=2.0**8, growth_interval=3, max_scale=2.0**20)
    # Around the edge at each scale that comes, and on the very edge now and then.
    magnitudes = 65520.0 / 2.0 ** rng.integers(0, 16, 500)
    magnitudes[::2] *= rng.uniform(0.9, 1.1, 250)
    magnitudes = magnitudes.astype(np.float32)
    simulation = simulate_gradients(rule, magnitudes)
    scaled = magnitudes.astype(np.float64) * simulation.scales[0]
    with np.errstate(all="ignore"):
        rounded = scaled.astype(np.float16)
    assert simulation.overflowed[0].tolist() == (~np.isfinite(rounded)).tolist()
    assert 0.1 < simulation.skip_rate < 0.9
    expected = [scale for scale, _ in trace(rule, np.isfinite(rounded).tolist())]
    assert simulation.scales[0].tolist() == [2.0**8, *expected[:-1]]


@pytest.mark.parametrize(
    ("amax", "first", "skips", "final"),
    [(1, 2**15, 0, 15), (1, 2**16, 1, 15), (1, 2**24, 9, 15), (1, 2**32, 17, 15),
     (100, 2**15, 6, 9), (100, 2**24, 15, 9), (100, 2**32, 23, 9), (8, 2**24, 12, 12)],
)  # fmt: skip
def test_the_skips_of_the_start(amax, first, skips, final):
    simulation = simulate_gradients(DynamicScale(initial_scale=first), [float(amax)] * 100)
    assert int(simulation.skipped.sum()) == skips
    assert simulation.final_scales.tolist() == [2.0**final]


def test_gradients_that_are_not_finite_overflow_at_every_scale():
    simulation = simulate_gradients(DynamicScale(initial_scale=4), [0.0, math.inf, math.nan, 1.0])
    assert simulation.overflowed.tolist() == [[False, True, True, False]]


def stationary_drift(interval, growth, backoff, waits, probability):
    """The drift by the stationary distribution of both counters, a Markov chain.

    The first states are numbers of finite steps in a row, and then those of overflows.
    """
    finite, size = 1 - probability, interval + waits
    move = np.zeros((size, size))
    for state in range(size):
        count = state if state < interval else 0
        move[state, (count + 1) % interval] += finite
        overflows = state - interval + 1 if state >= interval else 0
        move[state, interval + min(overflows + 1, waits) - 1] += probability
    # The left eigenvector of 1, and its sum.
    system = np.vstack([move.T - np.eye(size), np.ones(size)])
    share, *_ = np.linalg.lstsq(system, np.r_[np.zeros(size), 1.0], rcond=None)
    last = share[interval - 1] + (share[interval:].sum() if interval == 1 else 0)
    lowers = share[interval + waits - 1]
    return math.log2(growth) * last * finite + math.log2(backoff) * lowers


waiting = st.integers(1, 4)


@given(st.integers(1, 40), factors, waiting, st.floats(1e-9, 0.999))
def test_the_law_is_that_of_the_chain(interval, pair, waits, probability):
    law = expected_drift(rule_of(interval, *pair, overflows_before_backoff=waits), probability)
    expected = stationary_drift(interval, *pair, waits, probability)
    assert law == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 10**6), factors, waiting)
def test_the_drift_is_zero_at_the_critical_probability(interval, pair, waits):
    rule = rule_of(interval, *pair, overflows_before_backoff=waits)
    critical = critical_probability(rule)
    assert 0 < critical < 1
    rate = critical**waits * abs(math.log2(pair[1]))
    assert expected_drift(rule, critical) == pytest.approx(0, abs=1e-9 * rate)
    assert expected_drift(rule, critical * 0.9) > 0 > expected_drift(rule, critical * 1.1 % 1)


def test_a_rule_that_waits_drifts_as_its_law_says():
    rule = rule_of(50, overflows_before_backoff=2, initial_scale=2.0**60, min_scale=2.0**-126)
    for probability in (0.03, 0.1):
        simulation = simulate_random(rule, probability, steps=4000, runs=64, seed=3)
        assert abs(simulation.drift - simulation.expected_drift) < 5 * simulation.drift_error
        assert simulation.drift_error < 0.1 * abs(simulation.drift)


def test_the_law_at_its_ends():
    rule = rule_of(2000)
    assert expected_drift(rule, 0) == 1 / 2000
    assert expected_drift(rule, 1) == -1
    assert expected_drift(rule, 1e-15) == pytest.approx(1 / 2000, rel=1e-9)


@pytest.mark.parametrize(
    ("interval", "critical"), [(2000, 3.47e-4), (1000, 6.93e-4), (100, 6.9e-3)]
)
def test_published_critical_probabilities(interval, critical):
    assert critical_probability(rule_of(interval)) == pytest.approx(critical, rel=3e-3)


@pytest.mark.parametrize(
    ("probability", "published", "error"), [(1e-3, -0.84, 0.06), (1e-4, 0.35, 0.02)]
)
def test_the_drift_of_the_default_rule(probability, published, error):
    # A first scale far from both ends, so that every step counts.
    rule = DynamicScale(initial_scale=2.0**60, min_scale=2.0**-126)
    assert 1000 * expected_drift(rule, probability) == pytest.approx(published, abs=0.005)
    # The standard errors are a third of the tolerances.
    simulation = simulate_random(rule, probability, steps=40_000, runs=150, seed=1)
    measured = 1000 * simulation.drift
    assert measured == pytest.approx(published, abs=error)
    assert abs(simulation.drift - simulation.expected_drift) < 5 * simulation.drift_error
    assert simulation.skip_rate == pytest.approx(probability, rel=0.05)


def test_the_drift_is_measured_away_from_the_ends():
    # The scale spends most of its time at the bottom, and the drift is still that of the law.
    rule = rule_of(50, initial_scale=2.0**6, min_scale=1.0, max_scale=2.0**12)
    simulation = simulate_random(rule, 0.03, steps=20_000, runs=64, seed=2)
    assert simulation.share_at_floor > 0.3
    assert abs(simulation.drift - simulation.expected_drift) < 5 * simulation.drift_error
    assert simulation.drift_error < 0.1 * abs(simulation.drift)
    logs = np.log2(simulation.scales)
    naive = (logs[:, -1] - logs[:, 0]).mean() / logs.shape[1]
    assert abs(naive) < abs(simulation.drift) / 10


def test_the_error_of_the_drift_is_what_other_seeds_say():
    rule = rule_of(50, initial_scale=2.0**60, min_scale=2.0**-126)
    seeds = [simulate_random(rule, 0.02, steps=1000, runs=20, seed=seed) for seed in range(40)]
    spread = np.std([simulation.drift for simulation in seeds], ddof=1)
    assert np.mean([simulation.drift_error for simulation in seeds]) == pytest.approx(
        spread, rel=0.3
    )


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_never_and_always(probability):
    rule = rule_of(10, initial_scale=4.0, max_scale=64.0)
    simulation = simulate_random(rule, probability, steps=100, runs=3)
    assert simulation.skip_rate == probability
    assert set(simulation.final_scales.tolist()) == ({1.0} if probability else {64.0})
    assert simulation.expected_drift == (-1.0 if probability else 0.1)


def test_a_seed_gives_the_same_runs_again_and_runs_differ():
    rule = rule_of(20)
    first, again, other = (simulate_random(rule, 0.1, steps=500, seed=seed) for seed in (0, 0, 1))
    assert (first.overflowed == again.overflowed).all()
    assert (first.overflowed != other.overflowed).any()
    assert (first.overflowed[0] != first.overflowed[1]).any()


def test_each_of_several_runs_is_a_run_of_the_rule():
    rule = rule_of(7)
    simulation = simulate_random(rule, 0.1, steps=300, runs=4)
    for scales, overflowed in zip(simulation.scales, simulation.overflowed, strict=True):
        assert scales.tolist() == simulate(rule, overflowed).scales[0].tolist()


def test_a_fixed_scale_skips_only_if_it_looks():
    overflows = [True, False, True, True]
    blind = simulate(FixedScale(8), overflows)
    assert (blind.skip_rate, blind.summary()["overflow_rate"]) == (0.0, 0.75)
    assert blind.scales.tolist() == [[8.0] * 4]
    looking = simulate(FixedScale(8, skip_nonfinite=True), overflows)
    assert looking.skip_rate == 0.75
    assert (looking.expected_drift, looking.critical_probability) == (None, None)


class PatientState(NamedTuple):
    scale: Any
    good_steps: Any
    bad_steps: Any


@dataclasses.dataclass(frozen=True)
class PatientScale(ScaleRule):
    """Halves after two overflows in a row; a rule with a state of its own."""

    def init(self):
        return PatientState(2.0**4, 0, 0)

    def update(self, state, seen, *, xp):
        bad = xp.where(seen.finite, 0, state.bad_steps + 1)
        lowered = xp.where(state.scale > 2.0, state.scale * 0.5, state.scale)
        return PatientState(
            xp.where(bad >= 2, lowered, state.scale), state.good_steps, xp.where(bad >= 2, 0, bad)
        )

    def get_config(self):
        return {}


def test_a_rule_of_ones_own_runs_too():
    overflows = [True, False, True, True, True, True, True, True, True, True]
    simulation = simulate(PatientScale(), overflows)
    assert simulation.scales.tolist() == [[16, 16, 16, 16, 8, 8, 4, 4, 2, 2]]
    assert simulation.share_at_floor == pytest.approx(0.2)
    assert (simulation.expected_drift, simulation.critical_probability) == (None, None)
    # From 2**4 to 2**1 in the eight steps above the lowest scale.
    assert simulation.drift == pytest.approx(-3 / 8)


@given(dynamic_scales(), st.floats(0, 1))
def test_the_summary_is_strict_json(rule, probability):
    summary = simulate_random(rule, probability, steps=20, runs=2).summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    final = summary["final_scale"]
    assert final["lowest"] <= final["median"] <= final["highest"]


def test_progress_is_told():
    told = []
    simulate_random(DynamicScale(), 0.5, steps=2500, runs=1, after_steps=told.append)
    assert told == [1000, 2000]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate(DynamicScale(), []), "`overflows` must be a sequence"),
        (lambda: simulate(DynamicScale(), [[True]]), "shape \\(1, 1\\)"),
        (lambda: simulate(DynamicScale(), [0.5]), "`simulate_gradients`"),
        (lambda: simulate(128, [True]), "`rule` must be a scaling rule"),
        (lambda: simulate_gradients(DynamicScale(), []), "`magnitudes` must be a sequence"),
        (lambda: simulate_gradients(DynamicScale(), [-1.0]), "numbers from 0 up"),
        (lambda: simulate_gradients(DynamicScale(), ["a"]), "numbers from 0 up"),
        (lambda: simulate_random(DynamicScale(), 1.5), "`probability` must be"),
        (lambda: simulate_random(DynamicScale(), math.nan), "`probability` must be"),
        (lambda: simulate_random(DynamicScale(), "0.5"), "`probability` must be"),
        (lambda: simulate_random(DynamicScale(), 0.5, steps=0), "`steps` must be"),
        (lambda: simulate_random(DynamicScale(), 0.5, runs=True), "`runs` must be"),
        (lambda: simulate_random(DynamicScale(), 0.5, seed=-1), "`seed` must be"),
        (lambda: simulate_random(DynamicScale(), 0.5, runs=10**6), "at most 100000000"),
        (lambda: expected_drift(DynamicScale(), -0.1), "`probability` must be"),
    ],
)
def test_what_cannot_be_simulated(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
