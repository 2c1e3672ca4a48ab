"""One step of one optimizer: unscale, check for overflow once, agree, apply or skip, update.

`Engine.decide` decides whether a step is skipped. The host waits for one number, unless the loss
scale is on the device.
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
    """

    apply: bool | None
    is_scaled: bool = False
    overflow: Tensor | None = None
    divisor: Tensor | None = None
    empty: bool = False

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


class Engine:
    """Loss scaling of the gradients of one optimizer.

    Args:
        inner: The optimizer.
        scale: The loss scale.
        clip_norm: The largest norm of the unscaled gradients, or None.
        process_group: As `ranks.groups_of` takes it.
        factor: What multiplies the gradients of a copy; 0 if there are none.

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
        factor: float = 0.0,
    ) -> None:
        self.inner, self.scale, self.rule, self.clip_norm = inner, scale, scale.rule, clip_norm
        self.record = GradientRecord(inner, scale, process_group, factor)
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
        record, info = self.record, self.record.info()
        record.check_no_new_group()
        self._first_steps.check(info.parameters)
        is_alone, first, groups = record.is_alone(), info.first_gradient(), info.groups
        if first is None or not is_alone:
            record.settle()
        if first is None and not groups:
            # Other code may have cleared gradients that have overflowed.
            cleared = self.decision_if_left_out()
            is_skipped = cleared is not None and bool(cleared.skipped)
            return StepDecision(not is_skipped, is_skipped, empty=not is_skipped)
        is_scaled = not record.no_loss_scaled()
        multiplier = record.multiplier or self.scale.multiplier
        clips = bool(self.clip_norm) and not in_place
        unchecked = not (self.rule.checks_gradients or clips or self.scale.on_device)
        # A check divides them in the same pass, except for float16, which would flush to 0.
        wants_kernel = not in_place and (unchecked or info.has_half)
        divisor = None
        if is_alone and wants_kernel and first is not None and self._kernel_can_divide():
            divisor = multiplier.scale_on(first.device)
            if not self.rule.checks_gradients and not gradients.lie_as_before(info):
                # The kernel would divide twice what shares memory.
                gradients.collect(info, allow_float16=True)
            record.release()
            if unchecked and not groups:
                return StepDecision(True, is_scaled=True, divisor=divisor)
        else:
            record.settle()
        overflow = self._overflow(divisor, multiplier)
        somebody_scaled = is_scaled
        # Processes of a given group may run different code, but send the same messages.
        if groups and (self.rule.checks_gradients or info.is_given):
            overflow, flag = ranks.agreed(overflow, first is not None, is_scaled, groups)
            # Only a process that scaled no loss has to wait for those of others.
            somebody_scaled = is_scaled or bool(flag)
        if somebody_scaled and not is_scaled:
            record.hold(multiplier)
            record.settle()
        norm = None
        if clips and divisor is None and not (groups or self.scale.on_device):
            overflow, norm = self._read_with_norm(overflow)
        decision = self._read(overflow, divisor, has_gradients=first is not None)
        if not somebody_scaled:
            decision = decision._replace(is_scaled=False)
        return self.clipped(decision, norm) if clips else decision

    def _kernel_can_divide(self) -> bool:
        """Whether the optimizer's kernel may divide the gradients, which then stay scaled."""
        # A kernel must not change one that is part of a graph.
        grads = self.record.last_info.gradients()
        return not gradients.have_graph(grads) and fused.can_unscale(self.inner)

    def _overflow(self, divisor: Tensor | None, multiplier: Multiplier) -> Tensor:
        """Whether any gradient overflowed: float32 scalar tensor, 1 or 0. No number is changed.

        Args:
            divisor: What the optimizer's kernel will divide them by, or None.
            multiplier: The `Multiplier` that has this number.
        """
        info, checked, by_device = self.record.last_info, self.record.last_check, {}
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

    def _read(
        self, overflow: Tensor, divisor: Tensor | None, *, has_gradients: bool
    ) -> StepDecision:
        """Decides by what all processes have found."""
        info = self.record.last_info
        if self.scale.on_device:
            overflow = overflow.to(info.device)
            if self.rule.checks_gradients and info.groups:
                # A process with a gradient knows that the step is not empty.
                if not has_gradients and overflow.item() < 0:
                    return StepDecision(True, empty=True)
                overflow = overflow.clamp(min=0.0)
            # Loaded settings may have turned off the fused kernel.
            waits = fused.makes_state(parts_of(self.inner)) or not fused.can_skip(self.inner)
            applied = not overflow.item() if waits else None
            return StepDecision(applied, True, overflow, divisor)
        number = read(overflow) if self.rule.checks_gradients else 0.0
        return StepDecision(not number > 0, True, divisor=divisor, empty=bool(number < 0))

    def _read_with_norm(self, overflow: Tensor) -> tuple[Tensor, Tensor]:
        """Whether gradients overflowed, and their norm, both on the host, which waits once."""
        info = self.record.last_info
        norm = gradients.grad_norm(gradients.collect(info), info)
        if not self.rule.checks_gradients:
            return overflow, scalar(read(norm), CPU, norm.dtype)
        on_host = read_all(torch.stack([overflow.to(norm), norm]))
        return on_host[0], on_host[1]

    @torch.no_grad()
    def clipped(self, decision: StepDecision, norm: Tensor | None = None) -> StepDecision:
        """Clips the gradients of a step, or changes what a kernel is still to divide them by.

        Args:
            decision: The decision on the step.
            norm: The norm of the unscaled gradients, on the host, if it is known.
        """
        if not self.clip_norm or decision.apply is False or decision.empty:
            return decision
        info, divisor = self.record.info(), decision.divisor
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
        is_scaled = self.record.has_own_loss or self.record.is_lost
        self._first_steps.made(self.inner, decision.empty, is_scaled)
        if decision.apply is False:
            return None
        inner, divisor = self.inner, decision.divisor
        # After a decision of the host, the kernel needs no flag.
        overflow = decision.overflow if decision.apply is None else None
        if fused.expects_attributes(inner):
            device = self.record.info().device
            divisor = scalar(1.0, device) if divisor is None else divisor
            overflow = scalar(0.0, device) if overflow is None else overflow
        if divisor is None and overflow is None:
            return inner.step(*args, **more)
        with fused.attributes(list(filter(fused.can_skip, parts_of(inner))), divisor, overflow):
            return inner.step(*args, **more)

    def decision_if_left_out(self) -> StepDecision | None:
        """The decision on checked gradients that are cleared without a step; None if unknown."""
        record, info = self.record, self.record.info()
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
            overflow, device = decision.overflow, self.record.last_info.device
            skipped = scalar(float(skipped), device) if overflow is None else overflow
        if decision.is_scaled:
            self.scale.update(skipped)
        self.scale.count(skipped)
