"""Signs that a run is in trouble, seen in its loss scale while it runs.

The scale is an early sign. In published logs of large float16 runs it falls by several powers of
two within some tens of steps before the loss shows anything: GLM-130B
(https://github.com/THUDM/GLM-130B/tree/main/logs) and BLOOM
(https://github.com/bigscience-workshop/bigscience/tree/master/train). A run whose scale has
reached the bottom and still overflows does not recover by itself; so it was with OPT-175B
(https://arxiv.org/abs/2205.01068).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math

from lossscale.checks import checked_above_zero, checked_count
from lossscale.diagnostics.powers import power_of_two
from lossscale.diagnostics.records import SkipReason, StepRecord
from lossscale.diagnostics.skips import SkipCounter, Stretch, at_lowest, lowest_scale
from lossscale.diagnostics.verdict import Thresholds, share
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.rules import ScaleRule

ON_FLOOR = ("warn", "raise", "ignore")
_NAMED_TENSORS = 5
_LOSS_ADVICE = (
    "No loss scale can help. Look at the data of this batch, at the learning rate, and at float16 "
    "operations on the way forward; keep the layer that overflows in float32."
)


class AlarmKind(enum.StrEnum):
    """What an alarm is about.

    Attributes:
        FLOOR: A step overflowed at the lowest scale of the rule.
        LOSS: The loss itself is not finite.
        FALLING: The scale has fallen fast, after it had found its place.
        SKIP_RATE: More steps are skipped than a scale that finds its place would skip.
        CONSECUTIVE_SKIPS: Too many steps in a row were skipped.
        LOST: Too much of a gradient is lost to zero in float16, which no skipped step shows.
        NOT_SCALED: A model computes in float16 without loss scaling.
    """

    FLOOR = "floor"
    LOSS = "loss"
    FALLING = "falling"
    SKIP_RATE = "skip_rate"
    CONSECUTIVE_SKIPS = "consecutive_skips"
    LOST = "lost"
    NOT_SCALED = "not_scaled"


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A sign of trouble.

    Attributes:
        kind: What it is about.
        message: What was seen, and what to do.
        is_fatal: Whether the run should end. Then the caller saves what it knows and raises
            `lossscale.errors.TrainingHaltedError(message)`.
    """

    kind: AlarmKind
    message: str
    is_fatal: bool = False


class Alarms:
    """Looks at each record of a run as it comes, and says when something is wrong.

    - *At the floor*: a step was skipped at the lowest scale. A `FixedScale` is always there.
    - *Loss*: the loss of a step is not finite, so no scale can help.
    - *Falling*: the scale is 2**-`halvings` of what it was within the last `halvings_window`
      steps, or less.
    - *Skip rate*: the last `skips_for_rate` skips came at more than `skip_rate_factor` skips in
      `growth_interval` steps. Where the scale stays in place each doubling is followed by one
      halving, and there is at most one doubling in `growth_interval` steps. So a scale that is
      skipped three times as often falls, by 2**7 at least in 10 skips, or it is at the floor.
      Not for rules without a `growth_interval`.
    - *Consecutive skips*: `max_consecutive_skips` steps in a row were skipped. Always fatal.

    - *Lost*: where fidelity was measured, more than `lost` of a gradient is zero in float16 and not
      in float32, at the scale in use; again when it is more than `insufficient_lost`, and than
      `required_lost`, of the thresholds.

    A first scale that is too high comes down within the first steps, as it should. So falling and
    the skip rate are looked at only after the first `halvings_window` finite steps, or after the
    first `growth_interval` finite steps if that is fewer. A run whose first record does not have
    the rule's first scale, and cannot have come down from it in the steps before, goes on from an
    earlier one, and is looked at from the start.

    An alarm is given once, and again only after the trouble was over: at the floor, after the
    scale has grown; falling, after `halvings_window` steps in a row without a skip; the loss,
    after as many steps without a bad one; the skip rate, after it was below half of its limit.
    Fatal alarms are given every time.

    Memory does not grow with the number of steps.

    Args:
        rule: The rule of the loss scale.
        on_floor: What an overflow at the lowest scale is: "warn" for an alarm, "raise" for a
            fatal one, "ignore" for none.
        max_consecutive_skips: How many skips in a row are fatal, in steps. None for no limit.
        halvings: How far the scale falls for an alarm, in powers of two.
        halvings_window: Within how many steps.
        skip_rate_factor: How many skips in `growth_interval` steps are too many.
        skips_for_rate: Over how many skips the rate is taken. Fewer than that give no alarm.
        thresholds: From which shares on a gradient is lost; None for the defaults.

    Raises:
        ArgumentError: If a value cannot be used; the message names it. It is a `ValueError`.
        ArgumentTypeError: If `rule` is no rule. It is a `TypeError`.

    Example:
        >>> from lossscale import DynamicScale
        >>> alarms = Alarms(DynamicScale(initial_scale=1), max_consecutive_skips=2)
        >>> for step in (1, 2):
        ...     for alarm in alarms.observe(StepRecord(step, 1.0, skipped=True)):
        ...         print(step, alarm.kind, alarm.is_fatal)
        1 floor False
        2 consecutive_skips True
    """

    def __init__(
        self,
        rule: ScaleRule,
        *,
        on_floor: str = "warn",
        max_consecutive_skips: int | None = None,
        halvings: float = 3,
        halvings_window: int = 50,
        skip_rate_factor: float = 3.0,
        skips_for_rate: int = 10,
        thresholds: Thresholds | None = None,
    ) -> None:
        if not isinstance(rule, ScaleRule):
            raise ArgumentTypeError(
                "`rule` must be a scaling rule, such as lossscale.DynamicScale(). "
                f"Received: {rule!r} of type {type(rule).__name__}."
            )
        if on_floor not in ON_FLOOR:
            raise ArgumentError(
                f"`on_floor` must be one of {', '.join(map(repr, ON_FLOOR))}. "
                f"Received: on_floor={on_floor!r}."
            )
        self._rule = rule
        self._on_floor = on_floor
        self._max_consecutive_skips = (
            None
            if max_consecutive_skips is None
            else checked_count("max_consecutive_skips", max_consecutive_skips)
        )
        self._fall = 2.0 ** checked_above_zero("halvings", halvings)
        self._window = checked_count("halvings_window", halvings_window)
        factor = checked_above_zero("skip_rate_factor", skip_rate_factor)
        self._lowest = lowest_scale(rule)
        self._limits = thresholds or Thresholds()
        # The limit that was passed last: of the silent loss that no skip shows.
        self._lost = 0.0
        interval = getattr(rule, "growth_interval", None)
        self._rate_limit = math.inf if interval is None else factor / interval
        self._skip_steps: collections.deque[int] = collections.deque(
            maxlen=checked_count("skips_for_rate", skips_for_rate)
        )
        self._scales: collections.deque[tuple[int, float]] = collections.deque()
        self._start_up_steps = min(self._window, interval or self._window)
        self._started = False
        self._counter = SkipCounter()
        self._steps_without_skip = 0
        self._bad_loss_step = 0
        self._last_skip: StepRecord | None = None
        self._given: set[AlarmKind] = set()

    def observe(self, record: StepRecord) -> list[Alarm]:
        """Takes one more record, and returns the alarms it gives rise to.

        Args:
            record: A record of a later step than the one before.

        Returns:
            The alarms, fatal ones first; nearly always an empty list.

        Raises:
            ArgumentError: If the step is not a later one. It is a `ValueError`.
        """
        first = not self._counter.steps
        stretch = self._counter.observe(record)
        if record.skipped:
            self._last_skip = record
        if first:
            self._started = self._goes_on(record)
        self._steps_without_skip = 0 if stretch.skips else self._steps_without_skip + stretch.steps
        if self._steps_without_skip >= self._window:
            self._given.discard(AlarmKind.FALLING)
        found = [self._consecutive_skips(record), self._floor(record), self._loss(record)]
        found.append(self._silent_loss(record))
        if self._started:
            found += [self._falling(record), self._skip_rate(record, stretch)]
        elif self._counter.steps - self._counter.skips >= self._start_up_steps:
            self._started = True
        return sorted(
            (alarm for alarm in found if alarm is not None), key=lambda alarm: not alarm.is_fatal
        )

    def _goes_on(self, first: StepRecord) -> bool:
        """Whether a run whose first record is this one goes on from an earlier run."""
        if math.isclose(first.scale, float(self._rule.init().scale), rel_tol=1e-6):
            return False
        # Of several steps in one execution only the last is recorded. The skips among the steps
        # before it explain a scale that has come down, as long as few others were applied.
        skips = (first.steps_skipped or 0) - first.skipped
        return skips <= 0 or first.step - 1 - skips >= self._start_up_steps

    def _once(self, kind: AlarmKind, message: str) -> Alarm | None:
        if kind in self._given:
            return None
        self._given.add(kind)
        return Alarm(kind, message)

    def _consecutive_skips(self, record: StepRecord) -> Alarm | None:
        count = self._counter.consecutive
        if self._max_consecutive_skips is None or count < self._max_consecutive_skips:
            return None
        return Alarm(
            AlarmKind.CONSECUTIVE_SKIPS,
            f"{_last_steps(count)} skipped, up to step {record.step}, and "
            f"max_consecutive_skips={self._max_consecutive_skips}. The loss scale is "
            f"{power_of_two(_after(record))}. {_evidence(record)} {self._advice(record)}",
            is_fatal=True,
        )

    def _floor(self, record: StepRecord) -> Alarm | None:
        if not at_lowest(record.scale, self._lowest):
            self._given.discard(AlarmKind.FLOOR)
            return None
        if self._on_floor == "ignore" or not record.skipped:
            return None
        scale = power_of_two(record.scale)
        fixed = not self._rule.moves
        where = f"the fixed loss scale {scale}" if fixed else f"the lowest loss scale, {scale}"
        message = (
            f"Step {record.step} was skipped at {where}, which is not lowered any more. "
            f"{_evidence(record)} {self._advice(record)}"
        )
        if self._on_floor == "raise":
            return Alarm(AlarmKind.FLOOR, f"{message} (on_floor='raise')", is_fatal=True)
        return self._once(AlarmKind.FLOOR, message)

    def _loss(self, record: StepRecord) -> Alarm | None:
        if record.loss is None or math.isfinite(record.loss):
            if record.step - self._bad_loss_step >= self._window:
                self._given.discard(AlarmKind.LOSS)
            return None
        self._bad_loss_step = record.step
        return self._once(
            AlarmKind.LOSS,
            f"The loss of step {record.step} is {record.loss}. {_LOSS_ADVICE}",
        )

    def _silent_loss(self, record: StepRecord) -> Alarm | None:
        limits = self._limits
        told = {
            name: found["lost"]
            for name, found in record.fidelity.items()
            if found["share"] >= limits.negligible and not found["nonfinite"]
        }
        if not told:
            return None
        worst = max(told, key=lambda name: told[name])
        levels = (limits.lost, limits.insufficient_lost, limits.required_lost)
        passed = max(
            (each for each in levels if told[worst] >= each),
            default=0.0,
        )
        if passed <= self._lost:
            if told[worst] < limits.lost / 2:
                self._lost = 0.0
            return None
        self._lost = passed
        scale = power_of_two(_after(record))
        return Alarm(
            AlarmKind.LOST,
            f"After step {record.step}, at a loss scale of {scale}, {share(told[worst])} of the "
            f"gradient of {worst} is lost to zero in float16. No step is skipped for that. Let the "
            "scale be higher, with a higher initial_scale or a shorter growth_interval; "
            "lossscale.diagnostics.diagnose says which scale serves.",
        )

    def _falling(self, record: StepRecord) -> Alarm | None:
        while self._scales and self._scales[0][0] <= record.step - self._window:
            self._scales.popleft()
        # Only scales that can still become the highest of a window are kept.
        while self._scales and self._scales[-1][1] <= record.scale:
            self._scales.pop()
        self._scales.append((record.step, record.scale))
        since, highest = self._scales[0]
        now = _after(record)
        if highest < now * self._fall * (1 - 2.0**-20):
            return None
        return self._once(
            AlarmKind.FALLING,
            f"The loss scale has fallen from {power_of_two(highest)} to {power_of_two(now)} "
            f"between steps {since} and {record.step}. In logs of large runs this came some tens "
            f"of steps before the loss diverged. {_evidence(self._last_skip)} Look at the gradient "
            "norm and the batches of these steps, keep a checkpoint from before them, and consider "
            "a lower learning rate.",
        )

    def _skip_rate(self, record: StepRecord, stretch: Stretch) -> Alarm | None:
        # When the skips between two records came is not known. As early as possible means that
        # the rate is never taken to be higher than it is.
        unrecorded = min(stretch.skips - record.skipped, self._skip_steps.maxlen or 0)
        self._skip_steps.extend([record.step - stretch.steps + 1] * unrecorded)
        if record.skipped:
            self._skip_steps.append(record.step)
        count = len(self._skip_steps)
        if count < (self._skip_steps.maxlen or 0):
            return None
        steps = record.step - self._skip_steps[0] + 1
        rate = count / steps
        if rate < self._rate_limit / 2:
            self._given.discard(AlarmKind.SKIP_RATE)
        if rate <= self._rate_limit:
            return None
        return self._once(
            AlarmKind.SKIP_RATE,
            f"{count} of the last {steps} steps were skipped, up to step {record.step}. A scale "
            f"that stays in place skips at most one step in growth_interval="
            f"{getattr(self._rule, 'growth_interval', None)}; so often it falls, now to "
            f"{power_of_two(_after(record))}. {_evidence(self._last_skip)} Look for batches that "
            "overflow at any scale (bad data, a float16 operation on the way forward); if they "
            "cannot be avoided, a shorter growth_interval lets the scale recover in between.",
        )

    def _advice(self, record: StepRecord) -> str:
        if record.reason is SkipReason.LOSS:
            return _LOSS_ADVICE
        if not self._rule.moves:
            return (
                "If this happens often, use a lower scale, or DynamicScale, which finds one by "
                "itself."
            )
        if self._lowest is not None and self._lowest > 1 and at_lowest(record.scale, self._lowest):
            return (
                "If the gradients of good batches overflow here, give the rule a lower "
                "`min_scale`; if only some batches do, look at their data."
            )
        return (
            "Look at the learning rate, the data of these batches, and float16 operations that "
            "overflow whatever the scale; keep the layers named here in float32."
        )


def float16_without_scaling(where: str) -> Alarm:
    """Returns the alarm for a model that computes in float16 without loss scaling.

    Args:
        where: What computes in float16, as the user knows it: the name of a model or a layer.

    Example:
        >>> float16_without_scaling("model 'sequential'").kind
        <AlarmKind.NOT_SCALED: 'not_scaled'>
    """
    return Alarm(
        AlarmKind.NOT_SCALED,
        f"float16 without loss scaling: {where} computes in float16 and its loss is not scaled. "
        "Gradients up to 2**-25 become zero, and nothing says so. Wrap the optimizer: "
        "lossscale.LossScaleOptimizer(optimizer). Or compute in bfloat16, which has the range of "
        "float32.",
    )


def _last_steps(count: int) -> str:
    return "The last step was" if count == 1 else f"The last {count} steps in a row were"


def _after(record: StepRecord) -> float:
    return record.scale if record.next_scale is None else record.next_scale


def _evidence(record: StepRecord | None) -> str:
    """Says what was not finite in a skipped step, in one or two sentences."""
    if record is None:
        return "None of the skipped steps was recorded."
    said = []
    if record.reason is SkipReason.LOSS:
        said.append(f"The loss of step {record.step} is {record.loss}.")
    if record.nonfinite:
        named = ", ".join(str(tensor) for tensor in record.nonfinite[:_NAMED_TENSORS])
        more = len(record.nonfinite) - _NAMED_TENSORS
        others = f" and {more} more" if more > 0 else ""
        said.append(f"Not finite in step {record.step}: {named}{others}.")
    else:
        said.append(f"Which gradients of step {record.step} were not finite was not recorded.")
    return " ".join(said)
