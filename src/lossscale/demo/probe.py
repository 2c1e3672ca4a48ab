"""What the demo measures: the gradients of the first images, for any weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lossscale.diagnosis.passes import LOSS, Run
from lossscale.diagnosis.report import Report, report_on


class Probe(NamedTuple):
    """A model to look at, which is not trained.

    Attributes:
        load: Gives it weights, as the learner of its framework returns them.
        run: Computes its gradients.
        batch: What it is measured on.
        setting: What it computes with, in words.
    """

    load: Callable[[Any], None]
    run: Run
    batch: Any
    setting: str

    def gradients(self, weights: Any, scale: float = 1.0, *, half: bool = False) -> Any:
        """Returns every gradient of the scaled loss, a float32 array of shape (weights,).

        Args:
            weights: The weights.
            scale: What the loss is multiplied by, in float32.
            half: Whether to compute in float16.
        """
        import numpy as np

        self.load(weights)
        found = self.run(self.batch, scale, half)[LOSS].gradients
        return np.concatenate([gradient.ravel() for gradient in found.values()])

    def share_flushed(self, weights: Any, scale: float) -> float:
        """Returns the share of gradients that are not zero in float32, but zero in float16.

        So it also counts where not the gradient itself is too small for float16, but one that it
        is computed from.

        Args:
            weights: The weights.
            scale: The loss scale in float16.
        """
        counted = self.gradients(weights) != 0
        flushed = counted & (self.gradients(weights, scale, half=True) == 0)
        return float(flushed.sum() / max(counted.sum(), 1))

    def report(self, weights: Any) -> Report:
        """Returns the diagnosis of the model with these weights."""
        self.load(weights)
        return report_on(self.run, [self.batch], model="digits", setting=self.setting)
