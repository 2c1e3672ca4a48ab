"""Which steps of a gradient scaler were skipped, and which parameters made them so."""

from __future__ import annotations

import weakref
from typing import Any

from lossscale.diagnostics.records import NonfiniteTensor
from lossscale.torch.grad_scaler.scale import ScaleOfScaler
from lossscale.torch.grad_scaler.steps import named, nonfinite_of
from lossscale.torch.layout import Layout


class SkipsOfScaler(ScaleOfScaler):
    """The part of a gradient scaler that tells of skipped steps."""

    _watcher: Any = None
    """Who is told of each decision: a monitor."""

    def _start_skips(self) -> None:
        self._last_step_skipped = False
        self._last_nonfinite: tuple[NonfiniteTensor, ...] = ()
        self._forget()

    def _forget(self) -> None:
        """Forgets optimizers and parameters, which a copy does not share."""
        self._skipped: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._names: dict[Any, str] | None = None
        self._layouts: weakref.WeakKeyDictionary[Any, Layout] = weakref.WeakKeyDictionary()

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last call of `step` did not apply its optimizer."""
        return self._last_step_skipped

    def last_step_skipped_of(self, optimizer: Any) -> bool:
        """Whether the last call of `step` with this optimizer did not apply it."""
        return self._skipped.get(optimizer, False)

    @property
    def steps_skipped(self) -> int:
        """How many calls of `step` did not apply their optimizer, of all optimizers together."""
        return self._steps_skipped

    def name_overflows(self, parameters: Any) -> None:
        """From now on notes which parameters make a step be skipped, for `last_nonfinite`.

        It takes time on skipped steps only.

        Args:
            parameters: A module, or (name, parameter) pairs; of a sharded model after sharding.

        Raises:
            ArgumentTypeError: If it is neither. It is a `TypeError`.
        """
        self._names = named(parameters)

    @property
    def last_nonfinite(self) -> tuple[NonfiniteTensor, ...]:
        """The gradients that made the last skipped step be skipped, if `name_overflows` was called.

        Of a sharded model each process has those of its own parts.
        """
        return self._last_nonfinite

    def _note(self, optimizer: Any, entry: dict[str, Any], skipped: bool) -> None:
        if self._watcher is not None:
            self._watcher.decided(
                optimizer.param_groups,
                scale=self._number,
                applied=not skipped,
                # What float16 gradients are divided by only in the step of the optimizer.
                divisor=getattr(optimizer, "grad_scale", None),
            )
        entry["skipped"] = self._skipped[optimizer] = self._last_step_skipped = skipped
        if skipped:
            self._steps_skipped += 1
            if self._names is not None:
                self._last_nonfinite = nonfinite_of(optimizer, self._names)
