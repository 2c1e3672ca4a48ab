"""Counts of steps: those that were skipped, without a wait for the device, and empty ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lossscale.errors import UnsupportedError
from lossscale.packages import warn
from lossscale.torch.scaling import is_captured

_MOST_FLAGS = 100
"""After how many flags their sum replaces them."""


_NO_GRADIENTS = 10
"""After how many steps without any gradient a warning comes."""


class FirstSteps:
    """Warns of an optimizer that never has any gradient, and refuses one that reads others."""

    def __init__(self) -> None:
        self.without: int | None = 0

    def check(self, parameters: Iterable[Any]) -> None:
        """Checks, before a first step, that the optimizer reads `.grad`.

        Raises:
            UnsupportedError: If it is one of Opacus, which reads `grad_sample`.
        """
        if self.without is not None and any(hasattr(p, "grad_sample") for p in parameters):
            raise UnsupportedError(
                "An optimizer of Opacus reads `grad_sample`, which stays multiplied by the loss "
                "scale. Use it without a LossScaleOptimizer, in float32 or bfloat16."
            )

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
    """Number of steps and of skipped steps; the host waits only when it reads them.

    Args:
        skipped: Number of skipped steps so far.
    """

    def __init__(self, skipped: int = 0) -> None:
        self._made, self._skipped, self._last = 0, skipped, False
        self._flags: list[Any] = []
        self._replayed: Any = None

    def add(self, flag: Any) -> None:
        """Counts a step; `flag` is a bool, or a float32 scalar tensor, 1 if it is skipped."""
        self._last = flag
        if isinstance(flag, bool):
            self._made, self._skipped = self._made + 1, self._skipped + flag
            return
        if is_captured(flag):
            # Each replay counts. What a graph allocates would be 0 again at each.
            if self._replayed is not None:
                self._replayed += torch.stack([torch.ones_like(flag), flag])
            return
        if flag.is_cuda and self._replayed is None:
            self._replayed = torch.zeros(2, device=flag.device)
        self._made += 1
        self._flags.append(flag)
        if len(self._flags) > _MOST_FLAGS:
            self._flags = [self._sum()]

    def _sum(self) -> Any:
        return torch.stack([flag.to(self._flags[0].device) for flag in self._flags]).sum()

    def read(self) -> tuple[int, int]:
        """Returns the numbers of steps and of skipped steps; waits for the device once."""
        if self._replayed is not None:
            # A graph may have been replayed.
            if self._flags:
                self._replayed[1] += self._sum()
            made, skipped = map(int, self._replayed.tolist())
            self._replayed.zero_()
        else:
            made, skipped = 0, int(self._sum()) if self._flags else 0
        self._made, self._skipped, self._flags = self._made + made, self._skipped + skipped, []
        return self._made, self._skipped

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        return self.read()[1]

    @property
    def last_skipped(self) -> bool:
        """Whether the last step was skipped."""
        # A replay writes into the flag.
        return bool(self._last)
