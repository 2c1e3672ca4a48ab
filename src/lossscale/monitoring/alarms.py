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
from collections.abc import Callable

from lossscale.errors import ArgumentTypeError
from lossscale.monitoring.record import SkipReason, StepRecord, after, power_of_two
from lossscale.monitoring.settings import MonitorSettings
from lossscale.monitoring.skips import SkipCounter, Stretch, at_lowest, lowest_scale
from lossscale.rules import ScaleRule

LOWEST_ADVISED = 2.0**-24

_WINDOW = 50
_HALVINGS = 3
_SKIPS_FOR_RATE = 10
_RATE_FACTOR = 3.0
_REMEMBERED = 20
_WRONG = (0.1, 0.5)
_NAMED_TENSORS = 5


class AlarmKind(enum.StrEnum):
    """What an alarm is about.

    Attributes:
        CANNOT_HELP: Something is not finite at any loss scale, and where it arises was looked at.
        LOSS: The loss itself is not finite.
        FLOOR: A step overflowed at the lowest scale of the rule.
        FALLING: The scale has fallen fast, below all places that it had found.
        SKIP_RATE: More steps are skipped than a scale that finds its place would skip.
        CONSECUTIVE_SKIPS: Too many steps in a row were skipped.
        WRONG: Float16 gets a gradient wrong, which no skipped step shows.
        NOT_SCALED: A model computes in float16 without loss scaling.
    """

    CANNOT_HELP = "cannot_help"
    LOSS = "loss"
    FLOOR = "floor"
    FALLING = "falling"
    SKIP_RATE = "skip_rate"
    CONSECUTIVE_SKIPS = "consecutive_skips"
    WRONG = "wrong"
    NOT_SCALED = "not_scaled"


_BY_WEIGHT = (
    AlarmKind.SKIP_RATE,
    AlarmKind.FALLING,
    AlarmKind.FLOOR,
    AlarmKind.LOSS,
    AlarmKind.CANNOT_HELP,
)


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

    - *Cannot help*: the third halving in a row, without a finite step, is not for the scale.
    - *Loss*: the loss of a step is not finite, so no scale can help.
    - *At the floor*: a step was skipped at the lowest scale. A `FixedScale` is always there.
    - *Falling*: the scale is 2**-3 of the lowest one at which a step was applied before the last 50
      steps, or less. A scale that hunts around its ceiling, or finds its first place, is not.
    - *Skip rate*: the last 10 skips came at more than 3 skips in `growth_interval` steps. Where the
      scale stays in place each doubling is followed by one halving. Not for rules without one.
    - *Consecutive skips*: `max_consecutive_skips` steps in a row were skipped. Always fatal.
    - *Wrong*: where it was measured, a gradient is wrong by more than 10 % at the scale in use, and
      again when by more than 50 %.

    One trouble has many signs. The first one is said, and then no other but one that weighs more,
    in the order of the list from below, until 50 steps in a row have shown none. The floor is said
    again only after the scale has grown, that of a `FixedScale` once. Fatal alarms are given every
    time.

    Memory does not grow with the number of steps.

    Args:
        rule: The rule of the loss scale.
        settings: Its `on_floor` and `max_consecutive_skips`.
        look: Called with the record of the third halving in a row, returns what is not finite at
            any scale, or "".

    Raises:
        ArgumentTypeError: If `rule` is no rule. It is a `TypeError`.

    Examples:
        >>> from lossscale import DynamicScale
        >>> alarms = Alarms(DynamicScale(initial_scale=1), MonitorSettings(max_consecutive_skips=2))
        >>> for step in (1, 2):
        ...     for alarm in alarms.observe(StepRecord(step, 1.0, skipped=True)):
        ...         print(step, alarm.kind, alarm.is_fatal)
        1 floor False
        2 consecutive_skips True
    """

    def __init__(
        self,
        rule: ScaleRule,
        settings: MonitorSettings | None = None,
        look: Callable[[StepRecord], str] | None = None,
    ) -> None:
        if not isinstance(rule, ScaleRule):
            raise ArgumentTypeError(
                "`rule` must be a scaling rule, such as lossscale.DynamicScale(). "
                f"Received: {rule!r} of type {type(rule).__name__}."
            )
        self._rule = rule
        self._settings = settings or MonitorSettings()
        self._look = look
        self._lowest = lowest_scale(rule)
        self._each_halving = int(getattr(rule, "overflows_before_backoff", 1))
        self._interval = getattr(rule, "growth_interval", None)
        self._counter = SkipCounter()
        self._last_skip: StepRecord | None = None
        # The trouble that was said: how much it weighs, and when it last gave a sign.
        self._weight, self._last_sign = -1, 0
        self._floor_is_known = False
        self._has_looked = False
        self._wrong = 0.0
        self._skip_steps: collections.deque[int] = collections.deque(maxlen=_SKIPS_FOR_RATE)
        # The lowest scale at which a step was applied, in stretches of a window.
        windows = max(_REMEMBERED, 4 * (self._interval or 0) // _WINDOW)
        self._places: collections.deque[tuple[int, float]] = collections.deque(maxlen=windows)

    def observe(self, record: StepRecord) -> list[Alarm]:
        """Takes one more record, and returns the alarms it gives rise to.

        Args:
            record: A record of a later step than the one before.

        Returns:
            The alarms, fatal ones first; nearly always an empty list.

        Raises:
            ArgumentError: If the step is not a later one. It is a `ValueError`.
        """
        stretch = self._counter.observe(record)
        if record.skipped:
            self._last_skip = record
        fatal = [self._consecutive_skips(record)]
        signs = {
            AlarmKind.CANNOT_HELP: self._cannot_help(record),
            AlarmKind.LOSS: self._loss(record),
            AlarmKind.FLOOR: self._floor(record),
            AlarmKind.FALLING: self._falling(record),
            AlarmKind.SKIP_RATE: self._skip_rate(record, stretch),
        }
        if signs[AlarmKind.FLOOR] and self._settings.on_floor == "raise":
            message = f"{signs[AlarmKind.FLOOR]} (on_floor='raise')"
            fatal.append(Alarm(AlarmKind.FLOOR, message, is_fatal=True))
        found = [alarm for alarm in fatal if alarm is not None]
        return [*found, *self._heaviest(signs, record, bool(found)), *self._silent(record)]

    def _heaviest(
        self, signs: dict[AlarmKind, str], record: StepRecord, is_over: bool
    ) -> list[Alarm]:
        if record.step - self._last_sign > _WINDOW:
            self._weight = -1
        kinds = [kind for kind, message in signs.items() if message]
        if not kinds:
            return []
        self._last_sign = record.step
        kind = max(kinds, key=_BY_WEIGHT.index)
        if AlarmKind.FLOOR in kinds:
            known, self._floor_is_known = self._floor_is_known, True
            if kind is AlarmKind.FLOOR and (known or self._settings.on_floor == "ignore"):
                return []
        if _BY_WEIGHT.index(kind) <= self._weight:
            return []
        self._weight = _BY_WEIGHT.index(kind)
        return [] if is_over else [Alarm(kind, signs[kind])]

    def _cannot_help(self, record: StepRecord) -> str:
        if not record.skipped:
            self._has_looked = False
        if self._has_looked or self._counter.consecutive < _HALVINGS * self._each_halving:
            return ""
        self._has_looked = True
        found = "" if self._look is None else self._look(record)
        return found and f"Loss scaling cannot help: {found}"

    def _loss(self, record: StepRecord) -> str:
        if record.loss is None or math.isfinite(record.loss):
            return ""
        return (
            f"The loss of step {record.step} is {record.loss}. No loss scale can help. Look at the "
            "data of this batch, at the learning rate, and at float16 operations on the way "
            "forward."
        )

    def _floor(self, record: StepRecord) -> str:
        if not at_lowest(record.scale, self._lowest):
            if self._weight == _BY_WEIGHT.index(AlarmKind.FLOOR):
                self._weight = -1
            self._floor_is_known = False
        if not record.skipped or not at_lowest(record.scale, self._lowest):
            return ""
        if record.reason is SkipReason.LOSS:
            return ""
        scale = power_of_two(record.scale)
        kind = "lowest loss scale," if self._rule.moves else "fixed loss scale"
        return (
            f"Step {record.step} was skipped at the {kind} {scale}, which is not "
            f"lowered any more. {_evidence(record)} {self._floor_advice()}"
        )

    def _floor_advice(self) -> str:
        if not self._rule.moves:
            return "If this happens often, use a lower scale, or DynamicScale, which finds one."
        if self._lowest is not None and self._lowest > LOWEST_ADVISED:
            return (
                f"Let the rule go lower: {type(self._rule).__name__}(min_scale=2.0**-24). If only "
                "some batches overflow, look at their data."
            )
        return "A smaller loss does what a lower scale would. Look at the data of these batches."

    def _falling(self, record: StepRecord) -> str:
        window, now = record.step // _WINDOW, after(record)
        settled = [scale for number, scale in self._places if number < window - 1]
        if not record.skipped:
            number, place = self._places[-1] if self._places else (-1, math.inf)
            if number == window:
                self._places[-1] = number, min(place, record.scale)
            else:
                self._places.append((window, record.scale))
        if not settled or not self._rule.moves or now > min(settled) * 2.0**-_HALVINGS * 1.001:
            return ""
        return (
            f"The loss scale has fallen from {power_of_two(min(settled))} to {power_of_two(now)} "
            f"within {2 * _WINDOW} steps, up to step {record.step}. In logs of large runs this "
            f"came some tens of steps before the loss diverged. {_evidence(self._last_skip)} Look "
            "at the gradient norm and the batches of these steps, keep a checkpoint from before "
            "them, and consider a lower learning rate."
        )

    def _skip_rate(self, record: StepRecord, stretch: Stretch) -> str:
        applied = self._counter.steps - self._counter.skips
        if self._interval is None or applied < min(_WINDOW, self._interval):
            return ""
        # When the skips between two records came is not known. As early as possible means that
        # the rate is never taken to be higher than it is.
        unrecorded = min(stretch.skips - record.skipped, _SKIPS_FOR_RATE)
        self._skip_steps.extend([record.step - stretch.steps + 1] * unrecorded)
        if record.skipped:
            self._skip_steps.append(record.step)
        count = len(self._skip_steps)
        if count < _SKIPS_FOR_RATE:
            return ""
        steps = record.step - self._skip_steps[0] + 1
        if count / steps <= _RATE_FACTOR * self._each_halving / self._interval:
            return ""
        return (
            f"{count} of the last {steps} steps were skipped, up to step {record.step}. A scale "
            f"that stays in place skips {self._each_halving} in growth_interval={self._interval} "
            f"steps; now it is {power_of_two(after(record))}. {_evidence(self._last_skip)} Look "
            "for batches that overflow at any scale (bad data, a float16 operation on the way "
            "forward); if they cannot be avoided, a shorter growth_interval lets the scale recover "
            "in between."
        )

    def _consecutive_skips(self, record: StepRecord) -> Alarm | None:
        count, most = self._counter.consecutive, self._settings.max_consecutive_skips
        if most is None or count < most:
            return None
        last = "The last step was" if count == 1 else f"The last {count} steps in a row were"
        return Alarm(
            AlarmKind.CONSECUTIVE_SKIPS,
            f"{last} skipped, up to step {record.step}, and max_consecutive_skips={most}. The loss "
            f"scale is {power_of_two(after(record))}. {_evidence(record)}",
            is_fatal=True,
        )

    def _silent(self, record: StepRecord) -> list[Alarm]:
        if record.wrong is None or not math.isfinite(record.wrong[1]):
            return []
        name, error = record.wrong
        passed = max((limit for limit in _WRONG if error > limit), default=0.0)
        if passed <= self._wrong:
            if error < _WRONG[0] / 2:
                self._wrong = 0.0
            return []
        self._wrong = passed
        return [
            Alarm(
                AlarmKind.WRONG,
                f"After step {record.step}, at a loss scale of {power_of_two(after(record))}, "
                f"float16 gets the gradient of {name} wrong by {error:.0%}. No step is skipped for "
                "that. Let the scale be higher, with a higher initial_scale or a shorter "
                "growth_interval; diagnose says which scale serves.",
            )
        ]


def float16_without_scaling(where: str) -> Alarm:
    """Returns the alarm for a model that computes in float16 without loss scaling.

    Args:
        where: What computes in float16, as the user knows it: the name of a model or a layer.

    Examples:
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
