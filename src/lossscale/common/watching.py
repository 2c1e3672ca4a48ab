"""What a monitor makes of what it reads between two steps: records, for files and alarms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lossscale.callbacks import Settings
from lossscale.common.notes import Noted, Skip
from lossscale.diagnostics.alarms import Alarms
from lossscale.diagnostics.history_header import HistoryHeader
from lossscale.diagnostics.recorder import RunRecorder
from lossscale.diagnostics.records import StepRecord
from lossscale.diagnostics.skips import skip_reason
from lossscale.rules import ScaleRule


class Status(NamedTuple):
    """What an optimizer says between two steps, as Python numbers.

    Attributes:
        step: How many steps were run, skipped ones included.
        scale: The loss scale of the next step.
        steps_skipped: How many steps were skipped.
        last_step_skipped: Whether the last one was.
    """

    step: int
    scale: float
    steps_skipped: int
    last_step_skipped: bool


class Watch:
    """The records of one optimizer, and the files and alarms that they go to.

    Args:
        rule: The rule of its loss scale.
        settings: What the monitor was asked for.
        versions: Names of packages to their versions, for the history.

    Attributes:
        recorder: Takes the records where they belong; its files have to be opened.
        last: The last record, or None.
    """

    def __init__(self, rule: ScaleRule, settings: Settings, versions: Mapping[str, str]) -> None:
        self._rule = rule
        self._histograms = settings.histograms
        self.last: StepRecord | None = None
        self.recorder = RunRecorder(
            HistoryHeader.of(rule, dict(versions)),
            lambda: Alarms(
                rule,
                on_floor=settings.on_floor,
                max_consecutive_skips=settings.max_consecutive_skips,
            ),
            path=settings.path,
            tensorboard=settings.tensorboard,
            append=settings.append,
            on_write_error=settings.on_write_error,
        )

    def sample(
        self,
        before: Status,
        status: Status,
        noted: Noted,
        loss: float | None,
        fidelity: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Records the last step, and the last skipped one before it.

        Args:
            before: What the optimizer said at the last sample.
            status: What it says now.
            noted: What was noted of the steps in between.
            loss: The loss of the last step, not scaled; None if it is not known.
            fidelity: What float16 makes of the gradients now; None if it was not measured.

        Raises:
            TrainingHaltedError: If an alarm ends training.
            RecordingError: If a file cannot be written and that is to end training.
        """
        if noted.skip is not None and before.step < noted.skip.step < status.step:
            self._record_missed_skip(noted.skip, before, status)
        self._record_last_step(noted, status, loss, fidelity or {})

    def _record_missed_skip(self, skip: Skip, before: Status, status: Status) -> None:
        """Records the last skipped step, which came between two samples."""
        if status.last_step_skipped or status.steps_skipped <= before.steps_skipped:
            return
        self._add(
            StepRecord(
                skip.step,
                skip.scale,
                skipped=True,
                reason=skip_reason(self._rule, skip.scale, None),
                nonfinite=skip.nonfinite,
                steps_skipped=status.steps_skipped,
            )
        )

    def _record_last_step(
        self,
        noted: Noted,
        status: Status,
        loss: float | None,
        fidelity: Mapping[str, Mapping[str, float]],
    ) -> None:
        skipped, skip = status.last_step_skipped, noted.skip
        histograms = noted.histograms if self._histograms else None
        self._add(
            StepRecord(
                status.step,
                noted.scale,
                skipped=skipped,
                next_scale=status.scale,
                loss=loss,
                reason=skip_reason(self._rule, noted.scale, loss) if skipped else None,
                nonfinite=skip.nonfinite if skip is not None and skip.step == status.step else (),
                steps_skipped=status.steps_skipped,
                histograms={name: found.to_dict() for name, found in (histograms or {}).items()},
                fidelity=fidelity,
            )
        )

    def _add(self, record: StepRecord) -> None:
        self.last = record
        self.recorder.add(record)
