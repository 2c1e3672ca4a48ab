"""A monitor for loops that the user writes: told of each step, it reads the sampled ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lossscale.common.notes import Noted
from lossscale.common.probing import Probe, said_by
from lossscale.common.watching import Status, Watch
from lossscale.diagnostics.records import StepRecord
from lossscale.packages import warn

Read = Callable[[Status], "tuple[Status, Noted] | None"]
"""Waits for the device. Given the last status, returns the one now and what was noted since; None
if it is gone."""


class LoopMonitor:
    """Samples steps, and records the last one when it is closed.

    Args:
        watch: Makes and keeps the records.
        every: At which multiples of the number of a step to read, in steps.
        start: What the optimizer says before the first step.
    """

    # What measures fidelity, if anything does, and at which multiples of the number of a step.
    _probe: Probe | None = None
    _fidelity_every = 1
    _has_probed = False

    def __init__(self, watch: Watch, every: int, start: Status) -> None:
        self._watch = watch
        self._every = every
        self._before = start
        self._position = start.step
        self._is_first = True
        self._unread: tuple[Read, Any] | None = None
        watch.recorder.open()

    @property
    def last_record(self) -> StepRecord | None:
        """The last record of this monitor, or None."""
        return self._watch.last

    def close(self) -> None:
        """Records the last step, if it was not sampled, and closes the files."""
        try:
            if self._unread is not None:
                self._sample(*self._unread)
        finally:
            self._unread = None
            self._watch.recorder.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _will_sample(self, steps: int = 1) -> bool:
        """Whether the call after so many steps is sampled."""
        end = self._position + steps
        return self._is_first or end // self._every > self._position // self._every

    def _took(self, steps: int, read: Read, loss: Any) -> None:
        """Takes note of steps, and reads if it is time.

        Args:
            steps: How many were run since the last call.
            read: Reads what there is to know of them.
            loss: The loss of the last one, a scalar of the framework, or None.
        """
        sampled = self._will_sample(steps)
        self._position += steps
        if sampled:
            self._sample(read, loss)
        else:
            self._unread = read, loss

    def _sample(self, read: Read, loss: Any) -> None:
        self._unread = None
        found = read(self._before)
        if found is None:
            return
        (status, noted), before = found, self._before
        self._is_first = False
        self._before, self._position = status, status.step
        if status.step != before.step:
            number = None if loss is None else float(loss)
            self._watch.sample(before, status, noted, number, self._fidelity(before, status))

    def _fidelity(self, before: Status, status: Status) -> Mapping[str, Mapping[str, float]] | None:
        """What float16 makes of the gradients now; None where it is not measured.

        Args:
            before: What the optimizer said at the last sample.
            status: What it says now.
        """
        every = self._fidelity_every
        if self._probe is None:
            return None
        if not self._has_probed or status.step // every > before.step // every:
            self._has_probed = True
            try:
                return self._probe(status.scale)
            # Whatever an operation that does not take float16 raises, training goes on.
            except Exception as error:
                self._probe = None
                warn(f"Fidelity is not measured: the model does not run here. {said_by(error)}")
        return None
