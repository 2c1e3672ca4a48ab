"""Counts of steps: those that were skipped, without a wait for the device, and empty ones."""

from __future__ import annotations

from typing import Any

import torch

from lossscale.packages import warn

_MOST_FLAGS = 100
"""After how many flags their sum replaces them."""


_NO_GRADIENTS = 10
"""After how many steps without any gradient a warning comes."""


class FirstSteps:
    """Warns of an optimizer that never has any gradient."""

    def __init__(self) -> None:
        self.without: int | None = 0

    def made(self, inner: Any, empty: bool) -> None:
        """Counts a step without any gradient; with one, all is well."""
        if self.without is None or not empty:
            self.without = None
            return
        self.without += 1
        if self.without == _NO_GRADIENTS:
            self.without = None
            warn(
                f"No parameter of {type(inner).__name__} has had a gradient in "
                f"{_NO_GRADIENTS} steps, so nothing trains. Its parameters may belong to another "
                "model than the one that computes the loss. Make the optimizer after the model is "
                "moved, wrapped or replaced, with that model's parameters."
            )


class SkipCount:
    """Number of steps and of skipped steps; the host waits only when it reads the latter.

    Args:
        skipped: Number of skipped steps so far.
    """

    def __init__(self, skipped: int = 0) -> None:
        self.made, self._skipped, self._last = 0, skipped, False
        self._flags: list[Any] = []

    def add(self, flag: Any) -> None:
        """Counts a step; `flag` is a bool, or a float32 scalar tensor, 1 if it is skipped."""
        self.made, self._last = self.made + 1, flag
        if isinstance(flag, bool):
            self._skipped += flag
            return
        self._flags.append(flag)
        if len(self._flags) > _MOST_FLAGS:
            self._flags = [self._sum()]

    def _sum(self) -> Any:
        return torch.stack([flag.to(self._flags[0].device) for flag in self._flags]).sum()

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        if self._flags:
            self._skipped += int(self._sum())
            self._flags = []
        return self._skipped

    @property
    def last_skipped(self) -> bool:
        """Whether the last step was skipped."""
        self._last = bool(self._last)
        return self._last
