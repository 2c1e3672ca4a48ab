"""One step of one optimizer: unscale, check for overflow once, agree, decide, apply, update.

Three functions of one signature decide whether a step is skipped: by a number that the host waits
for, by a tensor on the device, or not at all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lossscale.torch import fused, gradients, ranks
from lossscale.torch.gradient_record import GradientRecord
from lossscale.torch.optimizer_list import parts_of
from lossscale.torch.scale import FirstSteps, Flag, LossScale, Multiplier
from lossscale.torch.scaling import CPU, filled, read, read_all, scalar


class StepDecision(NamedTuple):
    """The decision on the gradients of a step, before any gradient is applied.

    Attributes:
        apply: Whether they are applied; None if only the device knows.
        is_scaled: Whether a process has scaled a loss, so that the rule is updated.
        overflow: The result on the device: float32 tensor, 1 to skip and 0 to apply.
        divisor: The divisor for a fused optimizer, or None.
        empty: Whether there was no gradient, on any process.
        norm: The norm of the unscaled gradients, on the host, if it was read as well.
    """

    apply: bool | None
    is_scaled: bool = False
    overflow: Tensor | None = None
    divisor: Tensor | None = None
    empty: bool = False
    norm: Tensor | None = None

    @property
    def skipped(self) -> Flag:
        """Whether the step is skipped: a bool; `overflow` if only the device knows."""
        if self.apply is not None:
            return not self.apply
        assert self.overflow is not None
        return self.overflow

    @property
    def nobody_scaled(self) -> bool:
        """Whether there are gradients, and no process has scaled a loss."""
        return not (self.is_scaled or self.empty)


class _Found(NamedTuple):
    """What the processes have found out about the gradients of a step.

    Attributes:
        overflow: float32 scalar tensor: 1 if one overflowed, 0 if none did, -1 if there is none.
        is_scaled: Whether a process has scaled a loss.
        is_empty_here: Whether this process has no gradient.
        divisor: What the optimizer's kernel will divide them by; None if they are unscaled.
        norm: Their norm, if the host is to wait for it as well.
    """

    overflow: Tensor
    is_scaled: bool
    is_empty_here: bool
    divisor: Tensor | None
    norm: Tensor | None


class Engine:
    """Loss scaling of the gradients of one optimizer.

    Args:
        inner: The optimizer.
        scale: The loss scale.
        clip_norm: The largest norm of the unscaled gradients, or None.
        process_group: As `ranks.groups_of` takes it.

    Attributes:
        rule: The rule that moves the loss scale.
        record: The state of its gradients.
    """

    def __init__(
        self,
        inner: Optimizer,
        scale: LossScale,
        clip_norm: float | None = None,
        process_group: ranks.Groups = None,
    ) -> None:
        self.inner, self.scale, self.rule, self.clip_norm = inner, scale, scale.rule, clip_norm
        self.record = GradientRecord(inner, scale, process_group)
        self._first_steps = FirstSteps()

    # --- Decide -------------------------------------------------------------------------------

    @torch.no_grad()
    def decide(self, *, in_place: bool = False) -> StepDecision:
        """Unscales the gradients if they are scaled, and decides.

        If no loss was scaled on this process, another may have scaled it, such as the last stage
        of a pipeline. If none has, the rule does not see the step.

        Args:
            in_place: Whether user code reads them before the step: then they are divided here, and
                not clipped.
        """
        record, info = self.record, self.record.info
        self._first_steps.check(info.parameters)
        first = info.first_gradient()
        if first is None and not info.groups:
            # Other code may have cleared gradients that have overflowed.
            record.settle()
            left_out = self.decision_if_left_out()
            is_skipped = left_out is not None and bool(left_out.skipped)
            return StepDecision(not is_skipped, is_skipped, empty=not is_skipped)
        clips = bool(self.clip_norm) and not in_place
        # The number is forgotten when the gradients are unscaled.
        is_alone, multiplier = record.is_alone(), record.multiplier or self.scale.multiplier
        divisor = None
        if first is not None and is_alone and not in_place and self._kernel_can_divide():
            divisor = multiplier.scale_on(first.device)
        is_scaled = not record.no_loss_scaled()
        self._unscale(divisor)
        overflow = self._overflow(divisor, multiplier, first is None)
        overflow, is_scaled = self._agreed(overflow, multiplier, is_scaled, first is None)
        norm = None
        if clips and divisor is None and not (info.groups or self.scale.on_device):
            norm = gradients.grad_norm(gradients.collect(info), info)
        found = _Found(overflow, is_scaled, first is None, divisor, norm)
        if self.scale.on_device:
            decision = self._decide_on_device(found)
        elif self.rule.checks_gradients:
            decision = self._decide_on_host(found)
        else:
            decision = self._decide_unchecked(found)
        return self.clipped(decision) if clips else decision

    def _kernel_can_divide(self) -> bool:
        """Whether the optimizer's kernel is to divide the gradients, which then stay scaled."""
        # A check divides them in the same pass, except for float16, which would flush to 0.
        is_checked = self.rule.checks_gradients or self.clip_norm or self.scale.on_device
        if is_checked and not self.record.info.has_half:
            return False
        # A kernel must not change one that is part of a graph.
        grads = self.record.info.gradients()
        return not gradients.have_graph(grads) and fused.can_unscale(self.inner)

    def _unscale(self, divisor: Tensor | None) -> None:
        """Divides the gradients, unless a kernel will by a divisor."""
        record = self.record
        if divisor is None:
            record.settle()
            return
        if not self.rule.checks_gradients:
            # The kernel would divide twice what shares memory.
            gradients.collect(record.info, allow_float16=True)
        record.release()

    def _overflow(self, divisor: Tensor | None, multiplier: Multiplier, is_empty: bool) -> Tensor:
        """Whether any gradient overflowed: float32 scalar tensor, 1 or 0. No number is changed.

        Args:
            divisor: What the optimizer's kernel will divide them by, or None.
            multiplier: The `Multiplier` that has this number.
            is_empty: Whether this process has no gradient.
        """
        info, checked, by_device = self.record.info, self.record.last_check, {}
        if is_empty and not self.record.has_own_loss:
            # Another optimizer's loss has left gradients, which were cleared.
            checked = None
        if checked is not None and checked.covers(info):
            return checked.overflow
        if self.rule.checks_gradients:
            allows = divisor is not None or checked is not None
            given = gradients.collect(info, allow_float16=allows)
            if divisor is not None and multiplier.may_be_below_one():
                # With a scale below 1 unscaling may overflow what is finite.
                by_device = gradients.check_quotients(given, multiplier.scale_on)
            else:
                by_device = gradients.check(given)
        here = gradients.any_overflow(by_device.values())
        if checked is None:
            return here
        return torch.maximum(checked.overflow, here.to(checked.overflow.device))

    def _agreed(
        self, overflow: Tensor, multiplier: Multiplier, is_scaled: bool, is_empty: bool
    ) -> tuple[Tensor, bool]:
        """What all processes have found: an overflow, as in `_Found`, and whether one scaled."""
        record, info = self.record, self.record.info
        # Processes of a given group may run different code, but send the same messages.
        if not info.groups or not (self.rule.checks_gradients or info.is_given):
            return overflow, is_scaled
        overflow, somebody_scaled = ranks.agreed(overflow, not is_empty, is_scaled, info.groups)
        # Only a process that scaled no loss has to wait for those of others.
        if is_scaled or not bool(somebody_scaled):
            return overflow, is_scaled
        record.hold(multiplier)
        record.settle()
        return overflow, True

    def _decide_on_host(self, found: _Found) -> StepDecision:
        """By a number, for which the host waits once."""
        overflow, norm = found.overflow, found.norm
        if norm is not None:
            overflow, norm = read_all(torch.stack([overflow.to(norm), norm]))
        number = read(overflow)
        applied, empty = not number > 0, number < 0
        return StepDecision(applied, found.is_scaled, None, found.divisor, empty, norm)

    def _decide_on_device(self, found: _Found) -> StepDecision:
        """By a tensor that a fused kernel reads."""
        info = self.record.info
        overflow = found.overflow.to(info.device)
        if self.rule.checks_gradients and info.groups:
            # A process with a gradient knows that the step is not empty.
            if found.is_empty_here and overflow.item() < 0:
                return StepDecision(True, empty=True)
            overflow = overflow.clamp(min=0.0)
        # Loaded settings may have turned off the fused kernel.
        waits = fused.makes_state(parts_of(self.inner)) or not fused.can_skip(self.inner)
        applied = not overflow.item() if waits else None
        return StepDecision(applied, found.is_scaled, overflow, found.divisor)

    def _decide_unchecked(self, found: _Found) -> StepDecision:
        """A fixed scale applies what it gets."""
        norm = found.norm
        if norm is not None:
            norm = scalar(read(norm), CPU, norm.dtype)
        return StepDecision(True, found.is_scaled, divisor=found.divisor, norm=norm)

    @torch.no_grad()
    def clipped(self, decision: StepDecision) -> StepDecision:
        """Clips the gradients of a step, or changes what a kernel is still to divide them by."""
        if not self.clip_norm or decision.apply is False or decision.empty:
            return decision
        info, divisor, norm = self.record.info, decision.divisor, decision.norm
        given = gradients.collect(info, allow_float16=divisor is not None)
        if not (given.dense_groups or info.groups):
            return decision
        if norm is None:
            # Of float16 it would overflow in float16.
            norm = gradients.grad_norm(given, info, None if divisor is None else torch.float32)
        # The squares of finite elements may overflow, but not those of float16 in float32.
        # With several processes all take the same way.
        is_half = all(group[0].dtype == torch.float16 for group in given.dense_groups)
        can_overflow = bool(info.groups) or not is_half
        if can_overflow and not self.scale.on_device and norm.isinf():
            norm = gradients.grad_norm(given, info, torch.float64)
        if divisor is None:
            factor = gradients.coefficient(norm, self.clip_norm)
            gradients.unscale_(given, filled(factor) if factor.device == CPU else factor.to)
            return decision
        coefficient = gradients.coefficient(norm.to(divisor.device) / divisor, self.clip_norm)
        return decision._replace(divisor=(divisor / coefficient).to(torch.float32))

    # --- Act ----------------------------------------------------------------------------------

    def apply(self, decision: StepDecision, *args: Any, **more: Any) -> Any:
        """Steps the optimizer, unless it is to be skipped; returns what it returns."""
        record, info = self.record, self.record.info
        is_empty = decision.empty or (
            not info.groups and info.first_gradient() is None and not bool(decision.skipped)
        )
        self._first_steps.made(self.inner, is_empty, record.has_own_loss or record.is_lost)
        if decision.apply is False:
            return None
        inner, divisor = self.inner, decision.divisor
        # After a decision of the host, the kernel needs no flag.
        overflow = decision.overflow if decision.apply is None else None
        if fused.expects_attributes(inner):
            device = info.device
            divisor = scalar(1.0, device) if divisor is None else divisor
            overflow = scalar(0.0, device) if overflow is None else overflow
        if divisor is None and overflow is None:
            return inner.step(*args, **more)
        with fused.attributes(list(filter(fused.can_skip, parts_of(inner))), divisor, overflow):
            return inner.step(*args, **more)

    def decision_if_left_out(self) -> StepDecision | None:
        """The decision on checked gradients that are cleared without a step; None if unknown."""
        record, info = self.record, self.record.info
        if record.decision is not None or record.last_check is None:
            return record.decision
        if info.is_given or not record.has_own_loss:
            # Other processes may leave nothing out. And in a GAN the generator's loss reaches the
            # discriminator, which clears those gradients.
            return None
        overflow = record.last_check.overflow
        if info.groups:
            overflow, _ = ranks.agreed(overflow, True, True, info.groups)
        return StepDecision(None, True, overflow)

    def update(self, decision: StepDecision) -> None:
        """Updates the scale and counts the step."""
        skipped: Flag = not decision.apply
        if self.scale.on_device:
            overflow, device = decision.overflow, self.record.info.device
            skipped = scalar(float(skipped), device) if overflow is None else overflow
        if decision.is_scaled:
            self.scale.update(skipped)
        self.scale.count(skipped)
