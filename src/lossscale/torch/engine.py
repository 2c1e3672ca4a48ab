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
from lossscale.torch.scaled_gradients import ScaledGradients
from lossscale.torch.scaling import CPU, filled, read, scalar

_LARGEST = torch.finfo(torch.float32).max
_SMALLEST_NORM = 2.0**-40
"""Above it all elements together whose squares are 0 in float32 do not matter."""


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
        record, info = self.record, self.record.info()
        record.check_no_new_group()
        self._first_steps.check(info.parameters)
        scaled_set = record.only_set()
        first, groups = info.first_gradient(), info.groups
        if first is None and not groups:
            return StepDecision(True, empty=True)
        is_scaled = scaled_set is not None or not record.no_loss_scaled()
        multiplier = (scaled_set and scaled_set.multiplier) or self.scale.multiplier
        clips = bool(self.clip_norm) and not in_place
        unchecked = not (self.rule.checks_gradients or clips or self.scale.on_device)
        # A check divides them in the same pass, except for float16, which would flush to 0.
        wants_kernel = not in_place and (clips or unchecked or info.has_half)
        of_kernel = scaled_set if wants_kernel and self._can_divide(scaled_set) else None
        if clips and self._norm_checks(multiplier):
            decision = self._decide_by_norm(scaled_set, of_kernel, is_scaled)
            if decision is not None:
                return decision
        divisor = None
        if of_kernel is not None and first is not None and (info.has_half or unchecked):
            divisor = multiplier.scale_on(first.device)
            if not self.rule.checks_gradients and not gradients.lie_as_before(info):
                # The kernel would divide twice what shares memory.
                gradients.collect(info, allow_float16=True)
            record.release([of_kernel])
            if unchecked and not groups:
                return StepDecision(True, is_scaled=True, divisor=divisor)
        elif scaled_set is not None:
            record.settle([scaled_set])
        overflow = self._overflow(divisor, multiplier)
        somebody_scaled = is_scaled
        # Processes of a given group may run different code, but send the same messages.
        if groups and (self.rule.checks_gradients or info.is_given or record.is_joined):
            overflow, flag = ranks.agreed(overflow, first is not None, is_scaled, groups)
            # Only a process that scaled no loss has to wait for those of others.
            somebody_scaled = is_scaled or bool(flag)
        if somebody_scaled and not is_scaled:
            record.hold(info, multiplier).settle()
        decision = self._read(overflow, divisor, has_gradients=first is not None)
        if not somebody_scaled:
            decision = decision._replace(is_scaled=False)
        return self.clipped(decision) if clips else decision

    def _can_divide(self, scaled_set: ScaledGradients | None) -> bool:
        """Whether the optimizer's kernel may divide the gradients of a set."""
        # A kernel must not change one that is part of a graph.
        return scaled_set is not None and not scaled_set.has_graph and fused.can_unscale(self.inner)

    def _norm_checks(self, multiplier: Multiplier) -> bool:
        """Whether a norm, which is finite only if each number is, can take the place of a check."""
        info = self.record.last_info
        may_differ = info.is_given or (self.record.last_check is not None and bool(info.groups))
        return not (
            self.scale.on_device or may_differ or info.has_half or multiplier.number is None
        )

    def _decide_by_norm(
        self, scaled_set: ScaledGradients | None, of_kernel: ScaledGradients | None, is_scaled: bool
    ) -> StepDecision | None:
        """Clips by a norm that checks for overflow as well; None if it cannot tell."""
        record, info = self.record, self.record.last_info
        given = gradients.collect(info)
        scale = (scaled_set and scaled_set.multiplier and scaled_set.multiplier.number) or 1.0
        norm, overflow = gradients.grad_norm(given, info), record.overflow
        if overflow is not None:
            norm = torch.where(overflow.to(norm.device) > 0, torch.inf, norm)
        total = read(norm) / scale
        # A norm may overflow though no element does, and unscaling may overflow some. At a scale
        # far below 1 the squares of elements are 0.
        if not total <= _LARGEST or total * scale < _SMALLEST_NORM:
            return None
        largest = self.clip_norm or 0.0
        # Computed on the host, so that the device is waited for once.
        clip = gradients.coefficient(scalar(total, CPU, norm.dtype), largest)
        dtypes = [group[0].dtype for group in given.dense_groups]
        # A float32 number has too few digits for float64.
        fits = len(dtypes) == 1 and dtypes[0] != torch.float64
        fits = fits and scale * max(total / largest, 1.0) < _LARGEST / 2
        divisor = None
        if of_kernel is not None and fits:
            divisor = scalar(float(scale / clip), given.device)
            record.release([of_kernel])
        elif scaled_set is not None:
            record.settle([scaled_set], factor=filled(clip / scale))
        else:
            gradients.unscale_(given, filled(clip))
        return StepDecision(True, is_scaled, divisor=divisor)

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

    @torch.no_grad()
    def clipped(self, decision: StepDecision) -> StepDecision:
        """Clips the gradients of a step, or changes what a kernel is still to divide them by."""
        if not self.clip_norm or decision.apply is False or decision.empty:
            return decision
        info, divisor = self.record.info(), decision.divisor
        given = gradients.collect(info, allow_float16=divisor is not None)
        if not (given.dense_groups or info.groups):
            return decision
        # Of float16 it would overflow in float16.
        norm = gradients.grad_norm(given, info, None if divisor is None else torch.float32)
        # The squares of finite elements may overflow, but not those of float16 in float32.
        # With several processes all take the same way.
        is_half = all(group[0].dtype == torch.float16 for group in given.dense_groups)
        can_overflow = bool(info.groups) or not is_half
        if can_overflow and not self.scale.on_device and norm.isinf():
            norm = gradients.grad_norm(given, info, torch.float64)
        if divisor is None:
            gradients.unscale_(given, gradients.coefficient(norm, self.clip_norm).to)
            return decision
        coefficient = gradients.coefficient(norm.to(divisor.device) / divisor, self.clip_norm)
        return decision._replace(divisor=(divisor / coefficient).to(torch.float32))

    # --- Act ----------------------------------------------------------------------------------

    def apply(self, decision: StepDecision, *args: Any, **more: Any) -> Any:
        """Steps the optimizer, unless it is to be skipped; returns what it returns."""
        self._first_steps.made(self.inner, decision.empty, self.record.has_own_loss)
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

    def step_without_data(self) -> None:
        """Takes part in a step of the processes that still have data, if they send messages."""
        info = self.record.info()
        if not info.groups:
            return
        overflow, _ = ranks.agreed(scalar(0.0, info.device), False, False, info.groups)
        decision = self._read(overflow, None, has_gradients=False)
        if not decision.empty:
            self.update(decision)

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
