"""Where a dynamic scale goes when steps overflow at random, whatever the scale.

Bad batches and overflows on the way forward are not cured by a lower scale. Let each step overflow
with probability p, and let q = 1 - p. The scale grows after N finite steps in a row, and an
overflow starts the count anew. A count ends in growth with probability q**N, after (1 - q**N) / p
steps on average. So the scale grows p * q**N / (1 - q**N) times per step, and backs off p times.
The difference is its drift. A rule that waits for M overflows in a row backs off p**M times.
Derived here for any pair of factors.
"""

from __future__ import annotations

import math

from lossscale.checks import checked_probability
from lossscale.rules import DynamicScale


def expected_drift(rule: DynamicScale, probability: float) -> float:
    """Returns how fast the scale moves when steps overflow at random.

    Args:
        rule: The rule. Its lowest and its highest scale are taken to be far away.
        probability: The probability that a step overflows, whatever the scale; from 0 to 1.

    Returns:
        The mean change of log2(scale) per step. For doubling and halving it is
        p * q**N / (1 - q**N) - p**M, with M = `overflows_before_backoff`.

    Raises:
        ArgumentError: If `probability` is none. It is a `ValueError`.

    Example:
        >>> round(1000 * expected_drift(DynamicScale(), 1e-3), 3)
        -0.844
        >>> round(1000 * expected_drift(DynamicScale(), 1e-4), 3)
        0.352
    """
    growth, backoff = math.log2(rule.growth_factor), math.log2(rule.backoff_factor)
    interval = rule.growth_interval
    probability = checked_probability(probability)
    if probability == 0:
        return growth / interval
    if probability == 1:
        return backoff
    # log1p and expm1, because 1 - q**N loses all digits where p * N is small.
    log_finite = interval * math.log1p(-probability)
    growths = probability * math.exp(log_finite) / -math.expm1(log_finite)
    # A step lowers the scale if it ends a row of so many overflows.
    return growth * growths + backoff * probability**rule.overflows_before_backoff


def critical_probability(rule: DynamicScale) -> float:
    """Returns how often steps may overflow at random before the scale falls to the bottom.

    Args:
        rule: The rule.

    Returns:
        The probability at which the drift is 0. For doubling and halving at each overflow it is
        1 - 2**(-1 / N).

    Example:
        >>> f"{critical_probability(DynamicScale()):.3g}"
        '0.000347'
        >>> f"{critical_probability(DynamicScale(growth_interval=100)):.2g}"
        '0.0069'
        >>> f"{critical_probability(DynamicScale(overflows_before_backoff=2)):.2g}"
        '0.0021'
    """
    if rule.overflows_before_backoff > 1:
        return _where_drift_is_zero(rule)
    growth, backoff = math.log2(rule.growth_factor), -math.log2(rule.backoff_factor)
    return -math.expm1(math.log(backoff / (growth + backoff)) / rule.growth_interval)


def _where_drift_is_zero(rule: DynamicScale) -> float:
    """Halves the interval that holds it: the scale rises below it and falls above it."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if expected_drift(rule, middle) > 0 else (low, middle)
    return high
