"""One step of one optimizer: unscale, check for overflow once, agree, apply or skip, update.

`Engine.decide` decides whether a step is skipped. The host waits for one number, unless the loss
scale is on the device.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lossscale.errors import GradientsError, UnsupportedError
from lossscale.packages import warn
from lossscale.rules import GradientStats, ScaleRule, StatsRequest
from lossscale.torch import clipping, fused, gradient_stats, gradients, overflow_check, ranks
from lossscale.torch.backward import ONE_FOR_SEVERAL as _ONE_FOR_SEVERAL
from lossscale.torch.backward import (
    GradientRecord,
    alive,
    divide,
    engines,
    is_below_one,
    multiply,
    share,
)
from lossscale.torch.gradients import Gradients
from lossscale.torch.ranks import ParameterInfo
from lossscale.torch.scale import Counts, Multiplier
from lossscale.torch.scaling import CPU, read, scalar
from lossscale.torch.several import parts_of, with_parts

_LARGEST = torch.finfo(torch.float32).max
_SMALLEST_NORM = 2.0**-40
"""Above it all elements together whose squares are 0 in float32 do not matter."""

_NO_GRADIENTS = 10
"""After how many steps without any gradient a warning comes."""


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
    """Loss scaling of the gradients of one optimizer.

    Args:
        inner: The optimizer, or a function that returns it.
        scale: The loss scale, a `LossScale`; or what has its `rule`.
        clip_norm: What unscaled gradients are clipped to, or None.
        process_group: As `ranks.groups_of` takes it.

    Attributes:
        record: The state of its gradients.
        left_out: Called when gradients were checked and then cleared without a step.
        join_group: The processes of a `torch.distributed.algorithms.Join`, within it.
        counts: The steps of this optimizer, where others share the loss scale.
        shares_overflows: Whether it skips with others that a loss of one has reached. The
            optimizers of PyTorch's scalers do not.
    """

    left_out: Callable[[], None] | None = None
    join_group: Any = None
    counts = Counts(0, 0, False)
    shares_overflows = True
    _steps_without: int | None = 0

    def __init__(
        self, inner: Any, scale: Any, clip_norm: float | None = None, process_group: Any = None
    ) -> None:
        # A scaler keeps no optimizer alive.
        is_given = isinstance(inner, torch.optim.Optimizer)
        self._inner = (lambda: inner) if is_given else inner
        self.scale = scale
        self.clip_norm, self.process_group = clip_norm, process_group
        # The states of the optimizers, the number of entries in each, and the ids of parameters
        # whose state is complete.
        self._stepped: tuple[list[Any], list[int], set[int]] = ([], [], set())
        self._info = ParameterInfo(ranks.parameters_of(self.inner), process_group)
        known = (each.record for each in engines if each.inner is self.inner)
        self.record: GradientRecord = next(known, None) or GradientRecord()
        engines.add(self)

    @property
    def inner(self) -> Any:
        """The optimizer."""
        return self._inner()

    @property
    def rule(self) -> ScaleRule:
        """The rule that moves the loss scale."""
        rule: ScaleRule = self.scale.rule
        return rule

    def info(self) -> ParameterInfo:
        """Facts about the parameters that the optimizer has now."""
        parameters = ranks.parameters_of(self.inner)
        if not self._info.is_of(parameters):
            self._info = ParameterInfo(parameters, self.process_group)
        return self._info

    def _groups(self, info: ParameterInfo) -> Any:
        return info.groups or (() if self.join_group is None else (self.join_group,))

    def watch_steps(self, found_scaled: Callable[[Engine, Any], None]) -> None:
        """Calls a function with each optimizer whose own `step` is called on scaled gradients."""
        watched = weakref.ref(self)

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            now = None if torch.compiler.is_compiling() else watched()
            # An optimizer that is given the scaler divides by itself.
            if now is None or now.record.scaled_by is None or "grad_scaler" in kwargs:
                return
            if now.info().first_gradient() is not None:
                found_scaled(now, optimizer)

        hook.of_lossscale = True  # type: ignore[attr-defined]
        for each in with_parts(self.inner):
            hooks = getattr(each, "_optimizer_step_pre_hooks", None)
            # An object with the interface of an optimizer may have no hooks.
            if hooks is None:
                continue
            for key in [key for key, other in hooks.items() if hasattr(other, "of_lossscale")]:
                del hooks[key]
            each.register_step_pre_hook(hook)

    # --- What the gradients are ---------------------------------------------------------------

    def begin(
        self,
        by: Any,
        info: ParameterInfo | None = None,
        *,
        task: int = -1,
        graph: bool = False,
        own_loss: bool = False,
    ) -> None:
        """Gradients are about to be added that are multiplied by a scale.

        Args:
            by: The `Multiplier`.
            info: Of the parameters, if they are not all of the optimizer.
            task: The backward pass.
            graph: Whether they will be parts of a graph.
            own_loss: Whether this optimizer, or its scaler, scaled the loss.

        Raises:
            GradientsError: If others are added in the same pass.
        """
        record = self.record
        if record.scaled_by is not by:
            if task == record.task != -1 and record.scaled_by is not None:
                raise GradientsError(
                    "One backward pass reaches the same parameters by losses with different "
                    f"scales. {_ONE_FOR_SEVERAL}"
                )
            whole = self.info()
            info = whole if info is None else info
            part = None if own_loss or info is whole else info
            if record.found is not None and record.are_gone(whole):
                if self.left_out is not None:
                    self.left_out()
                record.reset()
            self.end_others(info)
            for each, _ in alive(engines):
                if each.record.decision is not None and not each.info().ids.isdisjoint(info.ids):
                    # Decided on gradients that it shares, and that are about to change.
                    each.record.decision = None
            if record.scaled_by is not None and (record.part is not None or part is not None):
                self.end(record.part)
            before = record.scaled_by
            if before is None and self.scale.is_unseen and not record.is_as_it_was(whole):
                before = self.scale.multiplier
            multiply(info, by, before)
            if record.found is not None:
                # Some may have been replaced.
                record.remember(whole)
            record.scaled_by, record.part, record.is_uncertain = by, part, False
        record.task, record.has_own_loss = task, record.has_own_loss or own_loss
        record.is_graph = record.is_graph or graph
        record.decision, record.is_settled = None, False

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def end(self, info: ParameterInfo | None = None) -> Any:
        """Divides and checks the gradients; returns what was found, None if they are unscaled.

        Args:
            info: Of the parameters, if they are not all of the optimizer.
        """
        record, rule, whole = self.record, self.rule, self.info()
        info = whole if info is None else info
        by, record.scaled_by = record.scaled_by, None
        found: Any = None
        if by is not None:
            found = overflow_check.any_overflow(
                divide(info, by, graph=record.is_graph, checks=rule.checks_gradients),
                info.devices[0] if info.devices else CPU,
            )
        record.add(found)
        record.is_graph = False
        record.remember(whole)
        return found

    def end_others(self, info: ParameterInfo) -> bool:
        """Unscales and checks gradients that other optimizers with other loss scales hold.

        Those of some of these parameters, because optimizers may share parameters; and all of a
        loss that has reached this optimizer too. Its scale is too large if any overflows: then all
        of them skip, and all scales fall.

        Args:
            info: The parameters whose gradients are needed.

        Returns:
            Whether there were any.
        """
        record = self.record
        others = alive(each for each in engines if each.scale is not self.scale)
        by = record.scaled_by if self.shares_overflows and not record.is_uncertain else None
        holding = [each for each, _ in others if each.holds(info, by)]
        if not holding:
            return False
        if any(each.record.scaled_by is by for each in holding):
            holding.append(self)
        found = [each.end(each.record.part) for each in holding]
        # Without a result the gradients of this optimizer are still to be checked.
        share(found, holding if record.found is None else {*holding, self})
        return True

    def holds(self, info: ParameterInfo, by: Any) -> bool:
        """Whether gradients are scaled by a multiplier, or are those of some parameters."""
        record = self.record
        # A `LossScale` multiplies gradients that may be none in `.grad`.
        if not isinstance(record.scaled_by, Multiplier):
            return False
        mine = self.info() if record.part is None else record.part
        shares = self.shares_overflows and not record.is_uncertain
        return (shares and record.scaled_by is by) or not info.ids.isdisjoint(mine.ids)

    # --- Decide -------------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def decide(self, *, in_place: bool = False) -> StepDecision:
        """Unscales the gradients if they are scaled, and decides.

        If no loss was scaled on this process, another may have scaled it, such as the last stage
        of a pipeline. If none has, the rule does not see the step.

        Args:
            in_place: Whether user code reads them before the step: then they are divided here, and
                not clipped.
        """
        info, rule, record = self.info(), self.rule, self.record
        self.end_others(info)
        if record.scaled_by is not None and (
            record.part is not None or record.is_graph or record.found is not None
        ):
            self.end(record.part)
        # Unscaled gradients were checked when they were unscaled.
        found = record.found if record.scaled_by is None else None
        grads = (
            ()
            if record.divided is None
            else [p.grad for p in info.parameters if p.grad is not None]
        )
        are_scaled = False if found is not None else record.are_scaled(grads)
        by = self.scale.multiplier if record.scaled_by is None else record.scaled_by
        clips = self.clip_norm is not None and not in_place
        groups, measures = self._groups(info), rule.needs != StatsRequest()
        # Processes of a given group may run different code, but send the same messages.
        asks = bool(groups) and (
            rule.checks_gradients or info.is_given or self.join_group is not None
        )
        if found is not None and not (clips or measures or asks or self.scale.on_device):
            # The gradients need no other pass.
            if info.first_gradient() is None:
                return StepDecision(True, empty=True)
            return self._on_host(found, None, None)
        in_kernel, is_half = self._left_to_kernel(info, clips, bool(are_scaled) and not in_place)
        if in_kernel and info.is_plain and not (clips or measures or asks):
            # No other pass is needed: with one, the row SGD fused, small takes 1.2 times as long.
            empty = info.first_gradient() is None
            divisor = None if empty else by.on(info.devices[0]).scale
            return StepDecision(True, GradientStats(True), divisor=divisor, empty=empty)
        given = gradients.collect(info, allow_float16=is_half)
        if not given.grads and not groups:
            return StepDecision(True, empty=True)
        # A kernel divides by a float32 number, which has too few digits for float64.
        is_one = len(given.dense_groups) == 1
        in_kernel = in_kernel and is_one and given.dense_groups[0][0].dtype != torch.float64
        measured = None
        if measures:
            measured = self.measured(given, info, by, are_scaled=are_scaled is not False)
        by_norm = not (measures or self.scale.on_device or info.is_given or is_half)
        by_norm = by_norm and self.join_group is None
        if clips and by_norm and (found is None or not groups):
            decision = self._decide_by_norm(given, info, by, bool(are_scaled), in_kernel, found)
            if decision is not None:
                # The rule does not see a step without a scaled loss.
                return decision._replace(stats=None) if are_scaled is None else decision
        divisor = by.on(given.device).scale if is_half or (in_kernel and not clips) else None
        overflow = found
        if not rule.checks_gradients or overflow is None:
            overflow = self._unscale_and_check(given, by, are_scaled, leave=divisor is not None)
        somebody_scaled: Any = are_scaled is not None
        if asks:
            here = bool(given.grads), somebody_scaled
            overflow, somebody_scaled = ranks.agreed(overflow, *here, groups)
        if self.scale.on_device:
            decision = self._on_device(overflow, measured, given, info, divisor)
        else:
            decision = self._on_host(overflow, measured, divisor)
        if are_scaled is None and somebody_scaled:
            # The loss was scaled in another process.
            _unscale(given, by)
        elif are_scaled is None:
            decision = decision._replace(stats=None)
        if clips and decision.apply is not False and not decision.empty:
            divisor = self._clip(given, info, divisor)
            decision = decision._replace(divisor=divisor)
        return decision

    def _left_to_kernel(self, info: ParameterInfo, clips: bool, allowed: bool) -> tuple[bool, bool]:
        """Whether the fused kernel of the optimizer divides; and if so, whether some are float16.

        In float16 small gradients would flush to zero if they were divided before. Others are
        divided by the check, which reads and writes them anyway; unless the norm is the check.
        """
        is_wanted = (clips or not self.rule.checks_gradients) and not self.scale.on_device
        if not allowed or not (is_wanted or info.has_half) or not fused.can_unscale(self.inner):
            return False, False
        return is_wanted, info.has_half

    def _unscale_and_check(
        self, given: Gradients, by: Any, are_scaled: bool | None, leave: bool
    ) -> Any:
        """Returns whether any gradient overflowed: float32 scalar tensor, 1 or 0.

        Args:
            given: The gradients.
            by: Their scale.
            are_scaled: Whether they are scaled; None if no loss was scaled here.
            leave: Whether the kernel of the optimizer divides them.
        """
        if not self.rule.checks_gradients:
            if are_scaled and not leave:
                _unscale(given, by)
            return scalar(0.0, given.device)
        below_one = is_below_one(by)
        if are_scaled and not leave:
            return overflow_check.any_overflow(
                overflow_check.unscale_and_check_(
                    given,
                    _factor_of(by),
                    divide=not by.rule.powers_of_two,
                    recheck=below_one,
                )
            )
        if are_scaled is not False and below_one:
            # With a scale below 1 unscaling may overflow what is finite.
            quotients = overflow_check.check_quotients(given, lambda device: by.on(device).scale)
            return overflow_check.any_overflow(quotients)
        return overflow_check.any_overflow(overflow_check.check(given))

    def measured(self, given: Gradients, info: ParameterInfo, by: Any, *, are_scaled: bool) -> Any:
        """Measures gradients for a rule that needs it, before they are unscaled."""
        scale = by.on(given.device).scale
        needs = self.rule.needs
        return gradient_stats.measure_everywhere(
            needs, given.grads, info, scale, are_scaled=are_scaled
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
        if self.rule.checks_gradients and self._groups(info):
            # A process with a gradient knows that the step is not empty.
            if not given.grads and overflow.item() < 0:
                return StepDecision(True, empty=True)
            overflow = overflow.clamp(min=0.0)
        stats = gradient_stats.as_stats(self.rule.needs, measured, overflow == 0)
        # A fused SGD allocates its momentum before it reads `found_inf`, and would use it
        # uninitialized: the host decides on the first step of a parameter.
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

    def _decide_by_norm(
        self,
        given: Gradients,
        info: ParameterInfo,
        by: Any,
        are_scaled: bool,
        in_kernel: bool,
        found: Any,
    ) -> StepDecision | None:
        """Clips by a norm that checks for overflow as well; None if it cannot tell."""
        scale = by.number if are_scaled else 1.0
        clip_norm = self.clip_norm or 0.0
        norm = clipping.grad_norm(given, info)
        if found is not None and not info.groups:
            norm = torch.where(found.to(norm.device) > 0, torch.inf, norm)
        total = read(norm)
        # A norm may overflow though no element does, and unscaling may overflow some. At a scale
        # far below 1 the squares of elements are 0.
        if not math.isfinite(total / scale) or total / scale > _LARGEST or total < _SMALLEST_NORM:
            return None
        # Computed on the host, so that the device is waited for once.
        coefficient = clipping.coefficient(scalar(total, CPU, norm.dtype) / scale, clip_norm)
        divisor = None
        if in_kernel and scale * max(total / scale / clip_norm, 1.0) < _LARGEST / 2:
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
        self._clip(gradients.collect(info), info, None)

    def _clip(self, given: Gradients, info: ParameterInfo, divisor: Any) -> Any:
        """Clips gradients, or changes what they are still to be divided by; returns that."""
        largest = self.clip_norm or 0.0
        if divisor is None:
            clipping.clip_(given, info, largest, wait=not self.scale.on_device)
            return None
        norm = clipping.grad_norm(given, info, wide=True) / divisor
        return (divisor / clipping.coefficient(norm, largest)).to(torch.float32)

    # --- Act ----------------------------------------------------------------------------------

    def apply(self, decision: StepDecision, *args: Any, **more: Any) -> Any:
        """Steps the optimizer, unless it is to be skipped; returns what it returns."""
        self._watch_first_steps(decision.empty)
        if decision.apply is False:
            return None
        inner, divisor = self.inner, decision.divisor
        # After a decision of the host, the kernel needs no flag.
        overflow = decision.overflow if decision.apply is None else None
        if overflow is not None and not fused.can_skip(inner):
            # Loaded settings have turned off the fused kernel: the host waits, and skips.
            if bool(overflow > 0):
                return None
            overflow = None
        if fused.expects_attributes(inner):
            device = self.info().devices[0]
            divisor = scalar(1.0, device) if divisor is None else divisor
            overflow = scalar(0.0, device) if overflow is None else overflow
        if divisor is None and overflow is None:
            return inner.step(*args, **more)
        with fused.attributes(list(filter(fused.can_skip, parts_of(inner))), divisor, overflow):
            return inner.step(*args, **more)

    def _watch_first_steps(self, empty: bool) -> None:
        """Warns of an optimizer that never has any gradient, and refuses one inside of ZeRO."""
        if self._steps_without is None:
            return
        if not empty:
            if self.process_group is None and ranks.is_in_zero(self):
                raise UnsupportedError(
                    "A LossScaleOptimizer inside a ZeroRedundancyOptimizer cannot see overflows of "
                    "other processes. Wrap the "
                    "ZeroRedundancyOptimizer, or make the LossScaleOptimizer with "
                    "process_group=torch.distributed.group.WORLD."
                )
            self._steps_without = None
            return
        self._steps_without += 1
        if self._steps_without == _NO_GRADIENTS:
            self._steps_without = None
            warn(
                f"No parameter of {type(self.inner).__name__} has had a gradient in "
                f"{_NO_GRADIENTS} steps, so nothing trains. Its parameters may belong to another "
                "model than the one that computes the loss. Make the optimizer after the model is "
                "moved, wrapped or replaced, with that model's parameters."
            )

    def shadow(self) -> None:
        """Takes part in a step of the processes that still have data."""
        info = self.info()
        device = info.devices[0] if info.devices else CPU
        overflow, _ = ranks.agreed(scalar(0.0, device), False, False, self._groups(info))
        found = read(overflow)
        if found >= 0:
            skipped = scalar(found, device)
            finite: Any = skipped == 0 if self.scale.on_device else not found
            stats = gradient_stats.as_stats(self.rule.needs, None, finite)
            self.update(StepDecision(not found, stats, skipped))

    def skipped(self, found: Any) -> StepDecision:
        """The decision on gradients that were cleared, with the statistics of a skipped step."""
        measured, needs = None, self.rule.needs
        if needs != StatsRequest():
            measured = scalar(0.0, CPU).repeat(2 + len(needs.counts_from))
        finite: Any = False
        if self.scale.on_device:
            finite = scalar(False, self.info().devices[0], torch.bool)
        return StepDecision(None, gradient_stats.as_stats(needs, measured, finite), overflow=found)

    def update(self, decision: StepDecision) -> None:
        """Updates the scale and counts the step."""
        if decision.stats is not None:
            self.scale.update(decision.stats)
        skipped = not decision.apply
        if self.scale.on_device:
            found = decision.overflow
            skipped = scalar(float(skipped), self.info().devices[0]) if found is None else found
        self.scale.count(skipped)


def _factor_of(by: Any) -> Callable[[Any], Any]:
    """What gradients are multiplied by, or divided by, on a device."""
    if by.rule.powers_of_two:
        return lambda device: by.on(device).reciprocal
    return lambda device: by.on(device).scale


def _unscale(given: Gradients, by: Any) -> None:
    overflow_check.unscale_(given, _factor_of(by), divide=not by.rule.powers_of_two)


def _has_state(inner: Any, parameter: Any, group: dict[str, Any]) -> bool:
    # Without momentum it keeps none; RMSprop without momentum does.
    if isinstance(inner, torch.optim.SGD) and not group["momentum"]:
        return True
    state = inner.state.get(parameter)
    return bool(state) and state.get("momentum_buffer", state) is not None
