"""The monitor: makes a record of each step that it is shown, writes it, and says what is wrong."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lossscale.errors import (
    ArgumentError,
    LossScaleError,
    RecordingError,
    TrainingHaltedError,
    first_line,
)
from lossscale.monitoring.alarms import Alarms
from lossscale.monitoring.history import HistoryHeader, HistoryWriter
from lossscale.monitoring.record import NonfiniteTensor, StepRecord
from lossscale.monitoring.settings import MonitorSettings
from lossscale.monitoring.skips import skip_reason
from lossscale.monitoring.tensorboard import TensorBoardWriter
from lossscale.packages import warn
from lossscale.rules import ScaleRule

if TYPE_CHECKING:
    from lossscale.diagnosis.passes import Run


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
        batch: The batch of the last step; None if it is not known.
    """

    step: int
    scale: float
    next_scale: float
    steps_skipped: int
    skipped: bool
    last_skip: Skip | None = None
    loss: float | None = None
    batch: Any = None


class Monitor:
    """Records what the loss scale of a run does, and warns when something is wrong.

    What frameworks and trainers show it is in `lossscale.torch.Monitor`, `lossscale.optax.Monitor`
    and `lossscale.LossScaleMonitor`. A loop of another kind calls `observe` on the steps that it
    samples, and `close` at the end.

    Stats of an earlier step than the ones before mean that the run has gone back to a checkpoint.
    The files go on then as those of a run that was resumed, and the alarms start anew. A file that
    cannot be written any more is given up, with one warning.

    Args:
        settings: What it is asked for.
        rule: The rule of the loss scale.
        versions: Names of packages to their versions, for the history.
        new_run: Returns what computes passes of the model, or None where there is no model to look
            at now. Called when it is needed first, and again after `forget_run`. None for never.

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

    def __init__(
        self,
        settings: MonitorSettings,
        rule: ScaleRule,
        versions: Mapping[str, str] | None = None,
        new_run: Callable[[], Run] | None = None,
    ) -> None:
        self.settings = settings
        self.last_record: StepRecord | None = None
        self._rule = rule
        self._header = HistoryHeader.of(rule, versions)
        self._new_run = new_run
        self._run: Run | None = None
        # What has failed once is not tried on each step.
        self._looks = self._measures = new_run is not None
        self._alarms = Alarms(rule, settings, self._look)
        self._before: StepStats | None = None
        self._stats: StepStats | None = None
        self._measured = 0
        self._append = settings.append
        # What makes a writer by where it writes; without those given up.
        self._targets: dict[str, Callable[[], Any]] = {}
        if settings.path is not None:
            self._targets[f"the history {settings.path!r}"] = lambda: HistoryWriter(
                settings.path, self._header, append=self._append
            )
        if settings.tensorboard is not None:
            folder = os.fspath(settings.tensorboard)
            self._targets[f"the folder for TensorBoard {folder!r}"] = lambda: TensorBoardWriter(
                folder
            )
        self._writers: dict[str, Any] = {}
        # A run that ends by an exception closes nothing by itself.
        self._finalizer = weakref.finalize(self, _discard, self._writers)

    def open(self) -> None:
        """Opens the files. Opened again it goes on in the same history.

        Raises:
            ArgumentError: If the history exists and `append` is False, or is no history. It is a
                `ValueError`.
            RecordingError: If a file cannot be written. It is an `OSError`.
        """
        self.close()
        for target in tuple(self._targets):
            try:
                self._open(target)
            except OSError as error:
                _discard(self._writers)
                raise RecordingError(
                    f"The run cannot be recorded in {target}: {_reason(error)}."
                ) from error

    def observe(self, stats: StepStats) -> None:
        """Records a step, and the last skipped one before it, and says what is wrong.

        Args:
            stats: What the optimizer says after the step.

        Raises:
            TrainingHaltedError: If an alarm ends training. All files are closed before that.
            RecordingError: If a file cannot be written and that is to end training. It is an
                `OSError`.
        """
        before, self._before = self._before, stats
        self._stats = stats
        if self.last_record is not None and stats.step <= self.last_record.step:
            before = None
            self._alarms = Alarms(self._rule, self.settings, self._look)
            self._measured = 0
            self._looks = self._measures = self._new_run is not None
            self.close()
            self._for_each(self._targets, self._open)
        skip = stats.last_skip
        if skip is not None and skip.step < stats.step:
            is_counted = before is None or stats.steps_skipped > before.steps_skipped
            if is_counted and not stats.skipped and (before is None or before.step < skip.step):
                reason = skip_reason(self._rule, skip.scale, None)
                self._add(
                    StepRecord(
                        skip.step,
                        skip.scale,
                        True,
                        reason=reason,
                        nonfinite=skip.nonfinite,
                        steps_skipped=stats.steps_skipped,
                    )
                )
            skip = None
        self._add(
            StepRecord(
                stats.step,
                stats.scale,
                stats.skipped,
                next_scale=stats.next_scale,
                loss=stats.loss,
                reason=(
                    skip_reason(self._rule, stats.scale, stats.loss) if stats.skipped else None
                ),
                nonfinite=skip.nonfinite if skip is not None and stats.skipped else (),
                steps_skipped=stats.steps_skipped,
                wrong=self._measure(stats),
            )
        )

    def wrong_at(self) -> tuple[str, float] | None:
        """Returns the gradient that is wrong by most at the scale in use, measured on `data`.

        Returns:
            Its name, and its error as a share of it: what a better scale would mend. None before
            the first step.

        Raises:
            ArgumentError: If there is no `data`, or no `loss_fn` where one is needed, or if the
                loss on `data` or a gradient is not finite in float32 already.
        """
        if self._new_run is None or self.settings.data is None:
            raise ArgumentError(
                "`wrong_at` measures on a batch: give the monitor `data`, and `loss_fn` as "
                "diagnose takes it."
            )
        if self._stats is None or (run := self._current_run()) is None:
            return None
        import numpy as np

        from lossscale.diagnosis.measurement import wrong_at

        # An overflow is what is looked for.
        with np.errstate(all="ignore"):
            found = wrong_at(run, self.settings.data, self._stats.next_scale)
        return max(found.values(), key=lambda worst: worst[1])

    def flush(self) -> None:
        """Hands all that was written to the operating system."""
        # A history keeps nothing back.
        self._for_each(
            [name for name, found in self._writers.items() if isinstance(found, TensorBoardWriter)],
            lambda target: self._writers[target].flush(),
        )

    def close(self) -> None:
        """Closes the files. Closing them again does nothing."""
        self._for_each(self._writers, lambda target: self._writers[target].close())
        self._writers.clear()

    # --- Passes of the model --------------------------------------------------------------------

    def forget_run(self) -> None:
        """Has passes computed anew, of a model that has other variables now."""
        self._run = None

    def _current_run(self) -> Run | None:
        if self._run is None and self._new_run is not None:
            self._run = self._new_run()
        return self._run

    def _look(self, record: StepRecord) -> str:
        stats, data = self._stats, self.settings.data
        batch = None if stats is None else stats.batch
        if not self._looks or (batch is None and data is None):
            return ""
        from lossscale.monitoring.origin import origin

        where = f"the batch of step {record.step}" if batch is not None else "the batch `data`"
        try:
            run = self._current_run()
            found = run and origin(run, data if batch is None else batch, record.scale)
        # Whatever an operation raises, training goes on.
        except Exception as error:
            self._looks = False
            warn(
                "Where steps overflow is not looked for any more, since a pass over "
                f"{where} failed: {_said(error)}. Give a batch as training has it; the model must "
                "run in float16 here."
            )
            return ""
        if not found:
            return ""
        more = (
            "Look at the data of this batch, and at what this operation is given."
            if "float32 too" in found
            else "Keep this operation in float32, make what it is given smaller, or train in "
            "bfloat16."
        )
        missing = "" if batch is not None else ", not that of the skipped step"
        return f"{found}, on {where}{missing}. {more}"

    def _measure(self, stats: StepStats) -> tuple[str, float] | None:
        every = self.settings.measure_every
        if every is None or not self._measures:
            return None
        if self._measured and stats.step // every <= self._measured // every:
            return None
        self._measured = stats.step
        try:
            found = self.wrong_at()
        # Whatever an operation that does not take float16 raises, training goes on.
        except Exception as error:
            self._measures = False
            warn(
                "Gradients are not measured any more, since a pass over the batch `data` failed: "
                f"{_said(error)}. Give a batch as training has it, of finite numbers; the model "
                "must run in float16 here."
            )
            return None
        return found if found is not None and found[0] else None

    # --- Files ----------------------------------------------------------------------------------

    def _add(self, record: StepRecord) -> None:
        alarms = self._alarms.observe(record)
        said = tuple((str(alarm.kind), alarm.message) for alarm in alarms)
        self.last_record = dataclasses.replace(record, alarms=said)
        self._for_each(self._writers, lambda target: self._writers[target].append(self.last_record))
        for alarm in alarms:
            if alarm.is_fatal:
                self.close()
                raise TrainingHaltedError(alarm.message)
            warn(alarm.message)

    def _open(self, target: str) -> None:
        self._writers[target] = self._targets[target]()
        # From now on the history is one that exists.
        self._append = self._append or isinstance(self._writers[target], HistoryWriter)

    def _for_each(self, targets: Iterable[str], act: Callable[[str], None]) -> None:
        """Does something to some targets, and gives up those that it fails for."""
        for target in tuple(targets):
            try:
                act(target)
            except OSError as error:
                del self._targets[target]
                if target in self._writers:
                    self._writers.pop(target).discard()
                step = 0 if self.last_record is None else self.last_record.step
                message = (
                    f"{target[0].upper()}{target[1:]} cannot be written any more: "
                    f"{_reason(error)}. From step {step} on, the run is not recorded there."
                )
                if self.settings.on_write_error == "raise":
                    self.close()
                    raise RecordingError(f"{message} (on_write_error='raise')") from error
                warn(f"{message} Training goes on.")


def _said(error: Exception) -> str:
    said = first_line(error)
    own = isinstance(error, LossScaleError) or said == type(error).__name__
    return said if own else f"{type(error).__name__}: {said}"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _discard(writers: dict[str, Any]) -> None:
    while writers:
        writers.popitem()[1].discard()
