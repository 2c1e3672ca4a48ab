"""What a step of a loop notes for a monitor, where an optimizer or a scaler has decided on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lossscale.common.notes import DecidedStep
from lossscale.diagnostics.exponents import ExponentTable
from lossscale.torch.notes import Notes
from lossscale.torch.ranks import local


class LoopNotes(Notes):
    """Notes of steps by their numbers; what several optimizers do in one step is put together.

    Args:
        named: Parameters and their names.
        histograms_every: At which multiples of the step's number exponents are counted; None for
            never.
        position: Returns how many steps came before the one that is decided on.
    """

    def __init__(
        self,
        named: Mapping[Any, str],
        histograms_every: int | None,
        position: Callable[[], int],
    ) -> None:
        super().__init__(histograms_every)
        self._position = position
        dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in named]
        self.build(list(named), list(named.values()), dtypes)

    def decided(
        self, groups: Iterable[Mapping[str, Any]], *, scale: Any, applied: bool, divisor: Any = None
    ) -> None:
        """Notes what was decided, before anything is applied.

        Args:
            groups: The parameter groups, with the gradients in `.grad`.
            scale: The loss scale of the step.
            applied: Whether the step is applied.
            divisor: What the gradients still have to be divided by; None if they are not scaled.
        """
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]

        def unscale(gradients: Sequence[Any]) -> list[Any]:
            return [g if divisor is None else g / divisor.to(g.device) for g in gradients]

        before = self._skip, self._sampled
        self.count_from(self._position())
        with torch.no_grad():
            gradients = [local(parameter.grad) for parameter in parameters]
            self.note(DecidedStep(gradients, parameters, unscale, applied, scale, None, True))
        self._put_together(*before)

    def _put_together(
        self, skip: tuple[int, Any, list[Any]], sampled: tuple[int, dict[int, ExponentTable]]
    ) -> None:
        """Keeps what another optimizer has noted of the same step."""
        if self._skip is not skip and self._skip[0] == skip[0] > 0:
            counts = [one + other for one, other in zip(self._skip[2], skip[2], strict=True)]
            self._skip = (*skip[:2], counts)
        if self._sampled is not sampled and self._sampled[0] == sampled[0] > 0:
            self._sampled = (sampled[0], {**sampled[1], **self._sampled[1]})

    @property
    def noted(self) -> int:
        """The number of the last step that was noted; 0 if there is none."""
        return self._step
