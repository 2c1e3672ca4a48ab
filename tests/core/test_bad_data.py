"""What bad batches do to rules: the numbers by hand, and a short run of the command."""

import numpy as np
import pytest

from lossscale import DynamicScale
from tools import bad_data as rules


def trace(largest, below):
    """A trace whose gradients have these shares below 2**-30, 2**-20 and 2**0 each step."""
    shares = np.zeros(rules.HIGHEST - rules.LOWEST + 1)
    for exponent, share in zip((-30, -20, 0), below, strict=True):
        shares[exponent - rules.LOWEST :] = share
    steps = len(largest)
    return rules.Trace(np.array(largest), np.tile(shares, (steps, 1)), {0: DynamicScale()})


def test_what_is_below_the_window_is_flushed():
    given = trace([-1.0] * 4, (0.25, 0.5, 1.0))
    good = np.zeros((4, 1), bool)
    for exponent, lost in ((0, 0.25), (4, 0.25), (6, 0.0), (-5, 0.5), (-30, 1.0)):
        rule = DynamicScale(2.0**exponent, min_scale=2.0**-40)
        found, vain = rules.flushed(given, rules.Scaler(rule, 1), 0, good)
        assert (found[0], vain[0]) == (lost, 0.0), exponent
    # Division of the loss is a lower scale.
    found, _ = rules.flushed(given, rules.Scaler(DynamicScale(2.0**6), 1), 11, good)
    assert found[0] == 0.5


def test_bad_steps_and_overflows_are_told_apart():
    # 2**3 is finite up to a scale of 2**12: three steps in vain from 2**15, of six that are good.
    given = trace([3.0] * 8, (0.0, 0.0, 1.0))
    bad = np.array([[0], [1], [0], [0], [0], [1], [0], [0]], bool)
    scaler = rules.Scaler(DynamicScale(2.0**15), 1)
    _, vain = rules.flushed(given, scaler, 0, bad)
    assert vain[0] == pytest.approx(2 / 8)
    assert scaler.exponents()[0] == 11


OVERFLOWS = (0, 1, 0, 1, 0, 1, 1, 1)
AFTER = {
    rules.Scaler: (15, 14, 14, 13, 13, 12, 11, 10),
    # The first one is let pass, and then none until the scale grows.
    rules.Hysteresis: (15, 15, 15, 14, 14, 13, 12, 11),
    rules.LossAware: (15, 15, 15, 15, 15, 15, 15, 15),
}


def exponents(scaler, overflows):
    """The exponent of the scale after each step."""
    found = []
    for overflow in overflows:
        bad = np.array([bool(overflow)])
        scaler.step(~bad, bad)
        found.append(int(scaler.exponents()[0]))
    return tuple(found)


@pytest.mark.parametrize("kind", AFTER)
def test_scalers_move_as_they_should(kind):
    assert exponents(kind(DynamicScale(2.0**15), 1), OVERFLOWS) == AFTER[kind]


def test_megatrons_tracker_starts_anew_when_the_scale_grows():
    scaler = rules.Hysteresis(DynamicScale(2.0**15, growth_interval=2), 1)
    assert exponents(scaler, (1, 0, 0, 1, 1)) == (15, 15, 16, 16, 15)


def stationary_drift(rule, probability):
    """The drift by the stationary distribution of both counters, a Markov chain.

    The first states are numbers of finite steps in a row, and then those of overflows.
    """
    interval, waits = rule.growth_interval, rule.overflows_before_backoff
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
    grows = share[interval - 1] + (share[interval:].sum() if interval == 1 else 0)
    lowers = share[interval + waits - 1]
    growth, backoff = np.log2([rule.growth_factor, rule.backoff_factor])
    return growth * grows * finite + backoff * lowers


SETTINGS = [(1, 1, 2.0), (1, 3, 2.0), (7, 2, 4.0), (30, 1, 2.0), (40, 4, 8.0)]
RULES = [
    DynamicScale(growth_interval=interval, overflows_before_backoff=waits, growth_factor=factor)
    for interval, waits, factor in SETTINGS
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("probability", [1e-9, 0.01, 0.3, 0.999])
def test_the_law_of_random_overflows_is_that_of_the_chain(rule, probability):
    expected = stationary_drift(rule, probability)
    assert rules.expected_drift(rule, probability) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("rule", [DynamicScale(), *RULES], ids=repr)
def test_the_drift_is_zero_at_the_critical_probability(rule):
    critical = rules.critical_probability(rule)
    assert 0 < critical < 1
    above = 1 - (1 - critical) * 0.9
    assert rules.expected_drift(rule, critical * 0.9) > 0 > rules.expected_drift(rule, above)


def test_the_critical_probability_of_doubling_and_halving_is_known():
    for interval in (2000, 1000, 100):
        rule = DynamicScale(growth_interval=interval)
        assert rules.critical_probability(rule) == pytest.approx(1 - 2 ** (-1 / interval), rel=1e-9)


def test_scales_drift_as_the_law_says():
    rule = DynamicScale(
        2.0**60, min_scale=2.0**-126, growth_interval=50, overflows_before_backoff=2
    )
    for probability in (0.03, 0.1):
        bad = np.random.default_rng(3).random((4000, 64)) < probability
        scaler = rules.Scaler(rule, 64)
        first = scaler.exponents()
        for each in bad:
            scaler.step(~each, each)
        drifts = (scaler.exponents() - first) / len(bad)
        error = drifts.std() / 8
        assert abs(drifts.mean() - rules.expected_drift(rule, probability)) < 5 * error
        assert error < 0.1 * abs(drifts.mean())


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("\n".join(["before", *rules.MARKS_OF_LAW, *rules.MARKS, "after\n"]))
    monkeypatch.setattr(rules, "TASKS", {"GRU": rules.TASKS["GRU"]})
    rules.main(["--steps", "12", "--page", str(page)])
    printed = capsys.readouterr().out
    assert printed.count("`overflows_before_backoff=2`") == 1 + 2 * len(rules.SHIFTS)
    assert "nan" not in printed
    assert set(printed.splitlines()) <= set(page.read_text().splitlines())
    assert page.read_text().startswith("before")
