"""A rule run over overflows that are given, that follow from gradients, or that come at random.

Nothing is trained. The rule itself is run, under NumPy, so what it does here is what it does in
training, if training overflows in the same steps.

Bad batches and overflows in the forward pass are not cured by a lower scale. Let each step overflow
with probability p, and let q = 1 - p. The scale grows after N finite steps in a row, and an
overflow starts the count anew. A count ends in growth with probability q**N, after (1 - q**N) / p
steps on average. So the scale grows p * q**N / (1 - q**N) times per step, and backs off p times.
The difference is its drift. A rule that waits for M overflows in a row backs off p**M times.
Derived here for any pair of factors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from lossscale.checks import checked_count, checked_probability
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.monitoring.moving import first_state, next_state
from lossscale.monitoring.skips import lowest_scale
from lossscale.packages import require
from lossscale.rules import DynamicScale, ScaleRule, Seen

LARGEST_SIMULATION = 10**8
"""How many steps there may be in all runs together: about 500 MB."""

_REPORTED_STEPS = 1000
_OVERFLOW_EDGE = 65520.0
"""The smallest magnitude that float16 rounds to infinity."""


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """What a rule did in one run or several.

    Attributes:
        rule: The rule.
        scales: float32 array of shape (runs, steps): the loss scale that each step was taken
            with.
        overflowed: Boolean array of the same shape: whether the gradients were not finite.
        final_scales: float32 array of shape (runs,): the loss scale after the last step.
        probability: With what probability a step overflowed, whatever the scale; None if it was
            not at random.
    """

    rule: ScaleRule
    scales: Any
    overflowed: Any
    final_scales: Any
    probability: float | None = None

    @property
    def skipped(self) -> Any:
        """Boolean array of shape (runs, steps): whether the step was skipped.

        A rule that does not look at the gradients applies an overflow.
        """
        return self.overflowed & self.rule.checks_gradients

    @property
    def skip_rate(self) -> float:
        """The share of skipped steps, from 0 to 1."""
        return float(self.skipped.mean())

    @property
    def share_at_floor(self) -> float | None:
        """The share of steps at the lowest scale of the rule; None if it has none."""
        lowest = lowest_scale(self.rule)
        return None if lowest is None else float((self.scales <= _above(lowest)).mean())

    @property
    def drift(self) -> float | None:
        """The mean change of log2(scale) per step, away from the lowest and the highest scale.

        Steps from which an overflow or a growth would reach a limit of a `DynamicScale` do not
        count; for other rules, steps at the lowest scale do not. None if no step is left. Each
        run starts to count good steps at 0, which takes up to one growth off it.
        """
        return self._drift()[0]

    @property
    def drift_error(self) -> float | None:
        """The standard error of `drift`, from the differences between the runs.

        None with fewer than two runs.
        """
        return self._drift()[1]

    def _drift(self) -> tuple[float | None, float | None]:
        import numpy as np

        free = self._away_from_limits()
        counts = free.sum(axis=1)
        if not counts.sum():
            return None, None
        logs = np.log2(np.column_stack([self.scales, self.final_scales]).astype(np.float64))
        moves = (np.diff(logs, axis=1) * free).sum(axis=1)
        drift = moves.sum() / counts.sum()
        if len(counts) < 2:
            return float(drift), None
        # That of a ratio of two sums, since runs differ in how many of their steps count.
        spread = np.sqrt(((moves - drift * counts) ** 2).sum() * len(counts) / (len(counts) - 1))
        return float(drift), float(spread / counts.sum())

    def _away_from_limits(self) -> Any:
        scales = self.scales.astype(float)
        if isinstance(self.rule, DynamicScale):
            lowered = scales * self.rule.backoff_factor
            grown = scales * self.rule.growth_factor
            return (_above(lowered) >= self.rule.min_scale) & (grown <= _above(self.rule.ceiling))
        lowest = lowest_scale(self.rule)
        return scales > (-math.inf if lowest is None else _above(lowest))

    @property
    def expected_drift(self) -> float | None:
        """What theory says of `drift`; None if there is no law for this case."""
        if self.probability is None or not isinstance(self.rule, DynamicScale):
            return None
        return expected_drift(self.rule, self.probability)

    @property
    def critical_probability(self) -> float | None:
        """Above which probability of a random overflow the scale falls; None without a law."""
        if not isinstance(self.rule, DynamicScale):
            return None
        return critical_probability(self.rule)

    def summary(self) -> dict[str, Any]:
        """Returns the numbers above, the size, and the range of the final scales, JSON-ready."""
        import numpy as np

        runs, steps = self.scales.shape
        # "lower" takes a scale that occurred, and not the mean of two.
        low, middle, high = np.quantile(self.final_scales, (0, 0.5, 1), method="lower").tolist()
        return {
            "rule": {"class_name": type(self.rule).__name__, "config": self.rule.get_config()},
            "runs": runs,
            "steps": steps,
            "probability": self.probability,
            "overflow_rate": float(self.overflowed.mean()),
            "skip_rate": self.skip_rate,
            "final_scale": {"lowest": low, "median": middle, "highest": high},
            "share_at_floor": self.share_at_floor,
            "drift": self.drift,
            "drift_error": self.drift_error,
            "expected_drift": self.expected_drift,
            "critical_probability": self.critical_probability,
        }


def _above(number: Any) -> Any:
    # Scales are float32, and the limits of a rule are not.
    return number * (1 + 2.0**-20)


def simulate(
    rule: ScaleRule, overflows: Any, *, after_steps: Callable[[int], None] = lambda steps: None
) -> Simulation:
    """Runs a rule over overflows that are given.

    They happen whatever the scale is, like those of bad batches.

    Args:
        rule: The rule.
        overflows: Booleans, one for each step: whether the gradients were not finite.
        after_steps: Called now and then with the number of steps done.

    Returns:
        One run.

    Raises:
        ArgumentError: If `overflows` is empty or has anything but booleans. It is a `ValueError`.

    Examples:
        >>> rule = DynamicScale(initial_scale=8, growth_interval=2)
        >>> simulate(rule, [False, False, True]).scales.tolist()
        [[8.0, 8.0, 16.0]]
    """
    require("numpy")
    import numpy as np

    given = _trace("overflows", overflows, "booleans")
    if given.dtype != np.bool_:
        raise ArgumentError(
            f"`overflows` must be booleans. Received: an array of dtype {given.dtype}. For the "
            "magnitudes of gradients there is `simulate_gradients`."
        )
    return _simulation(rule, len(given), 1, lambda step, scale: given[step : step + 1], after_steps)


def simulate_gradients(
    rule: ScaleRule,
    magnitudes: Any,
    *,
    after_steps: Callable[[int], None] = lambda steps: None,
) -> Simulation:
    """Runs a rule over gradients of known size.

    A step overflows if float16 rounds its largest gradient times the scale to infinity, or if that
    is not finite to begin with.

    Args:
        rule: The rule.
        magnitudes: The largest |gradient| of each step, not scaled; infinities and NaN are
            allowed.
        after_steps: Called now and then with the number of steps done.

    Returns:
        One run.

    Raises:
        ArgumentError: If `magnitudes` is empty or has anything but numbers from 0 up. It is a
            `ValueError`.

    Examples:
        >>> simulation = simulate_gradients(DynamicScale(initial_scale=2**15), [8.0] * 5)
        >>> simulation.scales.tolist()
        [[32768.0, 16384.0, 8192.0, 4096.0, 4096.0]]
    """
    require("numpy")
    import numpy as np

    given = _trace("magnitudes", magnitudes, "numbers")
    if given.dtype.kind not in "iuf" or (given < 0).any():
        raise ArgumentError(
            "`magnitudes` must be numbers from 0 up: the largest |gradient| of each step. "
            f"Received: {magnitudes!r}."
        )
    given = given.astype(np.float64)

    def overflows(step: int, scale: Any) -> Any:
        # False for a NaN.
        return ~(given[step] * scale.astype(np.float64) < _OVERFLOW_EDGE)

    return _simulation(rule, len(given), 1, overflows, after_steps, given)


def simulate_random(
    rule: ScaleRule,
    probability: float,
    *,
    steps: int = 100_000,
    runs: int = 16,
    seed: int = 0,
    after_steps: Callable[[int], None] = lambda steps: None,
) -> Simulation:
    """Runs a rule over overflows that come at random, whatever the scale.

    Args:
        rule: The rule.
        probability: The probability that a step overflows, from 0 to 1.
        steps: How many steps each run has.
        runs: How many runs there are. All of them are moved at once.
        seed: Seed of the random numbers.
        after_steps: Called now and then with the number of steps done in each run.

    Returns:
        The runs.

    Raises:
        ArgumentError: If a value cannot be used; the message names it. It is a `ValueError`.

    Examples:
        >>> simulation = simulate_random(DynamicScale(growth_interval=100), 0.02, steps=5000)
        >>> simulation.scales.shape, float(simulation.final_scales.max()) < 2**15
        ((16, 5000), True)
        >>> f"{simulation.critical_probability:.2g}"
        '0.0069'
    """
    require("numpy")
    import numpy as np

    probability = checked_probability(probability)
    counts = {"steps": steps, "runs": runs, "seed": seed}
    for name, value in counts.items():
        counts[name] = checked_count(name, value, lowest=0 if name == "seed" else 1)
    steps, runs = counts["steps"], counts["runs"]
    if steps * runs > LARGEST_SIMULATION:
        raise ArgumentError(
            f"steps * runs must be at most {LARGEST_SIMULATION}, since every scale is kept. "
            f"Received: steps={steps}, runs={runs}."
        )
    rng = np.random.default_rng(counts["seed"])
    rows = _random_rows(rng, probability, runs)
    simulation = _simulation(rule, steps, runs, lambda step, scale: next(rows), after_steps)
    return dataclasses.replace(simulation, probability=probability)


def _random_rows(rng: Any, probability: float, runs: int) -> Iterator[Any]:
    while True:
        yield from rng.random((_REPORTED_STEPS, runs)) < probability


def _simulation(
    rule: ScaleRule,
    steps: int,
    runs: int,
    overflows: Callable[[int, Any], Any],
    after_steps: Callable[[int], None],
    largest: Any = None,
) -> Simulation:
    import numpy as np

    if not isinstance(rule, ScaleRule):
        raise ArgumentTypeError(
            "`rule` must be a scaling rule, such as lossscale.DynamicScale(). "
            f"Received: {rule!r} of type {type(rule).__name__}."
        )
    if rule.needs.counts_from or (rule.needs.largest and largest is None):
        raise ArgumentError(
            f"{type(rule).__name__} needs to see {rule.needs}, which is not known here. With "
            "`simulate_gradients` a rule sees the largest magnitude of each step."
        )
    scales = np.empty((steps, runs), np.float32)
    overflowed = np.empty((steps, runs), np.bool_)
    state = first_state(rule, (runs,))
    # The float32 product that passes the ceiling is infinite, and is not taken.
    with np.errstate(over="ignore"):
        for step in range(steps):
            scales[step] = rule.loss_scale(state)
            overflowed[step] = overflows(step, scales[step])
            if rule.checks_gradients:
                finite = ~overflowed[step]
                if largest is None:
                    seen = Seen(finite)
                else:
                    seen = Seen(finite, np.where(finite, largest[step], np.inf).astype(np.float32))
                state = next_state(rule, state, seen)
            if (step + 1) % _REPORTED_STEPS == 0:
                after_steps(step + 1)
    final = np.broadcast_to(np.asarray(rule.loss_scale(state), np.float32), (runs,))
    return Simulation(rule, scales.T, overflowed.T, final)


def _trace(name: str, values: Any, what: str) -> Any:
    import numpy as np

    given = np.asarray(values)
    if given.ndim != 1 or not given.size:
        raise ArgumentError(
            f"`{name}` must be a sequence of {what}, one for each step. "
            f"Received: shape {given.shape}."
        )
    return given


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

    Examples:
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

    Examples:
        >>> f"{critical_probability(DynamicScale()):.3g}"
        '0.000347'
        >>> f"{critical_probability(DynamicScale(growth_interval=100)):.2g}"
        '0.0069'
        >>> f"{critical_probability(DynamicScale(overflows_before_backoff=2)):.2g}"
        '0.0029'
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
