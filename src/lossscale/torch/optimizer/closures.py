"""Steps with a closure, which evaluates the model and calls `backward`.

Most optimizers evaluate it once, at the beginning. Then it is evaluated here, so that the step can
still be skipped. Others evaluate it many times, such as LBFGS in its line search. They need the
gradients themselves each time, and no step can be skipped in their middle: an evaluation that
overflows is made again at a lower scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lossscale.errors import ArgumentTypeError, GradientsError
from lossscale.torch.optimizer import handing
from lossscale.torch.optimizer.judging import Verdict
from lossscale.torch.optimizer.scales import HostScales
from lossscale.torch.optimizer.step import NOTHING_SCALED, Stepping


class Closures(Stepping):
    """`step` with a closure."""

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        if not callable(closure):
            raise ArgumentTypeError(
                "`closure` must be a callable that evaluates the model, calls backward() and "
                f"returns the loss. Received: {type(closure).__name__}. A loss is not passed to "
                "step(): call scale_loss(loss).backward() before it."
            )
        if handing.demands_closure(self.inner_optimizer):
            return self._step_evaluating(closure)
        with torch.enable_grad():
            loss = closure()
        self._take_step()
        return loss

    def _step_evaluating(self, closure: Callable[[], Any]) -> Any:
        """A step of an optimizer that evaluates the closure as often as it likes."""
        loss, verdict = self._evaluate(closure)
        self._tell(verdict)
        if not verdict.applied:
            # No lower scale helps: the step would put what is not finite into the parameters.
            self._move(verdict)
            self._marks.reset()
            return loss
        first = [loss]

        def evaluated() -> Any:
            return first.pop() if first else self._evaluate(closure)[0]

        returned = handing.call(self.inner_optimizer, closure=evaluated)
        if not verdict.empty:
            self._move(verdict)
        self._marks.reset()
        return returned

    def _check_returned(self, loss: Any) -> None:
        if loss is None:
            raise ArgumentTypeError(
                f"The closure must return the loss: {type(self.inner_optimizer).__name__} looks at "
                "it. Received: None."
            )
        if self._marks.was_scaled(loss):
            raise GradientsError(
                "The closure returned the scaled loss. Return the loss itself: "
                f"{type(self.inner_optimizer).__name__} compares it with gradients that are "
                "unscaled, and with losses at other scales."
            )

    def _evaluate(self, closure: Callable[[], Any]) -> tuple[Any, Verdict]:
        """Evaluates a closure, at lower scales as long as that may help; divides the gradients.

        Returns:
            What the closure returned, and the verdict on the gradients.
        """
        scales = self._scales
        assert isinstance(scales, HostScales)
        while True:
            with torch.enable_grad():
                loss = closure()
            self._check_returned(loss)
            verdict = self._divide_in_place(NOTHING_SCALED)
            value = loss.detach() if isinstance(loss, torch.Tensor) else loss
            seen = verdict.seen
            # Nothing was seen of gradients that are not scaled, and no lower scale helps them.
            if verdict.applied or seen is None or not math.isfinite(float(value)):
                break
            before = scales.scale
            scales.move(seen)
            self._marks.reset()
            if not scales.scale < before:
                break
        if self._marks.clips and verdict.applied:
            with torch.no_grad():
                self._clip(self._gradients(), self._known_layout())
            self._marks.clips = False
        return loss, verdict
