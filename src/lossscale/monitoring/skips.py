"""Skipped steps, counted along a run, and the lowest scale that skips can lead to."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

from lossscale.errors import ArgumentError
from lossscale.monitoring.moving import first_state, next_state, overflowing
from lossscale.monitoring.record import SkipReason, StepRecord
from lossscale.rules import ScaleRule

_TRIED_BACKOFFS = 4096


class Stretch(NamedTuple):
    """The steps since the record before, the recorded one included.

    Attributes:
        steps: How many steps that is.
        skips: How many of them were skipped.
    """

    steps: int
    skips: int


class SkipCounter:
    """Counts steps and skips along the records of a run, in constant memory.

    Where only some steps are recorded, the skips between come from `steps_skipped`. It says how
    many there were and not when, so runs of skips are then counted as long as they are known to
    be.

    Attributes:
        steps: How many steps were run, from the first record to the last one.
        skips: How many of them were skipped.
        consecutive: How many steps in a row were skipped, up to the last record.
        longest: The highest number that `consecutive` has had.

    Examples:
        >>> counter = SkipCounter()
        >>> counter.observe(StepRecord(1, 8.0, skipped=True))
        Stretch(steps=1, skips=1)
        >>> counter.observe(StepRecord(2, 4.0, skipped=False))
        Stretch(steps=1, skips=0)
        >>> counter.skips, counter.consecutive, counter.longest
        (1, 0, 1)
    """

    def __init__(self) -> None:
        self.steps = self.skips = self.consecutive = self.longest = 0
        self._last: StepRecord | None = None

    def observe(self, record: StepRecord) -> Stretch:
        """Counts one more record.

        Args:
            record: A record of a later step than the one before.

        Raises:
            ArgumentError: If its step is not a later one; nothing is counted then. It is a
                `ValueError`.
        """
        steps, between = 1, 0
        if self._last is not None:
            check_order(self._last, record)
            steps = record.step - self._last.step
            between = _skips_between(self._last, record)
        if not record.skipped:
            self.consecutive = 0
        elif between == steps - 1:
            self.consecutive += steps
        else:
            self.consecutive = 1
        self.longest = max(self.longest, self.consecutive)
        stretch = Stretch(steps, between + record.skipped)
        self.steps += stretch.steps
        self.skips += stretch.skips
        self._last = record
        return stretch


def check_order(earlier: StepRecord, later: StepRecord) -> None:
    """Raises unless two records come in the order of their steps.

    Raises:
        ArgumentError: If they do not. It is a `ValueError`.
    """
    if later.step <= earlier.step:
        raise ArgumentError(
            f"A record must be of a later step than the one before, which was step "
            f"{earlier.step}. Received: step={later.step}."
        )


def _skips_between(earlier: StepRecord, later: StepRecord) -> int:
    if earlier.steps_skipped is None or later.steps_skipped is None:
        return 0
    counted = later.steps_skipped - earlier.steps_skipped - later.skipped
    # A counter that was set from outside must not count more skips than there were steps.
    return min(max(counted, 0), later.step - earlier.step - 1)


def lowest_scale(rule: ScaleRule) -> float | None:
    """Returns the scale that a rule stops at when every step overflows.

    Args:
        rule: Any rule. One that does not say it is tried out: 4096 overflows.

    Returns:
        The scale, dimensionless; None if the rule still lowers it after so many overflows.

    Examples:
        >>> from lossscale.rules import DynamicScale, FixedScale
        >>> lowest_scale(DynamicScale(min_scale=0.25)), lowest_scale(FixedScale(128))
        (0.25, 128.0)
    """
    if rule.lowest_scale is not None:
        return rule.lowest_scale
    # A rule is hashable, which a protocol cannot say.
    return _tried_out(cast(Hashable, rule))


@functools.lru_cache(maxsize=16)
def _tried_out(rule: Any) -> float | None:
    state = first_state(rule)
    scales = []
    for _ in range(_TRIED_BACKOFFS):
        state = next_state(rule, state, overflowing(rule))
        scales.append(float(rule.loss_scale(state)))
    return scales[-1] if scales[_TRIED_BACKOFFS // 2] == scales[-1] else None


def at_lowest(scale: float, lowest: float | None) -> bool:
    """Whether a scale is the lowest one, or below it.

    Args:
        scale: The scale as float32 had it.
        lowest: What `lowest_scale` has returned.
    """
    # Rounded to float32, a lowest scale of 0.1 is a little above 0.1.
    return lowest is not None and scale <= lowest * (1 + 2.0**-20)


def skip_reason(rule: ScaleRule, scale: float, loss: float | None) -> SkipReason:
    """Returns why a step was skipped, as far as the loss tells.

    Args:
        rule: The rule of the loss scale.
        scale: The scale that the step was taken with, dimensionless.
        loss: The loss of this step alone, not scaled and no mean of several steps; None if it
            is not known.

    Examples:
        >>> from lossscale.rules import DynamicScale
        >>> skip_reason(DynamicScale(), 32768.0, loss=0.3)
        <SkipReason.OVERFLOW: 'overflow'>
        >>> skip_reason(DynamicScale(), 1.0, loss=0.3)
        <SkipReason.FLOOR: 'floor'>
    """
    if loss is not None and not math.isfinite(loss):
        return SkipReason.LOSS
    if at_lowest(scale, lowest_scale(rule)):
        return SkipReason.FLOOR
    return SkipReason.UNKNOWN if loss is None else SkipReason.OVERFLOW
