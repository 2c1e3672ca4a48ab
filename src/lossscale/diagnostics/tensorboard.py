"""Records of training steps as scalars, histograms and texts for TensorBoard."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.records import StepRecord
from lossscale.packages import require

_FLUSH_SECONDS = 5


def check_installed() -> None:
    """Raises unless the package that writes for TensorBoard is there.

    Raises:
        MissingPackageError: If it is not; the message says how to install it. It is an
            `ImportError`.
    """
    require("tensorboardX", purpose="Writing for TensorBoard")


class TensorBoardWriter:
    """Writes records into a folder that TensorBoard shows.

    The tags are `loss_scale/scale`, `loss_scale/steps_skipped`, `loss_scale/loss`, and for each
    variable `log2_gradient/NAME`: how many elements of its gradient have which power of two.
    Skipped steps are texts, `loss_scale/skipped`. Where fidelity was measured, `fidelity_lost/NAME`
    and `fidelity_error/NAME` say for each variable what share float16 loses, and how wrong it is.

    Args:
        folder: Where to write. It is made if it is not there; each writer adds a file.

    Raises:
        MissingPackageError: If tensorboardX is not installed. It is an `ImportError`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_installed()
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
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"loss_scale/{name}", value, record.step)
        if record.skipped:
            tensors = ", ".join(map(str, record.nonfinite)) or "tensors not known"
            self._writer.add_text(
                "loss_scale/skipped", f"step {record.step}: {record.reason}; {tensors}", record.step
            )
        for name, found in record.fidelity.items():
            for key in ("lost", "error"):
                self._writer.add_scalar(f"fidelity_{key}/{name}", found[key], record.step)
        for name, described in record.histograms.items():
            self._append_histogram(name, GradientHistogram.from_dict(dict(described)), record.step)

    def _append_histogram(self, name: str, histogram: GradientHistogram, step: int) -> None:
        bins = histogram.bins
        if not bins:
            return
        lowest, highest = bins[0].exponent, bins[-1].exponent + 1
        counts = dict.fromkeys(range(lowest, highest), 0)
        counts.update({bin.exponent: bin.elements for bin in bins})
        # Of the logarithms, by the middle of each bin.
        middles = [(exponent + 0.5, count) for exponent, count in counts.items()]
        self._writer.add_histogram_raw(
            f"log2_gradient/{name}",
            min=lowest,
            max=highest,
            num=histogram.nonzeros,
            sum=sum(middle * count for middle, count in middles),
            sum_squares=sum(middle**2 * count for middle, count in middles),
            # An empty bucket in front: TensorBoard takes the first one to begin at minus infinity.
            bucket_limits=[lowest, *(exponent + 1 for exponent in counts)],
            bucket_counts=[0, *counts.values()],
            global_step=step,
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
