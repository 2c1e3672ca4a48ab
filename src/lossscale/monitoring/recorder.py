"""Creates the record of each step that a monitor reads, writes it, and warns."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from lossscale.checks import checked_count
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.monitoring.record import (
    NonfiniteTensor,
    StepRecord,
    advice_at_floor,
    is_broken,
    is_lowest,
    skip_reason,
)
from lossscale.packages import warn
from lossscale.rules import ScaleRule

_EXPLAIN = (
    "explain() of lossscale.torch, lossscale.optax or lossscale.diagnosis (Keras) names the "
    "operation for one batch."
)


@dataclasses.dataclass(frozen=True)
class MonitorSettings:
    """The checked arguments that all monitors have; the monitors document them."""

    path: str | os.PathLike[str] | None = None
    every: int = 1
    log: Callable[[dict[str, Any]], object] | None = None

    def __post_init__(self) -> None:
        # open() accepts an int, and would write to that file descriptor.
        if self.path is not None and not isinstance(self.path, (str, os.PathLike)):
            raise ArgumentTypeError(
                f"`path` must be the name of a file. Received: path={self.path!r} of type "
                f"{type(self.path).__name__}."
            )
        object.__setattr__(self, "every", checked_count("every", self.every))
        if self.log is not None and not callable(self.log):
            raise ArgumentTypeError(f"`log` must be a function. Received: log={self.log!r}.")


class SkippedStep(NamedTuple):
    """A skipped step that may be recorded later.

    Attributes:
        step: The number of the step.
        scale: The loss scale of the step.
        nonfinite: The gradients with an infinity or a NaN.
    """

    step: int
    scale: float
    nonfinite: tuple[NonfiniteTensor, ...] = ()


class StepStats(NamedTuple):
    """The statistics of an optimizer after a step, as Python numbers.

    Attributes:
        step: Number of steps so far, skipped ones included.
        scale: The loss scale of the last step.
        next_scale: The loss scale of the next step.
        steps_skipped: Number of skipped steps so far.
        skipped: Whether the last step was skipped.
        last_skip: The last skipped step since the previous read, or None.
        loss: The unscaled loss of the last step; None if it is not known.
    """

    step: int
    scale: float
    next_scale: float
    steps_skipped: int
    skipped: bool
    last_skip: SkippedStep | None = None
    loss: float | None = None


class Recorder:
    """Creates records, writes them to a file, passes them to `log`, and warns.

    Args:
        settings: The arguments of the monitor.
        rule: The rule of the loss scale.
        takes_rules: Whether a rule can be passed, as to all but a gradient scaler.

    Attributes:
        settings: The arguments of the monitor.
        last_record: The last record, or None.
    """

    def __init__(
        self, settings: MonitorSettings, rule: ScaleRule, *, takes_rules: bool = True
    ) -> None:
        self.settings = settings
        self.last_record: StepRecord | None = None
        self._rule, self._takes_rules = rule, takes_rules
        self._writes = False
        self._warned_of_floor = self._warned_of_loss = False

    def open(self) -> None:
        """Creates the file, if there is one. A second call continues the same file.

        Raises:
            ArgumentError: If the file exists.
            OSError: If the file cannot be written.
        """
        path = self.settings.path
        if path is None or self._writes:
            return
        try:
            open(path, "xb").close()
        except FileExistsError:
            raise ArgumentError(
                f"A monitor writes a new file for each run. Received: path={os.fspath(path)!r}, "
                "which exists. Put the time into the name, such as "
                'f"run-{time.time():.0f}.jsonl", so that a job that is started again has another '
                "file; if several processes run this program, pass a path in one of them."
            ) from None
        self._writes = True

    def observe(self, stats: StepStats) -> StepRecord:
        """Records a step, and the last skipped step before it.

        Args:
            stats: The optimizer's statistics after the step.

        Returns:
            The record of the step.
        """
        skip = stats.last_skip
        nonfinite: tuple[NonfiniteTensor, ...] = ()
        if skip is not None and skip.step < stats.step:
            earlier = StepRecord(skip.step, skip.scale, True, nonfinite=skip.nonfinite)
            self._add(earlier, stats.steps_skipped)
        elif skip is not None and stats.skipped:
            nonfinite = skip.nonfinite
        known = stats.step, stats.scale, stats.skipped, stats.next_scale, stats.loss
        return self._add(StepRecord(*known, nonfinite=nonfinite), stats.steps_skipped)

    def _add(self, record: StepRecord, steps_skipped: int) -> StepRecord:
        """Completes a record, passes it on, and returns it."""
        reason = skip_reason(self._rule, record.scale, record.loss) if record.skipped else None
        record = dataclasses.replace(record, reason=reason, steps_skipped=steps_skipped)
        self.last_record = record
        self._write(record)
        if self.settings.log is not None:
            self.settings.log(record.to_dict())
        self._warn(record)
        return record

    def _write(self, record: StepRecord) -> None:
        if self.settings.path is None or not self._writes:
            return
        try:
            # Closed, so that the file can be read during the run and after a kill.
            with open(self.settings.path, "ab") as file:
                file.write(record.to_json().encode() + b"\n")
        except OSError as error:
            # A full disk must not end a long run.
            self._writes = False
            warn(
                f"{self.settings.path!r} became unwritable ({error}). Records from step "
                f"{record.step} on are lost."
            )

    def _warn(self, record: StepRecord) -> None:
        """Warns once of a loss that is not finite, and of skips at the minimum scale."""
        if is_broken(record.loss):
            if not self._warned_of_loss:
                self._warned_of_loss = True
                warn(
                    f"The loss of step {record.step} is {record.loss}, which no loss scale can "
                    "prevent. Check the data and the learning rate, and leave such batches out. "
                    f"{_EXPLAIN}"
                )
        elif not is_lowest(self._rule, record.scale):
            self._warned_of_floor = False
        elif record.skipped and not self._warned_of_floor:
            self._warned_of_floor = True
            advice = advice_at_floor(record.scale, takes_rules=self._takes_rules)
            warn(
                f"Step {record.step} was skipped at the minimum loss scale, {record.scale:g}. "
                f"{_evidence(record)} {_EXPLAIN} {advice}"
            )


def _evidence(record: StepRecord) -> str:
    if not record.nonfinite:
        return "The gradients that were not finite were not recorded."
    return f"Not finite: {', '.join(map(str, record.nonfinite[:5]))}."
