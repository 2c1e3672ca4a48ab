"""One step of one optimizer: unscale, check for overflow once, agree, apply or skip, update.

`Engine.decide` says when a step is skipped. The host waits for one number, unless the loss scale
is on the device.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch

from lossscale.rules import GradientStats, ScaleRule, StatsRequest
from lossscale.torch import clipping, fused, gradient_stats, gradients, overflow_check, ranks
from lossscale.torch.gradients import Gradients
from lossscale.torch.ranks import ParameterInfo
from lossscale.torch.saved import Saved
from lossscale.torch.scale import DeviceLossScale, LossScale
from lossscale.torch.scaling import CPU, read, scalar
from lossscale.torch.several import parts_of

_LARGEST = torch.finfo(torch.float32).max
_SMALLEST_NORM = 2.0**-40
"""Above it all elements together whose squares are 0 in float32 do not matter."""

NOTHING = "nothing"
"""No loss was scaled since the last step."""

SCALED = "scaled"
"""A loss was scaled: the gradients are those of the scaled loss."""

SCALED_BY_HAND = "scaled by hand"
"""`get_scaled_loss` has scaled one: `apply_gradients` expects what was unscaled by hand too."""

UNSCALED = "unscaled"
"""`get_unscaled_gradients` has divided them, and nobody has checked them."""

CHECKED = "checked"
"""They were unscaled and checked, where they are."""

_MARK = "_is_scaled_by_lossscale"


class StepDecision(NamedTuple):
    """What was decided on the gradients of a step, before anything is applied.

    Attributes:
        apply: Whether they are applied; None if only the device knows.
        stats: What the rule sees; None if it is not to be updated.
        overflow: What the device found: float32 tensor, 1 to skip and 0 to apply.
        divisor: What a fused optimizer still has to divide by, or None.
        empty: Whether there was no gradient, on any process.
    """

    apply: bool | None
    stats: GradientStats | None = None
    overflow: Any = None
    divisor: Any = None
    empty: bool = False

    def is_skipped(self) -> bool:
        """Whether the step is skipped; with `decide="device"` this waits for the device."""
        return bool(self.overflow) if self.apply is None else not self.apply


class Engine:
    """What loss scaling does with the gradients of one optimizer.

    Args:
        inner: The optimizer.
        rule: How the scale moves.
        clip_norm: What unscaled gradients are clipped to, or None.
        process_group: As `ranks.groups_of` takes it.
        on_device: Whether the device decides.

    Attributes:
        scale: The loss scale and the counts of steps.
    """

    def __init__(
        self,
        inner: Any,
        rule: ScaleRule,
        clip_norm: float | None,
        process_group: Any,
        on_device: bool,
    ) -> None:
        self.inner, self.rule = inner, rule
        self.clip_norm, self.process_group = clip_norm, process_group
        self._measures = rule.needs != StatsRequest()
        # The states of optimizers, how many entries each has, and the ids of parameters with all of
        # their state.
        self._stepped: tuple[list[Any], list[int], set[int]] = ([], [], set())
        self._info = ParameterInfo(ranks.parameters_of(inner), process_group)
        self.scale = (DeviceLossScale if on_device else LossScale)(rule, self._info.devices)

    def info(self) -> ParameterInfo:
        """What is known of the parameters that the optimizer has now."""
        parameters = ranks.parameters_of(self.inner)
        if not self._info.is_of(parameters):
            self._info = ParameterInfo(parameters, self.process_group)
        return self._info

    # --- Decide -------------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def decide(self, *, are_scaled: bool | None, in_place: bool = False) -> StepDecision:
        """Unscales the gradients if they are scaled, and decides.

        Args:
            are_scaled: Whether they are those of the scaled loss; None if no loss was scaled here.
                Then other processes may know better, such as the last stage of a pipeline; if none
                does, the rule does not see it.
            in_place: Whether somebody reads them before they are applied: then nothing is left
                to the optimizer, and they are not clipped.
        """
        info, rule = self.info(), self.rule
        clips = self.clip_norm is not None and not in_place
        # Processes that were named by a group may do different things: always the same messages.
        asks = bool(info.groups) and (rule.checks_gradients or info.is_given)
        # What has to be read and written for the check is unscaled on the way.
        hands_over = (clips or not rule.checks_gradients) and not self.scale.on_device
        # Small gradients would flush to zero in float16: these are divided in the kernel alone.
        is_half = info.has_half
        if hands_over or is_half:
            kernel_divides = bool(are_scaled) and not in_place and fused.can_unscale(self.inner)
            hands_over, is_half = hands_over and kernel_divides, is_half and kernel_divides
        if hands_over and info.is_plain and not (clips or self._measures or asks):
            # Nobody else has to touch the gradients: SGD fused, small would take 1.2 times as long.
            empty = all(p.grad is None for p in info.parameters)
            divisor = None if empty else self.scale.on(info.devices[0]).scale
            return StepDecision(True, GradientStats(True), divisor=divisor, empty=empty)
        given = gradients.collect(info, allow_float16=is_half)
        if not given.grads and not info.groups:
            return StepDecision(True, empty=True)
        hands_over = hands_over and len(given.dense_groups) == 1
        measured = self._measured(given, info, are_scaled) if self._measures else None
        if clips and not (self._measures or self.scale.on_device or info.is_given or is_half):
            decision = self._decide_by_norm(given, info, bool(are_scaled), hands_over)
            if decision is not None:
                return decision
        divisor = None
        if is_half or (hands_over and not clips):
            divisor = self.scale.on(given.device).scale
        if rule.checks_gradients:
            found = self._unscale_and_check(given, False if is_half else are_scaled)
            overflow = overflow_check.any_overflow(found)
        else:
            overflow = scalar(0.0, given.device)
            if are_scaled and divisor is None:
                self._unscale(given)
        somebody_scaled: Any = are_scaled is not None
        if asks:
            here = bool(given.grads), somebody_scaled
            overflow, somebody_scaled = ranks.agreed(overflow, *here, info.groups)
        if self.scale.on_device:
            decision = self._on_device(overflow, measured, given, info, divisor)
        else:
            decision = self._on_host(overflow, measured, divisor)
        if are_scaled is None:
            if not somebody_scaled:
                return decision._replace(stats=None)
            # The loss was scaled in another process.
            self._unscale(given)
        if not clips or decision.apply is False or decision.empty:
            return decision
        if is_half:
            norm = clipping.grad_norm(given, info, wide=True) / divisor
            divisor = divisor / clipping.coefficient(norm, self.clip_norm or 0.0)
            return decision._replace(divisor=divisor.to(torch.float32))
        self._clip(given, info)
        return decision

    def _factor(self, device: Any) -> Any:
        factors = self.scale.on(device)
        return factors.reciprocal if self.rule.powers_of_two else factors.scale

    def _unscale(self, given: Gradients) -> None:
        overflow_check.unscale_(given, self._factor, divide=not self.rule.powers_of_two)

    def _unscale_and_check(self, given: Gradients, are_scaled: bool | None) -> dict[Any, Any]:
        lowest = self.rule.lowest_scale if self.scale.on_device else self.scale.number
        # With a scale below 1 unscaling may overflow what was finite.
        recheck = lowest is None or lowest < 1.0
        if are_scaled is None and recheck and not self.scale.on_device:
            finite = overflow_check.all_finite(given.grads, lowest, self.rule.powers_of_two)
            return {finite.device: (~finite).to(torch.float32)} if given.grads else {}
        if not are_scaled:
            return overflow_check.check(given)
        return overflow_check.unscale_and_check_(
            given, self._factor, divide=not self.rule.powers_of_two, recheck=recheck
        )

    def _measured(self, given: Gradients, info: ParameterInfo, are_scaled: bool | None) -> Any:
        """Measures gradients for a rule that needs it, before they are unscaled."""
        return gradient_stats.measure_everywhere(
            self.rule.needs,
            given.grads,
            info,
            self.scale.on(given.device).scale,
            are_scaled=are_scaled is not False,
        )

    def _on_host(self, overflow: Any, measured: Any, divisor: Any) -> StepDecision:
        applied, empty = True, False
        if self.rule.checks_gradients:
            if measured is None:
                found = read(overflow)
            else:
                # One transfer for both.
                found, *_ = numbers = torch.cat([overflow.reshape(1).to(measured), measured]).cpu()
                measured = numbers[1:]
            applied, empty = not found > 0, bool(found < 0)
        elif measured is not None:
            measured = measured.cpu()
        stats = gradient_stats.as_stats(self.rule.needs, measured, bool(applied))
        return StepDecision(bool(applied), stats, divisor=divisor, empty=empty)

    def _on_device(
        self, overflow: Any, measured: Any, given: Gradients, info: ParameterInfo, divisor: Any
    ) -> StepDecision:
        overflow = overflow.to(info.devices[0])
        if self.rule.checks_gradients and info.groups:
            # With a gradient of its own a process knows that there is one.
            if not given.grads and overflow.item() < 0:
                return StepDecision(True, empty=True)
            overflow = overflow.clamp(min=0.0)
        stats = gradient_stats.as_stats(self.rule.needs, measured, overflow == 0)
        # A fused SGD allocates its momentum before it looks, and would take what it finds there for
        # momentum: the host decides on the first step of a parameter.
        applied = None if self._all_have_state(info) else not overflow.item()
        return StepDecision(applied, stats, overflow, divisor)

    def _all_have_state(self, info: ParameterInfo) -> bool:
        """Whether no parameter takes its first step."""
        states = [part.state for part in parts_of(self.inner)]
        sizes = list(map(len, states))
        before, sizes_before, ids = self._stepped
        if sizes != sizes_before or not all(map(operator.is_, states, before)):
            # A state was made, loaded or cleared.
            ids = {
                id(parameter)
                for part in parts_of(self.inner)
                for group in part.param_groups
                for parameter in group["params"]
                if _has_state(part, parameter, group)
            }
            self._stepped = states, sizes, ids
        return all(p.grad is None or id(p) in ids for p in info.parameters)

    # --- Clip ---------------------------------------------------------------------------------

    def _decide_by_norm(
        self, given: Gradients, info: ParameterInfo, are_scaled: bool, hands_over: bool
    ) -> StepDecision | None:
        """Clips by a norm that checks for overflow as well; None if it cannot tell."""
        scale = self.scale.number if are_scaled else 1.0
        clip_norm = self.clip_norm or 0.0
        norm = clipping.grad_norm(given, info)
        total = read(norm)
        if total < 0:
            return StepDecision(True, empty=True)
        # A norm may overflow though no element does, and unscaling may overflow some. At a scale
        # far below 1 the squares of elements are 0.
        if not math.isfinite(total / scale) or total / scale > _LARGEST or total < _SMALLEST_NORM:
            return None
        # On the host from here on: a device is not waited for a second time.
        coefficient = clipping.coefficient(scalar(total, CPU, norm.dtype) / scale, clip_norm)
        divisor = None
        if hands_over and scale * max(total / scale / clip_norm, 1.0) < _LARGEST / 2:
            divisor = (scale / coefficient).to(given.device, torch.float32)
        elif self.rule.powers_of_two:
            overflow_check.unscale_(given, (coefficient / scale).to)
        else:
            overflow_check.unscale_(given, lambda device: scale, divide=True)
            overflow_check.unscale_(given, coefficient.to)
        return StepDecision(True, GradientStats(True), divisor=divisor)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def clip_(self) -> None:
        """Clips gradients that are unscaled already."""
        info = self.info()
        self._clip(gradients.collect(info), info)

    def _clip(self, given: Gradients, info: ParameterInfo) -> None:
        clipping.clip_(given, info, self.clip_norm or 0.0, wait=not self.scale.on_device)

    # --- Act ----------------------------------------------------------------------------------

    def apply(self, decision: StepDecision) -> Any:
        """Steps the optimizer, unless it is to be skipped; returns what it returns."""
        if decision.apply is False:
            return None
        inner, divisor = self.inner, decision.divisor
        # Where the host has decided there is nothing left to say.
        overflow = decision.overflow if decision.apply is None else None
        parts = parts_of(inner)
        saved = [] if overflow is None else [Saved(p) for p in parts if not fused.can_skip(p)]
        if fused.expects_attributes(inner):
            device = self.info().devices[0]
            divisor = scalar(1.0, device) if divisor is None else divisor
            overflow = scalar(0.0, device) if overflow is None else overflow
        if divisor is None and overflow is None:
            return inner.step()
        with fused.attributes([p for p in parts if fused.can_skip(p)], divisor, overflow):
            returned = inner.step()
        for each in saved:
            each.put_back(overflow)
        return returned

    def update(self, decision: StepDecision) -> None:
        """Updates the scale and counts the step."""
        if decision.stats is not None:
            self.scale.update(decision.stats)
        skipped = not decision.apply
        if self.scale.on_device:
            found = decision.overflow
            skipped = scalar(float(skipped), self.info().devices[0]) if found is None else found
        self.scale.count(skipped)


def _has_state(inner: Any, parameter: Any, group: dict[str, Any]) -> bool:
    # Without momentum it keeps none; RMSprop without momentum does.
    if isinstance(inner, torch.optim.SGD) and not group["momentum"]:
        return True
    state = inner.state.get(parameter)
    return bool(state) and state.get("momentum_buffer", state) is not None


def remember_scaled(loss: Any) -> None:
    """Marks a tensor that came of scaling, by any optimizer."""
    setattr(loss, _MARK, True)


def was_scaled(loss: Any) -> bool:
    """Whether this very tensor came of scaling."""
    return hasattr(loss, _MARK)


class StepState:
    """A plain object, because compiled code loses what it writes to an optimizer.

    Attributes:
        stage: One of the constants above.
        decision: What was decided, if they were checked.
        unscaled_before: The gradients that were unscaled before a loss was scaled, their versions
            by their ids.
        decision_before: What was decided on these.
        divided: What `get_unscaled_gradients` was given, and the version of each tensor.
        clips: Whether they still have to be clipped.
        is_settled: Whether `zero_grad` came in the place of the step that was decided on.
        warned: Whether a step without a scaled loss was warned of.
    """

    def __init__(self) -> None:
        self.warned = False
        self.reset()

    def reset(self) -> None:
        """A step was made."""
        self.stage = NOTHING
        self.decision: Any = None
        self.clips = self.is_settled = False
        self.unscaled_before: dict[int, int] = {}
        self.decision_before: Any = None
        self.divided: list[tuple[Any, int]] = []
