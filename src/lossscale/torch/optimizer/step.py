"""A step: what was decided on the gradients is done, and the scale moves."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lossscale.common.user_code import stack_level
from lossscale.errors import GradientsError, LossScaleWarning
from lossscale.torch.gradients import Gradients
from lossscale.torch.optimizer import handing
from lossscale.torch.optimizer.judging import Judging, Verdict
from lossscale.torch.optimizer.marks import JUDGED, NOTHING, SCALED, UNSCALED, Marks
from lossscale.torch.optimizer.scales import HostScales

NOTHING_SCALED = (
    "step() was called, and no loss was scaled since the last one. The gradients are applied as "
    "they are, which is correct for float32 if nobody else has scaled the loss, such as a "
    "GradScaler or another LossScaleOptimizer; float16 gradients may have flushed to zero before. "
    "Pass the loss through scale_loss() of this optimizer before backward()."
)
_NOTHING_TO_UNSCALE = (
    "unscale_() was called, and no loss was scaled since the last step. The gradients stay as they "
    "are. Pass the loss through scale_loss() before backward()."
)


class Stepping(Judging):
    """`step` without a closure, and `unscale_`."""

    _marks: Marks
    _watcher: Any = None
    """Who is told of each decision: a monitor."""

    def _take_step(self) -> Any:
        """Decides on the gradients as they are now, applies or skips them, moves the scale."""
        marks = self._marks
        if marks.stage == SCALED and (quickly := self._judge_ordinary()) is not None:
            # If the optimizer raises, the gradients are divided already.
            marks.stage, marks.verdict = JUDGED, quickly
            if self._watcher is not None:
                self._tell(quickly)
            returned = self.inner_optimizer.step() if quickly.applied else None
            self._move(quickly)
            marks.reset()
            return returned
        if marks.stage == NOTHING:
            return self._step_as_given()
        if marks.stage != JUDGED:
            marks.verdict = self._judge(self._are_scaled())
            marks.stage = JUDGED
        verdict: Verdict = marks.verdict
        if marks.clips and verdict.applied is not False:
            with torch.no_grad():
                self._clip(self._gradients(), self._known_layout())
        marks.clips = False
        self._tell(verdict)
        returned = None if verdict.applied is False else self._apply(verdict)
        if not verdict.empty:
            self._move(verdict)
        marks.reset()
        return returned

    def _are_scaled(self) -> bool:
        """Whether the gradients of the parameters are those of the scaled loss."""
        if self._marks.stage != UNSCALED:
            return True
        # `get_unscaled_gradients` returns new tensors. They may have been put in the place of the
        # gradients, or copied into them; or the gradients are as they were.
        versions = {id(tensor): version for tensor, version in self._marks.divided}
        groups = self.inner_optimizer.param_groups
        given = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        as_they_were = [versions.get(id(gradient)) == gradient._version for gradient in given]
        if any(as_they_were) and not all(as_they_were):
            raise GradientsError(
                "get_unscaled_gradients() was given the gradients of these parameters, and what "
                "it returned was put into the `.grad` of some and not of others. Put it into all, "
                "or call unscale_(), which divides them where they are."
            )
        return bool(given) and all(as_they_were)

    def _apply(self, verdict: Verdict) -> Any:
        inner, divisor = self.inner_optimizer, verdict.divisor
        # Where the host has decided there is nothing left to say.
        found = verdict.found if verdict.applied is None else None
        if handing.demands_scaling(inner):
            scale = self._scales.factors(self._gradients().device).scale
            divisor = torch.ones_like(scale) if divisor is None else divisor
            found = torch.zeros_like(scale) if found is None else found
        return handing.call(inner, divisor, found)

    def _tell(self, verdict: Verdict) -> None:
        if self._watcher is None or verdict.empty:
            return
        applied = verdict.applied
        if applied is None:
            applied = not verdict.found.item()
        scales = self._scales
        scale = scales.scale if isinstance(scales, HostScales) else scales.tensor
        groups = self.inner_optimizer.param_groups
        self._watcher.decided(groups, scale=scale, applied=applied, divisor=verdict.divisor)

    def _move(self, verdict: Verdict) -> None:
        scales = self._scales
        if isinstance(scales, HostScales):
            if verdict.seen is not None:
                scales.move(verdict.seen)
            scales.count(bool(verdict.applied))
            return
        found = verdict.found
        if found is None:
            found = torch.full((), float(not verdict.applied), device=scales.home)
        if verdict.seen is not None:
            scales.move(verdict.seen)
        scales.count(found)

    def _step_as_given(self) -> Any:
        """A step whose loss nobody scaled: checkpointing makes such steps, with zero gradients."""
        given = self._gradients()
        if not self._marks.warned and any(t.any() for group in given.groups for t in group):
            self._warn(NOTHING_SCALED)
        verdict = self._looked_again(given)
        is_step = not verdict.empty and not handing.is_dummy_step(self.inner_optimizer)
        if is_step:
            self._tell(verdict)
        returned = self._apply(verdict) if verdict.applied else None
        if is_step or not verdict.applied:
            self._move(verdict)
        return returned

    def _divide_in_place(self, warning: str = _NOTHING_TO_UNSCALE) -> Verdict:
        """Divides the gradients before the step, for somebody who reads or changes them.

        Args:
            warning: What is said if no loss was scaled.
        """
        marks = self._marks
        if marks.stage == NOTHING:
            self._warn(warning)
            return self._looked_again(self._gradients())
        if marks.stage != JUDGED:
            verdict = self._judge(self._are_scaled(), in_place=True)
            if verdict.empty:
                # What comes by a later `backward` is still to be divided.
                return verdict
            marks.verdict = verdict
            marks.stage, marks.clips = JUDGED, self._clip_norm is not None
        known: Verdict = marks.verdict
        return known

    def _looked_again(self, given: Gradients) -> Verdict:
        """The verdict on gradients that are not scaled; the rule does not see it.

        If they are not finite, a lower scale would not help.
        """
        layout = self._known_layout()
        if not self._rule.checks_gradients or not (given.groups or layout.ranks):
            return Verdict(True, empty=not given.given)
        with torch.no_grad():
            return self._look(given, False, layout)._replace(seen=None)

    def _warn(self, message: str) -> None:
        if not self._marks.warned:
            self._marks.warned = True
            warnings.warn(message, LossScaleWarning, stacklevel=stack_level("torch"))
