"""The monitor: makes a record of each step that it is shown, writes it, and says what is wrong."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, NamedTuple

from lossscale.checks import checked_count, class_checks_keywords
from lossscale.errors import ArgumentError, TrainingHaltedError
from lossscale.monitoring.record import NonfiniteTensor, StepRecord, at_lowest, skip_reason
from lossscale.packages import warn
from lossscale.rules import ScaleRule

_ON_FLOOR = ("warn", "raise", "ignore")


@class_checks_keywords("A monitor")
@dataclasses.dataclass(frozen=True)
class MonitorSettings:
    """The arguments that every monitor takes.

    Args:
        path: A file for the records, JSON lines; see `read_records`. None for none.
        every: Sample steps whose number is a multiple of this, and the first and the last one; in
            steps. Skips in between count all the same, and the last of them is recorded too.
        on_floor: What a skip at the lowest scale is: "warn", "raise" to end training, or "ignore".
        max_consecutive_skips: How many skips in a row end training, in steps. None for no limit.
        append: Whether to add to the file `path` if it exists, as a resumed run does.

    Raises:
        ArgumentError: If an argument cannot be used; the message names it. It is a `ValueError`.

    Examples:
        >>> MonitorSettings(every=100).every
        100
    """

    path: str | os.PathLike[str] | None = None
    every: int = 1
    on_floor: str = "warn"
    max_consecutive_skips: int | None = None
    append: bool = False

    def samples(self, before: int, step: int) -> bool:
        """Whether one of the steps after `before`, up to `step`, is to be sampled."""
        return step // self.every > before // self.every

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", checked_count("every", self.every))
        if self.max_consecutive_skips is not None:
            checked_count("max_consecutive_skips", self.max_consecutive_skips)
        if self.on_floor not in _ON_FLOOR:
            raise ArgumentError(
                f"`on_floor` must be one of {', '.join(map(repr, _ON_FLOOR))}. "
                f"Received: on_floor={self.on_floor!r}."
            )


class Skip(NamedTuple):
    """What was noted of a skipped step.

    Attributes:
        step: Its number.
        scale: The loss scale it was taken with.
        nonfinite: The gradients with an infinity or a NaN.
    """

    step: int
    scale: float
    nonfinite: tuple[NonfiniteTensor, ...] = ()


class StepStats(NamedTuple):
    """What an optimizer says after a step, as Python numbers.

    Attributes:
        step: How many steps were run, skipped ones included.
        scale: The loss scale that the last one was taken with.
        next_scale: That of the next one.
        steps_skipped: How many steps were skipped.
        skipped: Whether the last one was.
        last_skip: The last skipped step since the stats before; None if there is none.
        loss: The loss of the last step, not scaled; None if it is not known.
    """

    step: int
    scale: float
    next_scale: float
    steps_skipped: int
    skipped: bool
    last_skip: Skip | None = None
    loss: float | None = None


class Monitor:
    """Records what the loss scale of a run does, and warns when something is wrong.

    What frameworks and trainers show it is in `lossscale.torch.Monitor`, `lossscale.optax.Monitor`
    and `lossscale.LossScaleMonitor`. A loop of another kind calls `observe` on the steps that it
    samples, and `close` at the end.

    Args:
        settings: What it is asked for.
        rule: The rule of the loss scale.

    Attributes:
        settings: As they were given.
        last_record: The last record, or None.

    Examples:
        >>> from lossscale import DynamicScale
        >>> monitor = Monitor(MonitorSettings(), DynamicScale(initial_scale=8))
        >>> monitor.observe(StepStats(1, 8.0, 4.0, 1, True, loss=0.5))
        >>> monitor.last_record.reason
        <SkipReason.OVERFLOW: 'overflow'>
    """

    def __init__(self, settings: MonitorSettings, rule: ScaleRule) -> None:
        self.settings = settings
        self.last_record: StepRecord | None = None
        self._rule = rule
        self._before: StepStats | None = None
        self._file: Any = None
        self._append = settings.append
        self._consecutive = 0
        self._floor_was_said = self._loss_was_said = False

    def open(self) -> None:
        """Opens the file, if there is one. Opened again it goes on in the same file.

        Raises:
            ArgumentError: If it exists and `append` is False. It is a `ValueError`.
            OSError: If it cannot be written.
        """
        self.close()
        if self.settings.path is not None:
            mode = "a" if self._append else "x"
            try:
                self._file = open(self.settings.path, mode, encoding="utf-8")  # noqa: SIM115
            except FileExistsError:
                raise ArgumentError(
                    f"{os.fspath(self.settings.path)!r} exists. Give another name, remove it, or "
                    "pass append=True to add to it, as a run that was resumed does."
                ) from None
            self._append = True

    def observe(self, stats: StepStats) -> None:
        """Records a step, and the last skipped one before it, and says what is wrong.

        Args:
            stats: What the optimizer says after the step.

        Raises:
            TrainingHaltedError: If an alarm ends training. The file is closed before that.
        """
        before, self._before = self._before, stats
        skip = stats.last_skip
        if skip is not None and skip.step < stats.step:
            if not stats.skipped and (before is None or before.step < skip.step):
                self._add(self._skipped(skip.step, skip.scale, stats, skip.nonfinite))
            skip = None
        if stats.skipped:
            nonfinite = () if skip is None else skip.nonfinite
            self._add(self._skipped(stats.step, stats.scale, stats, nonfinite, loss=stats.loss))
        else:
            self._add(
                StepRecord(
                    stats.step,
                    stats.scale,
                    False,
                    next_scale=stats.next_scale,
                    loss=stats.loss,
                    steps_skipped=stats.steps_skipped,
                )
            )

    def _skipped(
        self,
        step: int,
        scale: float,
        stats: StepStats,
        nonfinite: tuple[NonfiniteTensor, ...],
        loss: float | None = None,
    ) -> StepRecord:
        return StepRecord(
            step,
            scale,
            True,
            next_scale=stats.next_scale if step == stats.step else None,
            loss=loss,
            reason=skip_reason(self._rule, scale, loss),
            nonfinite=nonfinite,
            steps_skipped=stats.steps_skipped,
        )

    def close(self) -> None:
        """Closes the file. Closing it again does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def flush(self) -> None:
        """Hands all that was written to the operating system."""
        if self._file is not None:
            self._file.flush()

    def _add(self, record: StepRecord) -> None:
        last, self.last_record = self.last_record, record
        if self._file is not None:
            self._file.write(record.to_json() + "\n")
        self._consecutive = self._skips_in_a_row(last, record)
        most = self.settings.max_consecutive_skips
        if most is not None and self._consecutive >= most:
            self._halt(
                f"The last {self._consecutive} steps in a row were skipped, up to step "
                f"{record.step} (max_consecutive_skips={most}). {_evidence(record)}"
            )
        if record.loss is not None and not math.isfinite(record.loss):
            if not self._loss_was_said:
                warn(
                    f"The loss of step {record.step} is {record.loss}. No loss scale can help. "
                    "Look at the data of this batch and at the learning rate."
                )
            self._loss_was_said = True
        elif not at_lowest(self._rule, record.scale):
            self._floor_was_said = False
        elif record.skipped and self.settings.on_floor != "ignore" and not self._floor_was_said:
            self._floor_was_said = True
            message = (
                f"Step {record.step} was skipped at the lowest loss scale, {record.scale:g}. "
                f"{_evidence(record)} Where gradients are too large for float16, let the rule go "
                "lower: DynamicScale(min_scale=2.0**-24). Where the data or the loss give "
                "infinities, no scale helps."
            )
            if self.settings.on_floor == "raise":
                self._halt(f"{message} (on_floor='raise')")
            warn(message)

    def _skips_in_a_row(self, last: StepRecord | None, record: StepRecord) -> int:
        if not record.skipped:
            return 0
        if last is None or last.steps_skipped is None or record.steps_skipped is None:
            return 1
        steps = record.step - last.step
        all_skipped = record.steps_skipped - last.steps_skipped == steps
        return self._consecutive + steps if all_skipped else 1

    def _halt(self, message: str) -> None:
        self.close()
        raise TrainingHaltedError(message)


def float16_without_scaling(where: str) -> str:
    """Returns what is wrong with a model that computes in float16 without loss scaling."""
    return (
        f"float16 without loss scaling: {where} computes in float16 and its loss is not scaled. "
        "Gradients up to 2**-25 become zero, and nothing says so. Wrap the optimizer: "
        "lossscale.LossScaleOptimizer(optimizer)."
    )


def _evidence(record: StepRecord) -> str:
    if not record.nonfinite:
        return "Which gradients were not finite was not recorded."
    return f"Not finite: {', '.join(map(str, record.nonfinite[:5]))}."
