"""Records of training steps as scalars and texts for TensorBoard."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

from lossscale.monitoring.record import StepRecord
from lossscale.packages import require

_FLUSH_SECONDS = 5


class TensorBoardWriter:
    """Writes records into a folder that TensorBoard shows.

    The tags are `loss_scale/scale`, `loss_scale/steps_skipped`, `loss_scale/loss`, and
    `loss_scale/worst_error` where it was measured. Skipped steps are texts, `loss_scale/skipped`.

    Args:
        folder: Where to write. It is made if it is not there; each writer adds a file.

    Raises:
        MissingPackageError: If tensorboardX is not installed. It is an `ImportError`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require("tensorboardX", purpose="Writing for TensorBoard")
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(os.fspath(folder), flush_secs=_FLUSH_SECONDS)
        # There is no public way to ask whether it still writes.
        events = self._writer.file_writer.event_writer
        self._queue, self._thread = events._event_queue, events._worker

    def append(self, record: StepRecord) -> None:
        """Writes one record.

        Raises:
            OSError: If the records before could not be written.
        """
        # The thread that writes ends by an error of its own, and its queue would soon block.
        if not self._thread.is_alive():
            raise OSError(errno.EIO, "what was recorded before could not be written")
        scalars = {
            "scale": record.scale,
            "steps_skipped": record.steps_skipped,
            "loss": record.loss,
            "worst_error": None if record.wrong is None else record.wrong[1],
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"loss_scale/{name}", value, record.step)
        if record.skipped:
            tensors = ", ".join(map(str, record.nonfinite)) or "tensors not known"
            self._writer.add_text(
                "loss_scale/skipped", f"step {record.step}: {record.reason}; {tensors}", record.step
            )

    def flush(self) -> None:
        """Hands all that was written to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file. Closing it again does nothing."""
        self._writer.close()

    def discard(self) -> None:
        """Leaves a file that cannot be written, and drops what could not be written to it."""
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                self.close()
        else:
            # Nobody empties the queue any more: closing would wait for that, and so would exit.
            self._queue.cancel_join_thread()
