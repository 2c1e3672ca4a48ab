"""Tracks overflows on PyTorch: the host knows which steps are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lossscale.common import overflow_tracker
from lossscale.common.overflow_tracker import CheckedStep
from lossscale.monitoring.recorder import SkippedStep
from lossscale.torch.ranks import local
from lossscale.torch.scaling import CPU, never_compiled, real_parts


class OverflowTracker(overflow_tracker.OverflowTracker):
    """Tracks overflows in Python objects."""

    def _create(self) -> None:
        self._scale: Any = 0.0
        self._step = 0
        self._skip: tuple[int, Any, list[Any]] = (0, 0.0, [])

    def count_from(self, step: int) -> None:
        """Sets the number of steps so far, which would wait if it were read from the device."""
        self._step = step

    # Compiled, it would be recompiled for each number that it writes.
    @never_compiled
    def _track(self, step: CheckedStep) -> None:
        # `step.finite` is a Python bool.
        self._step += 1
        self._scale = step.scale
        if not step.finite:
            counts = [_nonfinite(gradient) for gradient in self._unscaled_by_row(step)]
            self._skip = (self._step, step.scale, counts)

    def read(self, after: int, until: int) -> tuple[float, SkippedStep | None]:
        skip = None
        step, scale, counts = self._skip
        if after < step <= until:
            stacked = torch.stack([count.to(counts[0].device) for count in counts])
            tensors = overflow_tracker.nonfinite_tensors(self.names, np.asarray(stacked.cpu()))
            skip = SkippedStep(step, float(scale), tensors)
        return float(self._scale), skip


class LoopOverflowTracker(OverflowTracker):
    """Tracks the steps of a loop; overflows of several optimizers in one step are one skip.

    Args:
        named: Parameters and their names.
        position: Returns the number of steps before the one that is decided on.
    """

    def __init__(self, named: Mapping[Any, str], position: Callable[[], int]) -> None:
        self._position = position
        self.build(list(named), list(named.values()))

    def decided(
        self, groups: Iterable[Mapping[str, Any]], *, scale: Any, applied: bool, divisor: Any = None
    ) -> None:
        """Tracks a step after its decision, before the gradients are applied.

        Args:
            groups: The parameter groups, with the gradients in `.grad`.
            scale: The loss scale of the step.
            applied: Whether the step is applied.
            divisor: What the gradients must still be divided by; None if they are unscaled.
        """
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]

        def unscale(gradients: Sequence[Any]) -> list[Any]:
            return [g if divisor is None else g / divisor.to(g.device) for g in gradients]

        before = self._skip
        self.count_from(self._position())
        with torch.no_grad():
            gradients = [local(parameter.grad) for parameter in parameters]
            self._track(CheckedStep(gradients, parameters, unscale, applied, scale, None, True))
        self._add_to_skip(before)

    def _add_to_skip(self, before: tuple[int, Any, list[Any]]) -> None:
        """Adds the counts of another optimizer in the same step."""
        if self._skip is not before and self._skip[0] == before[0] > 0:
            counts = [one + other for one, other in zip(self._skip[2], before[2], strict=True)]
            self._skip = (*before[:2], counts)

    @property
    def last_tracked(self) -> int:
        """The number of the last step that was tracked; 0 before the first one."""
        return self._step


def _nonfinite(gradient: Any) -> Any:
    """Returns the numbers of infinite elements and of NaN, int64 of shape (2,)."""
    parts = real_parts(gradient)
    if not parts:
        return torch.zeros(2, dtype=torch.int64, device=CPU)
    return torch.stack([test(parts[0]).sum() for test in (torch.isinf, torch.isnan)])
