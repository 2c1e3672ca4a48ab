"""PyTorch: the step runs on the host, which knows what it skips; tensors stay on their device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lossscale.diagnostics.exponents import ExponentTable
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.records import NonfiniteTensor
from lossscale.frameworks.common.notes import LastSkip, Seen, WatchBase
from lossscale.frameworks.torch.exponents import count_bins, on_host


class Watch(WatchBase):
    """What a step notes."""

    def _create(self) -> None:
        self._scale: Any = 0.0
        self._skip: tuple[int, Any] = (0, 0.0)
        self._counts: list[Any] = []
        self._step = 0
        self._sampled: dict[int, ExponentTable] = {}
        self._table_step = 0

    def follow(self, step: int) -> None:
        """Counts on from a step number: to read the optimizer's would be to wait for it."""
        self._step = step

    # It writes to Python objects, and compiled code would be compiled anew for each number.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, seen: Seen) -> None:
        """Notes a step; `seen.finite` is a Python bool."""
        self._step += 1
        self._scale = seen.scale
        if not seen.finite:
            gradients = self._by_row(seen, seen.unscale(seen.gradients))
            self._counts = [_nonfinite(gradient) for gradient in gradients]
            self._skip = (self._step, seen.scale)
        if self.histograms_every is not None and self._step % self.histograms_every == 0:
            gradients = self._by_row(seen, seen.unscale(seen.gradients))
            self._sampled = {
                row: count_bins(gradient)
                for row, gradient in enumerate(gradients)
                if _is_counted(gradient)
            }
            self._table_step = self._step

    def scale(self) -> float:
        """The loss scale that the last step was taken with; 0 before the first one."""
        return float(self._scale)

    def last_skip(self) -> LastSkip:
        """The last step that was skipped."""
        step, scale = self._skip
        return LastSkip(step, float(scale))

    def nonfinite(self) -> list[NonfiniteTensor]:
        """The gradients of that step with an infinity or a NaN."""
        if not self._counts:
            return []
        device = self._counts[0].device
        counts = torch.stack([count.to(device) for count in self._counts])
        return self._named_counts(np.asarray(counts.cpu()))

    def histogram_step(self) -> int:
        """The step whose gradients `histograms` describes; 0 before the first one."""
        return self._table_step

    def histograms(self) -> dict[str, GradientHistogram]:
        """The unscaled gradients of the last sampled step, by variable."""
        return {
            self.names[row]: GradientHistogram.from_table(on_host(table))
            for row, table in self._sampled.items()
        }


def _is_counted(gradient: Any) -> bool:
    return gradient is not None and (gradient.is_floating_point() or gradient.is_complex())


def _nonfinite(gradient: Any) -> Any:
    """How many elements are infinite and how many are NaN, int64 of shape (2,)."""
    if not _is_counted(gradient):
        return torch.zeros(2, dtype=torch.int64)
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return torch.stack([test(values).sum() for test in (torch.isinf, torch.isnan)])
