"""The law of a loss scale if steps overflow at random, whatever the scale is.

`python -m tools.bad_data` prints for some rules the share of overflows above which the scale falls,
and how fast it falls. `--page docs/internals/bad_data.md` writes this table between the markers of
that page. It checks the law with a Markov chain first. It takes some seconds.
"""

from __future__ import annotations

import argparse
import math
import pathlib

import numpy as np

from benchmarks.pages import insert
from benchmarks.tables import table
from lossscale.rules import DynamicScale

SHOWN = 0.01
"""The share of overflows for which the page has the speed of the fall."""
RULES = {
    "`DynamicScale()`": DynamicScale(),
    "`growth_interval=100`": DynamicScale(growth_interval=100),
    "`overflows_before_backoff=2`": DynamicScale(overflows_before_backoff=2),
    "`overflows_before_backoff=3`": DynamicScale(overflows_before_backoff=3),
}
MARKS = "<!-- law: python -m tools.bad_data -->", "<!-- end of law -->"


def expected_drift(rule: DynamicScale, probability: float) -> float:
    """Returns the drift of a scale if steps overflow at random, whatever the scale is.

    Args:
        rule: The rule. Its minimum and maximum scale are assumed to be far away.
        probability: The probability p that a step overflows, above 0 and below 1.

    Returns:
        The mean change of log2(scale) per step. For doubling and halving it is
        p * q**N / (1 - q**N) - p**M, with q = 1 - p, N = `growth_interval` and
        M = `overflows_before_backoff`.

    Examples:
        >>> round(1000 * expected_drift(DynamicScale(), 1e-3), 3)
        -0.844
    """
    # log1p and expm1, because 1 - q**N loses all digits if p * N is small.
    log_finite = rule.growth_interval * math.log1p(-probability)
    growths = probability * math.exp(log_finite) / -math.expm1(log_finite)
    # A step lowers the scale if it is the last of M overflows in a row.
    backoffs = probability**rule.overflows_before_backoff
    return math.log2(rule.growth_factor) * growths + math.log2(rule.backoff_factor) * backoffs


def critical_probability(rule: DynamicScale) -> float:
    """Returns the probability of an overflow above which the scale falls: there the drift is 0.

    Args:
        rule: The rule.

    Examples:
        >>> f"{critical_probability(DynamicScale()):.3g}", f"{1 - 2 ** (-1 / 2000):.3g}"
        ('0.000347', '0.000347')
    """
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if expected_drift(rule, middle) > 0 else (low, middle)
    return high


def stationary_drift(rule: DynamicScale, probability: float) -> float:
    """The drift by the stationary distribution of both counters, a Markov chain.

    The first states are numbers of finite steps in a row, and then those of overflows.

    Args:
        rule: The rule.
        probability: That of an overflow in a step.
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
    growth, backoff = np.log2([rule.growth_factor, rule.backoff_factor])
    return float(growth * grows * finite + backoff * share[interval + waits - 1])


def check() -> None:
    """Compares the law with the chain."""
    for interval, waits, factor in ((1, 1, 2.0), (1, 3, 2.0), (7, 2, 4.0), (40, 4, 8.0)):
        rule = DynamicScale(
            growth_interval=interval, overflows_before_backoff=waits, growth_factor=factor
        )
        for probability in (1e-9, 0.01, 0.3, 0.999, critical_probability(rule)):
            drift = expected_drift(rule, probability)
            assert abs(drift - stationary_drift(rule, probability)) < 1e-9
        assert abs(drift) < 1e-9


def law() -> str:
    """Returns a Markdown table of critical probabilities and of the steps for a halving."""
    lines = []
    for name, rule in RULES.items():
        share, steps = 100 * critical_probability(rule), -1 / expected_drift(rule, SHOWN)
        lines.append([name, f"{share:.2g}%", f"{float(f'{steps:.2g}'):,.0f}"])
    return table(["rule", "the scale falls above", f"steps for a halving at {SHOWN:.0%}"], lines)


def main() -> None:
    """Checks the law and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bad_data", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--page", type=pathlib.Path, help="a page to write the table into")
    options = parser.parse_args()
    check()
    print(law())
    if options.page is not None:
        insert(options.page, f"\n{law()}\n", *MARKS)


if __name__ == "__main__":
    main()
