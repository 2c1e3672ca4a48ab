"""What bad batches do to rules: the numbers by hand, and a short run of the command."""

import numpy as np
import pytest

from benchmarks import rules
from lossscale import DynamicScale


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


@pytest.mark.parametrize("kind", AFTER)
def test_scalers_move_as_they_should(kind):
    scaler, found = kind(DynamicScale(2.0**15), 1), []
    for overflow in OVERFLOWS:
        bad = np.array([bool(overflow)])
        scaler.step(~bad, bad)
        found.append(int(scaler.exponents()[0]))
    assert tuple(found) == AFTER[kind]


def test_megatrons_tracker_starts_anew_when_the_scale_grows():
    scaler, found = rules.Hysteresis(DynamicScale(2.0**15, growth_interval=2), 1), []
    for overflow in (1, 0, 0, 1, 1):
        bad = np.array([bool(overflow)])
        scaler.step(~bad, bad)
        found.append(int(scaler.exponents()[0]))
    assert found == [15, 15, 16, 16, 15]


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("\n".join(["before", *rules.MARKS, "after\n"]))
    monkeypatch.setattr(rules, "TASKS", {"GRU": rules.TASKS["GRU"]})
    rules.main(["--steps", "12", "--page", str(page)])
    printed = capsys.readouterr().out
    assert printed.count("`overflows_before_backoff=2`") == 2 * len(rules.SHIFTS)
    assert "nan" not in printed
    assert printed.strip() in page.read_text()
    assert page.read_text().startswith("before")
