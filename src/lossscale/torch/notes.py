"""PyTorch: the step runs on the host, which knows what it skips; tensors stay on their device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lossscale.common.notes import DecidedStep, Noted, NotesOfVariables, Skip
from lossscale.diagnostics.exponents import ExponentTable
from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.torch.exponents import count_bins, on_host
from lossscale.torch.scaling import real_parts


class Notes(NotesOfVariables):
    """What a step notes."""

    def _create(self) -> None:
        self._scale: Any = 0.0
        self._step = 0
        self._skip: tuple[int, Any, list[Any]] = (0, 0.0, [])
        self._sampled: tuple[int, dict[int, ExponentTable]] = (0, {})

    def count_from(self, step: int) -> None:
        """Counts on from a step number: to read the optimizer's would be to wait for it."""
        self._step = step

    # It writes to Python objects, and compiled code would be compiled anew for each number.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, step: DecidedStep) -> None:
        """Notes a step; `step.finite` is a Python bool."""
        self._step += 1
        self._scale = step.scale
        if not step.finite:
            counts = [_nonfinite(gradient) for gradient in self._unscaled_by_row(step)]
            self._skip = (self._step, step.scale, counts)
        if self.histograms_every is not None and self._step % self.histograms_every == 0:
            tables = {
                row: count_bins(gradient)
                for row, gradient in enumerate(self._unscaled_by_row(step))
                if real_parts(gradient)
            }
            self._sampled = (self._step, tables)

    def read(self, after: int, until: int) -> Noted:
        skip = histograms = None
        step, scale, counts = self._skip
        if after < step <= until:
            stacked = torch.stack([count.to(counts[0].device) for count in counts])
            skip = Skip(step, float(scale), self.plan.nonfinite(np.asarray(stacked.cpu())))
        step, tables = self._sampled
        if after < step <= until:
            histograms = {
                self.plan.names[row]: GradientHistogram.from_table(on_host(table))
                for row, table in tables.items()
            }
        return Noted(float(self._scale), skip, histograms)


def _nonfinite(gradient: Any) -> Any:
    """How many elements are infinite and how many are NaN, int64 of shape (2,)."""
    parts = real_parts(gradient)
    if not parts:
        return torch.zeros(2, dtype=torch.int64)
    return torch.stack([test(parts[0]).sum() for test in (torch.isinf, torch.isnan)])
