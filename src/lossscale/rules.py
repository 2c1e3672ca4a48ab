"""Rules that adjust a loss scale: pure functions of a small state, for any array library.

A rule is a frozen object that holds numbers and no arrays. Its state is a named tuple of
scalars. `update` takes the state and whether the gradients are finite, and returns the next state.
It uses only operators and `xp.where`, so the same code runs under NumPy, TensorFlow (eager,
`tf.function`, XLA), JAX, PyTorch and `keras.ops`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from lossscale.checks import (
    LARGEST_SCALE,
    LONGEST_INTERVAL,
    SMALLEST_SCALE,
    checked_interval,
    checked_number,
    checked_scale,
    checked_truth,
)
from lossscale.errors import ArgumentError
from lossscale.framework_types import Library, RuleState, Scalar

__all__ = ["DynamicScale", "FixedScale", "OverflowCountState", "ScaleRule", "ScaleState"]


class ScaleState(NamedTuple):
    """The state of a rule between two steps.

    Attributes:
        scale: float32 scalar; multiplies the loss.
        good_steps: Integer scalar; finite steps since the scale last changed.
    """

    scale: Scalar
    good_steps: Scalar


class OverflowCountState(NamedTuple):
    """The state of a `DynamicScale` with `overflows_before_backoff` above 1.

    Attributes:
        scale: float32 scalar; multiplies the loss.
        good_steps: Integer scalar; finite steps since the last overflow or growth.
        overflows: Integer scalar; overflows in a row, up to `overflows_before_backoff`.
    """

    scale: Scalar
    good_steps: Scalar
    overflows: Scalar


@runtime_checkable
class ScaleRule(Protocol):
    """The base class of rules, which adjust a loss scale during training.

    A rule is immutable and hashable, and holds no arrays: everything that changes is in the state,
    a named tuple such as `ScaleState`, whose first field is `scale`.
    """

    @property
    def checks_gradients(self) -> bool:
        """Whether gradients are checked, so that a step with a non-finite one is skipped."""
        return True

    @property
    def powers_of_two(self) -> bool:
        """Whether every scale the rule can reach is a power of two.

        Then multiplying by the reciprocal is exact, and no division is needed.
        """
        return False

    @property
    def is_dynamic(self) -> bool:
        """Whether `update` can ever change the state, and the loss scale with it."""
        return True

    @property
    def exact_on_host(self) -> bool:
        """Whether `update` gives the same numbers for Python numbers as for float32 tensors.

        If so, the host may update the state when it knows whether the step is applied.
        """
        return False

    @property
    def lowest_scale(self) -> float | None:
        """The lowest scale that the rule reaches; None if not known."""
        return None

    def init(self) -> RuleState:
        """Returns the first state, as Python numbers."""
        ...

    def update(self, state: RuleState, finite: Scalar, *, xp: Library) -> RuleState:
        """Returns the state after a step.

        Args:
            state: The state before the step, float32 and integer scalars of one library.
            finite: Boolean scalar; whether every element of the unscaled gradients, on all
                replicas, was finite.
            xp: The namespace of the arrays, such as `numpy`, `jax.numpy`, `torch`,
                `tensorflow` or `keras.ops`. Only `where` is used.
        """
        ...

    def restored(self, state: RuleState) -> RuleState:
        """Returns a state read from a file, made valid for this rule.

        Args:
            state: Python numbers.
        """
        return state

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that create this rule, as a JSON-ready dictionary."""
        ...


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


@dataclasses.dataclass(frozen=True)
class FixedScale(ScaleRule):
    """A loss scale that never changes.

    Args:
        scale: The loss scale, a number from 2**-126 to 2**126.
        skip_nonfinite: Whether a step with a non-finite gradient is skipped. By default
            gradients are not checked, as TensorFlow documented for a fixed scale: an
            infinite gradient is applied.

    Raises:
        ArgumentError: If `scale` is not such a number.

    Examples:
        >>> FixedScale(128).init()
        ScaleState(scale=128.0, good_steps=0)

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018,
    https://arxiv.org/abs/1710.03740, section 3.2.
    """

    scale: float
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", checked_scale("scale", self.scale))
        skips = checked_truth("skip_nonfinite", self.skip_nonfinite)
        object.__setattr__(self, "skip_nonfinite", skips)

    @property
    def checks_gradients(self) -> bool:
        return self.skip_nonfinite

    @property
    def is_dynamic(self) -> bool:
        return False

    @property
    def powers_of_two(self) -> bool:
        return _is_power_of_two(self.scale)

    @property
    def exact_on_host(self) -> bool:
        return True

    @property
    def lowest_scale(self) -> float:
        return self.scale

    def init(self) -> ScaleState:
        return ScaleState(scale=self.scale, good_steps=0)

    def update(self, state: ScaleState, finite: Scalar, *, xp: Library) -> ScaleState:
        return state

    def restored(self, state: ScaleState) -> ScaleState:
        return self.init()

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class DynamicScale(ScaleRule):
    """A loss scale that grows while gradients are finite and backs off when they are not.

    ```
    if every gradient is finite:
        apply the step
        good_steps += 1
        if good_steps >= growth_interval:
            good_steps = 0
            if scale * growth_factor <= max_scale:
                scale *= growth_factor
    else:
        skip the step
        good_steps = 0
        if this is overflow `overflows_before_backoff` in a row, or a later one:
            scale = max(scale * backoff_factor, min_scale)
    ```

    If the product would exceed `max_scale`, the scale stays, and the count starts again. The test
    is `>=`, so a shorter interval given on resume takes effect at once. No sequence of steps takes
    the scale out of [`min_scale`, `max_scale`], and in this range the scale and its reciprocal are
    normal float32 numbers.

    Args:
        initial_scale: The first loss scale. Start high: a scale that is too high comes down
            within a few steps, one that is too low needs `growth_interval` steps for each
            doubling.
        growth_interval: Number of finite steps in a row after which the scale grows.
        growth_factor: Multiplies the scale when it grows; above 1.
        backoff_factor: Multiplies the scale after an overflow; between 0 and 1.
        min_scale: The lowest loss scale; at least 2**-126.
        max_scale: The highest loss scale. None means 2**126.
        overflows_before_backoff: Number of overflows in a row after which the scale is lowered;
            each further one in the same row lowers it again. With 2 or 3, single batches that
            overflow at any scale do not lower it. Every overflow is skipped in any case.

    Raises:
        ArgumentError: If a value is invalid; the message names it.

    Examples:
        >>> import numpy as np
        >>> rule = DynamicScale(initial_scale=8, growth_interval=2)
        >>> state = ScaleState(np.float32(8), np.int64(0))
        >>> for finite in (True, True, False):
        ...     state = rule.update(state, finite, xp=np)
        ...     print(float(state.scale), int(state.good_steps))
        8.0 1
        16.0 0
        8.0 0

    Source: `tf.keras.mixed_precision.LossScaleOptimizer` of TensorFlow 2.4; the backoff is
    described in https://arxiv.org/abs/1805.10387 (OpenSeq2Seq), section 3.
    """

    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float | None = None
    overflows_before_backoff: int = 1

    def __post_init__(self) -> None:
        checks = {
            "initial_scale": checked_scale,
            "growth_interval": checked_interval,
            "growth_factor": checked_number,
            "backoff_factor": checked_number,
            "min_scale": checked_scale,
            "overflows_before_backoff": checked_interval,
            **({} if self.max_scale is None else {"max_scale": checked_scale}),
        }
        for name, check in checks.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        # Rounded, because a factor that is 1 in float32 never moves the scale.
        if not 1.0 < _float32(self.growth_factor) < math.inf:
            raise ArgumentError(
                "`growth_factor` must be a finite float32 number above 1. "
                f"Received: growth_factor={self.growth_factor!r}."
            )
        # Compilers flush smaller factors to zero.
        if not SMALLEST_SCALE <= _float32(self.backoff_factor) < 1.0:
            raise ArgumentError(
                "`backoff_factor` must be a normal float32 number above 0 and below 1. Received: "
                f"backoff_factor={self.backoff_factor!r}."
            )
        if not self.min_scale <= self.initial_scale <= self.ceiling:
            raise ArgumentError(
                "`initial_scale` must be between `min_scale` and `max_scale`. Received: "
                f"min_scale={self.min_scale!r}, initial_scale={self.initial_scale!r}, "
                f"max_scale={self.max_scale!r}."
            )

    @property
    def ceiling(self) -> float:
        """The highest loss scale the rule can reach."""
        return LARGEST_SCALE if self.max_scale is None else self.max_scale

    @functools.cached_property
    def powers_of_two(self) -> bool:
        return all(
            _is_power_of_two(value)
            for value in (
                self.initial_scale,
                self.growth_factor,
                self.backoff_factor,
                self.min_scale,
                self.ceiling,
            )
        )

    @property
    def exact_on_host(self) -> bool:
        # Other factors would be rounded in float64 on the host and in float32 on tensors.
        return self.powers_of_two

    @property
    def lowest_scale(self) -> float:
        return self.min_scale

    # Each state of this class has the fields of a `ScaleState`.
    def init(self) -> ScaleState:
        if self.overflows_before_backoff == 1:
            return ScaleState(scale=self.initial_scale, good_steps=0)
        return cast(ScaleState, OverflowCountState(self.initial_scale, 0, 0))

    def update(self, state: ScaleState, finite: Scalar, *, xp: Library) -> ScaleState:
        scale, good_steps = state.scale, state.good_steps
        counted = good_steps + 1
        waiting = counted < self.growth_interval
        grown = scale * self.growth_factor
        lowered = scale * self.backoff_factor
        # Comparisons with inf and NaN are false, so a scale that other code set to inf or NaN
        # returns to the range on the first skipped step.
        lowered = xp.where(lowered > self.min_scale, lowered, self.min_scale)
        lowered = xp.where(lowered < self.ceiling, lowered, self.ceiling)
        kept = xp.where(waiting | (grown > self.ceiling), scale, grown)
        counts = {}
        if self.overflows_before_backoff > 1:
            overflows = cast(OverflowCountState, state).overflows + 1
            early = overflows < self.overflows_before_backoff
            lowered = xp.where(early, scale, lowered)
            overflows = xp.where(early, overflows, self.overflows_before_backoff)
            # A zero of the same dtype: TensorFlow uses the dtype of the first operand.
            counts["overflows"] = xp.where(finite, overflows * 0, overflows)
        # Select by `finite` last: if it is a constant, the compiler removes half of this.
        return state._replace(
            scale=xp.where(finite, kept, lowered),
            good_steps=xp.where(finite, xp.where(waiting, counted, 0), 0),
            **counts,
        )

    def restored(self, state: ScaleState) -> ScaleState:
        scale = float(state.scale)
        if not (math.isfinite(scale) and scale > 0):
            scale = self.initial_scale
        scale = min(max(scale, self.min_scale), self.ceiling)
        # The next step adds one, which must still fit a 32-bit counter.
        good_steps = min(max(int(state.good_steps), 0), LONGEST_INTERVAL - 1)
        if self.overflows_before_backoff == 1:
            return ScaleState(scale=scale, good_steps=good_steps)
        overflows = int(cast(OverflowCountState, state).overflows)
        overflows = min(max(overflows, 0), self.overflows_before_backoff)
        return cast(ScaleState, OverflowCountState(scale, good_steps, overflows))

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


RULES: dict[str, type[ScaleRule]] = {rule.__name__: rule for rule in (FixedScale, DynamicScale)}
"""The rules that a configuration can name without `custom_objects`."""


class PythonNumbers:
    """The `xp` of a rule for Python numbers: the one function that rules use."""

    @staticmethod
    def where(condition: bool, one: Scalar, other: Scalar) -> Scalar:
        return one if condition else other


def changed_fields(rule: ScaleRule, before: ScaleState, applied: bool) -> dict[str, Any]:
    """Returns the fields of a state that a step changes, with their new values.

    A few Python numbers replace some twenty small operations. This is faster if the host starts
    each operation and already knows whether the step is applied.

    Args:
        rule: A rule that is `exact_on_host`.
        before: The state before the step, as Python numbers.
        applied: Whether the step was applied.

    Examples:
        >>> changed_fields(DynamicScale(), ScaleState(32768.0, 7), applied=False)
        {'scale': 16384.0, 'good_steps': 0}
    """
    after = rule.update(before, applied, xp=PythonNumbers)
    # A NaN is unequal to itself, so it is written again.
    return {
        field: new
        for field, old, new in zip(before._fields, before, after, strict=True)
        if new != old
    }
