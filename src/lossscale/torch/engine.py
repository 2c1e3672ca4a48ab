"""One step of one optimizer: unscale, check for overflow once, agree, apply or skip, update.

`Engine.decide` decides whether a step is skipped. The host waits for one number, unless the loss
scale is on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lossscale.common.checks import living_wrapper
from lossscale.errors import CallOrderError, UnsupportedError
from lossscale.rules import GradientStats
from lossscale.torch import fused, gradients, ranks
from lossscale.torch.optimizer_list import parts_of, with_parts
from lossscale.torch.ranks import ParameterInfo
from lossscale.torch.scale import FirstSteps, Flag, LossScale, Multiplier
from lossscale.torch.scaled_gradients import (
    GradientRecord,
    ScaledGradients,
    holding,
    is_below_one,
    owners,
    register,
    unheld,
)
from lossscale.torch.scaling import CPU, filled, read, read_all, scalar

_LARGEST = torch.finfo(torch.float32).max
_SMALLEST_NORM = 2.0**-40
"""Above it all elements together whose squares are 0 in float32 do not matter."""


class StepDecision(NamedTuple):
    """The decision on the gradients of a step, before any gradient is applied.

    Attributes:
        apply: Whether they are applied; None if only the device knows.
        stats: The statistics for the rule; None if the rule is not updated.
        overflow: The result on the device: float32 tensor, 1 to skip and 0 to apply.
        divisor: The divisor for a fused optimizer, or None.
        empty: Whether there was no gradient, on any process.
    """

    apply: bool | None
    stats: GradientStats | None = None
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
        return self.stats is None and not self.empty


class Engine:
    """Loss scaling of the gradients of one optimizer.

    Args:
        inner: The optimizer.
        scale: The loss scale, a `LossScale`.
        clip_norm: The largest norm of the unscaled gradients, or None.
        process_group: As `ranks.groups_of` takes it.

    Attributes:
        rule: The rule that moves the loss scale.
        record: The state of its gradients.
        last_info: What `info` returned last.
        is_joined: Whether this is within a `torch.distributed.algorithms.Join`.
    """

    is_joined = False

    def __init__(
        self,
        inner: Optimizer,
        scale: LossScale,
        clip_norm: float | None = None,
        process_group: ranks.Groups = None,
    ) -> None:
        self.inner, self.scale, self.rule = inner, scale, scale.rule
        self.clip_norm, self.process_group = clip_norm, process_group
        self.last_info = ParameterInfo(ranks.parameters_of(self.inner), process_group)
        self._first_steps = FirstSteps()
        self.record = GradientRecord()
        self._forget = register(self, self.last_info)

    def info(self) -> ParameterInfo:
        """Facts about the parameters that the optimizer has now."""
        parameters = ranks.parameters_of(self.inner)
        if not self.last_info.is_of(parameters):
            self._forget()
            self.last_info = ParameterInfo(parameters, self.process_group)
            self._forget = register(self, self.last_info)
        return self.last_info

    def watch_steps(self) -> None:
        """Refuses a direct step of the inner optimizer on scaled gradients."""
        watched = weakref.ref(self)

        def hook(optimizer: Optimizer, args: object, kwargs: object) -> None:
            now = None if torch.compiler.is_compiling() else watched()
            if now is not None:
                now.check_unscaled("step", optimizer)

        hook.of_lossscale = "engine"  # type: ignore[attr-defined]
        for each in with_parts(self.inner):
            hooks = getattr(each, "_optimizer_step_pre_hooks", None)
            # An object with the interface of an optimizer may have no hooks.
            if hooks is None:
                continue
            mine = [
                k for k, other in hooks.items() if getattr(other, "of_lossscale", 0) == "engine"
            ]
            for key in mine:
                del hooks[key]
            each.register_step_pre_hook(hook)

    # --- What the gradients are ---------------------------------------------------------------

    def check_unscaled(self, name: str, optimizer: Optimizer) -> None:
        """Checks that a method of an inner optimizer finds no scaled gradients."""
        record = self.record
        if not record.is_scaled:
            return
        info = self.info()
        if info.first_gradient() is None:
            return
        # A set may be left that holds none of them: another optimizer has cleared those they share.
        if record.unseen or holding(info):
            raise CallOrderError(
                f"{name}() of {type(optimizer).__name__} would use gradients that are multiplied "
                "by the loss scale. Call optimizer.backward(loss) in place of "
                "optimizer.scale_loss(loss).backward(), or unscale_() first; and step() of the "
                "LossScaleOptimizer."
            )

    def check_known(self, info: ParameterInfo) -> None:
        """Checks that no gradient came with a group that was added after the last loss."""
        record = self.record
        known = record.known or record.known_before
        if known is None or info is known or (record.known is None and record.unseen):
            return
        if unheld(info.without(known.ids)).first_gradient() is None:
            return
        raise CallOrderError(
            "A parameter group with gradients was added after a loss was scaled. It is unknown "
            "whether these gradients are scaled. Clear them before you add the group, for example "
            "by model.zero_grad()."
        )

    def account_for_cleared(self, by: Multiplier | None = None) -> bool:
        """Counts a step that was left out, before a loss with a scale adds to the gradients.

        Args:
            by: The `Multiplier` of the loss; None if its `backward` could not be seen.

        Returns:
            Whether gradients were cleared that had been checked.
        """
        record = self.record
        if record.found is None or (by and any(each.by is by for each in record.sets)):
            return False
        is_cleared = record.are_gone(self.info())
        if is_cleared:
            wrapper = living_wrapper(self.inner)
            if wrapper is not None:
                wrapper._leave_out()
            record.reset()
        return is_cleared

    def put_into_set(
        self, by: Multiplier, info: ParameterInfo, task: int, *, own: Engine, certain: bool = True
    ) -> ScaledGradients:
        """Puts gradients of parameters into the set of a loss that will add to them.

        Args:
            by: The `Multiplier` of the loss.
            info: The parameters.
            task: The backward pass.
            own: The engine that scaled the loss.
            certain: Whether the loss reaches them for certain.
        """
        record = self.record
        target = next((each for each in record.sets if each.by is by), None)
        if target is None:
            # What was infinite before, and what the loss may not reach, is no overflow of it.
            left = own is not self and bool(info.ids) and self._overflowed_before(by, task)
            target = ScaledGradients(by)
            if certain and left is False:
                target = by.gradients = by.gradients or target
            if torch.is_tensor(left):
                target.left = left, own
                own.record.sets.append(target)
        if own is self and self.is_joined and record.has_own_loss and self.info().groups:
            raise UnsupportedError(
                "Within Join, an optimizer with process groups must step after each backward(): a "
                "process without data takes one step for each forward pass. Accumulate outside of "
                "Join. With DDP alone, leave `process_group` out."
            )
        for each in owners(info):
            # Decided on gradients that it shares, and that are about to change.
            each.record.decision = None
        self._see()
        target.begin_pass(task)
        target.add(info)
        if target not in record.sets:
            record.sets.append(target)
        if record.found is not None:
            # Some may have been replaced.
            record.remember(self.info())
        record.has_own_loss = record.has_own_loss or own is self
        if task != -1 or record.known is not None:
            record.known = info if own is self else self.info()
        if task != -1:
            record.known_before = record.known
        record.decision, record.is_cleared = None, False
        return target

    def _overflowed_before(self, by: Multiplier, task: int) -> Flag:
        """Whether gradients overflowed that a loss of another optimizer is about to reach."""
        record, info = self.record, self.info()
        if not info.has_half:
            # Within a change from one scale to the other nothing is checked.
            for each in holding(info):
                if each.by is not by and not each.task == task != -1:
                    each.settle(whole=True)
        if record.found is None:
            return record.left_behind(info)
        return bool(record.found) if record.found.device.type == "cpu" else record.found

    def _see(self) -> list[ScaledGradients]:
        """Makes a set of what is scaled by a loss whose backward pass could not be seen."""
        if not self.record.unseen:
            return []
        self.record.unseen = False
        # A new one, which a CUDA graph reads in each replay.
        scale = self.scale
        by = Multiplier(scale.scale_on(scale.home), self.rule, scale.number)
        return [self.hold(unheld(self.info()), by)]

    def hold(self, info: ParameterInfo, by: Multiplier) -> ScaledGradients:
        """Makes a set of gradients that are multiplied already."""
        made = ScaledGradients(by)
        made.info = info
        self.record.sets.append(made)
        return made

    def settle(
        self,
        sets: Iterable[ScaledGradients] | None = None,
        *,
        factor: gradients.Factor | None = None,
    ) -> None:
        """Unscales and checks the gradients of the optimizer, with all of the same losses.

        Args:
            sets: The sets that hold them, if these are known.
            factor: As for `ScaledGradients.settle`.
        """
        sets = [*(holding(self.info()) if sets is None else sets), *self._see()]
        self._check_arrived(sets)
        for each in sets:
            if each not in self.record.sets:
                self.record.sets.append(each)
            each.settle(factor=factor)

    def gradient_factor(self) -> float:
        """The factor of the gradients, which a state saves: 1 if unscaled, 0 if there are none.

        Raises:
            CallOrderError: If it is not one number.
        """
        record, rest, numbers = self.record, self.info(), set()
        if rest.first_gradient() is None:
            return 0.0
        for each in holding(rest):
            assert each.by is not None
            numbers.add(float(each.by.scale_on(CPU)))
            rest = rest.without(each.info.ids)
        if (numbers or not record.is_nothing()) and rest.first_gradient() is not None:
            numbers.add(float(self.scale.scale_on(CPU)) if record.unseen else 1.0)
        if len(numbers) > 1:
            raise CallOrderError(
                "The gradients are multiplied by different loss scales, which a state cannot say. "
                "Call optimizer.unscale_() before you save it between backward() and step()."
            )
        return numbers.pop() if numbers else 0.0

    def check_restart(self, number: float) -> None:
        """Checks, before a state is loaded, that it says what multiplies the gradients.

        Raises:
            CallOrderError: If those that are there are multiplied by another number.
        """
        for each in holding(self.info()) if number else ():
            assert each.by is not None
            if float(each.by.scale_on(CPU)) != number and self.info().first_gradient() is not None:
                raise CallOrderError(
                    f"{number:g} multiplied the gradients when this state was saved, and another "
                    "number multiplies them now. Call optimizer.zero_grad() before "
                    "load_state_dict(), and restore the gradients after it."
                )

    def restart(self, number: float) -> None:
        """Starts with the gradients of a state, which `number` multiplies; 0 if there are none."""
        record, info = self.record, self.info()
        if not number:
            # Without gradients of its own, the sets are those of others, which may be loaded, too.
            if info.first_gradient() is not None:
                self.settle([each for each in record.sets if each.by is not None])
            record.reset()
            return
        # They may be assigned before or after this.
        for each in holding(info):
            each.leave(info)
        record.reset()
        self.hold(info, Multiplier(scalar(number, CPU), self.rule, number))
        record.has_own_loss, record.known = True, info

    def _check_arrived(self, sets: Sequence[ScaledGradients]) -> None:
        """Checks that a step within a backward pass finds no gradient that is still scaled."""
        if torch._C._current_graph_task_id() == -1:
            return
        ids = self.info().ids
        for each in sets:
            waiting = each.info.without(each.arrived(each.info).ids)
            if any(id(p) in ids and p.grad is not None for p in waiting.parameters):
                raise CallOrderError(
                    "step() was called in a backward pass before all gradients have arrived. Call "
                    "it after the backward pass, or make an optimizer for each parameter."
                )

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
        info, record = self.info(), self.record
        self.check_known(info)
        self._first_steps.check(info.parameters)
        mine = self._only_set(info)
        first, groups = info.first_gradient(), info.groups
        if first is None and not groups:
            return StepDecision(True, empty=True)
        # If no loss was scaled in this process, another may have scaled it.
        is_scaled = mine is not None or not record.is_nothing()
        by = self.scale.multiplier if mine is None or mine.by is None else mine.by
        measured = gradients.measure_everywhere(
            self.rule.needs, info, by.scale_on, are_scaled=mine is not None or not is_scaled
        )
        clips = bool(self.clip_norm) and not in_place
        unchecked = not (self.rule.checks_gradients or clips or self.scale.on_device)
        # A check divides them in the same pass, except for float16, which would flush to 0.
        wants_kernel = not in_place and (clips or unchecked or info.has_half)
        of_kernel = wants_kernel and first is not None and self._can_divide(mine)
        if clips and measured is None and self._norm_checks(info, by):
            decision = self._decide_by_norm(info, mine, is_scaled, of_kernel)
            if decision is not None:
                return decision
        leaves = of_kernel and (info.has_half or unchecked)
        divisor = by.scale_on(first.device) if leaves and first is not None else None
        if leaves and mine is not None:
            if not self.rule.checks_gradients and not gradients.lie_as_before(info):
                # The kernel would divide twice what shares memory.
                gradients.collect(info, allow_float16=True)
            self._give_up([mine], info)
            if unchecked and measured is None and not groups:
                return StepDecision(True, GradientStats(True), divisor=divisor)
        elif mine is not None:
            self.settle([mine])
        overflow = self._overflow(info, divisor, by)
        overflow, somebody_scaled = self._agreed(info, by, overflow, first is not None, is_scaled)
        decision = self._read(overflow, measured, first is not None, info, divisor)
        if not somebody_scaled:
            decision = decision._replace(stats=None)
        return self.clipped(decision) if clips else decision

    def _only_set(self, info: ParameterInfo) -> ScaledGradients | None:
        """The set of the gradients, if it is one and has no others; else they are unscaled."""
        record = self.record
        sets = [*holding(info), *(each for each in record.sets if each.by and each.left)]
        if record.divided is not None and not record.are_scaled(info):
            # By `get_unscaled_gradients`.
            self._give_up(sets, info)
            return None
        sets += self._see()
        if record.found is None and len(sets) == 1 and sets[0].info is info:
            return sets[0]
        self.settle(sets)
        return None

    def _can_divide(self, mine: ScaledGradients | None) -> bool:
        """Whether the optimizer's kernel may divide the gradients of a set."""
        # A kernel must not change one that is part of a graph.
        return mine is not None and not mine.has_graph and fused.can_unscale(self.inner)

    def _agreed(
        self, info: ParameterInfo, by: Multiplier, overflow: Tensor, here: bool, is_scaled: bool
    ) -> tuple[Tensor, bool | Tensor]:
        """Whether a gradient overflowed, and whether a loss was scaled, on any process."""
        groups = info.groups
        somebody_scaled: bool | Tensor = is_scaled
        # Processes of a given group may run different code, but send the same messages.
        if groups and (self.rule.checks_gradients or info.is_given or self.is_joined):
            overflow, somebody_scaled = ranks.agreed(overflow, here, is_scaled, groups)
        if not is_scaled and somebody_scaled:
            # The loss was scaled in another process.
            self.hold(info, by).settle()
        return overflow, somebody_scaled

    def _give_up(self, sets: Sequence[ScaledGradients], info: ParameterInfo) -> None:
        """Takes the gradients out of their sets: something else divides them."""
        self.record.unseen = False
        self._check_arrived(sets)
        for each in sets:
            each.leave(each.arrived(info))
        self.record.drop(info)

    def _norm_checks(self, info: ParameterInfo, by: Multiplier) -> bool:
        """Whether a norm, which is finite only if each number is, can take the place of a check."""
        found = self.record.found is not None and bool(info.groups)
        may_differ = found or info.is_given
        return not (self.scale.on_device or may_differ or info.has_half or by.number is None)

    def _decide_by_norm(
        self, info: ParameterInfo, mine: ScaledGradients | None, is_scaled: bool, of_kernel: bool
    ) -> StepDecision | None:
        """Clips by a norm that checks for overflow as well; None if it cannot tell."""
        given = gradients.collect(info)
        by = None if mine is None else mine.by
        scale = 1.0 if by is None or by.number is None else by.number
        norm, found = gradients.grad_norm(given, info), self.record.found
        if found is not None:
            norm = torch.where(found.to(norm.device) > 0, torch.inf, norm)
        total = read(norm) / scale
        # A norm may overflow though no element does, and unscaling may overflow some. At a scale
        # far below 1 the squares of elements are 0.
        if not total <= _LARGEST or total * scale < _SMALLEST_NORM:
            return None
        largest = self.clip_norm or 0.0
        # Computed on the host, so that the device is waited for once.
        clip = gradients.coefficient(scalar(total, CPU, norm.dtype), largest)
        dtypes = {group[0].dtype for group in given.dense_groups}
        divisor = None
        # A float32 number has too few digits for float64.
        if of_kernel and len(given.dense_groups) == 1 and torch.float64 not in dtypes:
            divisor = scalar(float(scale / clip), given.device)
        if (
            divisor is not None
            and mine is not None
            and scale * max(total / largest, 1.0) < _LARGEST / 2
        ):
            self._give_up([mine], info)
        elif mine is not None:
            divisor = None
            self.settle([mine], factor=filled(clip / scale))
        else:
            gradients.unscale_(given, filled(clip))
        return StepDecision(True, GradientStats(True) if is_scaled else None, divisor=divisor)

    def _overflow(self, info: ParameterInfo, divisor: Tensor | None, by: Multiplier) -> Tensor:
        """Whether any gradient overflowed: float32 scalar tensor, 1 or 0. None is changed.

        Args:
            info: Their parameters.
            divisor: What the optimizer's kernel will divide them by, or None.
            by: The `Multiplier` that has this number.
        """
        known, found = self.record.found, {}
        if known is not None and self.record.are_as_checked(info):
            return known
        if self.rule.checks_gradients:
            given = gradients.collect(info, allow_float16=divisor is not None or known is not None)
            if divisor is not None and is_below_one(by):
                # With a scale below 1 unscaling may overflow what is finite.
                found = gradients.check_quotients(given, by.scale_on)
            else:
                found = gradients.check(given)
        here = gradients.any_overflow(found.values())
        return here if known is None else torch.maximum(known, here.to(known.device))

    def _read(
        self,
        overflow: Tensor,
        measured: Tensor | None,
        has_gradients: bool,
        info: ParameterInfo,
        divisor: Tensor | None,
    ) -> StepDecision:
        """Decides by what all processes have found; the host reads all numbers in one transfer."""
        if self.scale.on_device:
            return self._on_device(overflow, measured, has_gradients, info, divisor)
        if measured is None:
            found = read(overflow) if self.rule.checks_gradients else 0.0
        else:
            together = torch.cat([overflow.reshape(1), measured.to(overflow)])
            found, *rest = read_all(together).tolist()
            measured = torch.tensor(rest, dtype=measured.dtype, device=CPU)
        stats = gradients.as_stats(self.rule.needs, measured, not found > 0)
        return StepDecision(not found > 0, stats, divisor=divisor, empty=bool(found < 0))

    def _on_device(
        self,
        overflow: Tensor,
        measured: Tensor | None,
        has_gradients: bool,
        info: ParameterInfo,
        divisor: Tensor | None,
    ) -> StepDecision:
        overflow = overflow.to(info.devices[0])
        if self.rule.checks_gradients and info.groups:
            # A process with a gradient knows that the step is not empty.
            if not has_gradients and overflow.item() < 0:
                return StepDecision(True, empty=True)
            overflow = overflow.clamp(min=0.0)
        finite = None if measured is None else overflow == 0
        stats = gradients.as_stats(self.rule.needs, measured, finite)
        # Loaded settings may have turned off the fused kernel.
        waits = fused.makes_state(parts_of(self.inner)) or not fused.can_skip(self.inner)
        applied = not overflow.item() if waits else None
        return StepDecision(applied, stats, overflow, divisor)

    @torch.no_grad()
    def clipped(self, decision: StepDecision) -> StepDecision:
        """Clips the gradients of a step, or changes what a kernel is still to divide them by."""
        if not self.clip_norm or decision.apply is False or decision.empty:
            return decision
        info, divisor = self.info(), decision.divisor
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
            device = self.info().devices[0]
            divisor = scalar(1.0, device) if divisor is None else divisor
            overflow = scalar(0.0, device) if overflow is None else overflow
        if divisor is None and overflow is None:
            return inner.step(*args, **more)
        with fused.attributes(list(filter(fused.can_skip, parts_of(inner))), divisor, overflow):
            return inner.step(*args, **more)

    def step_without_data(self) -> None:
        """Takes part in a step of the processes that still have data, if they send messages."""
        info = self.info()
        if not info.groups:
            return
        device = info.devices[0] if info.devices else CPU
        overflow, _ = ranks.agreed(scalar(0.0, device), False, False, info.groups)
        decision = self._read(overflow, None, False, info, None)
        if not decision.empty:
            self.update(decision)

    def skipped(self, found: Tensor) -> StepDecision:
        """The decision on gradients that were cleared, with the statistics of a skipped step."""
        finite: Flag = False
        if self.scale.on_device:
            finite = scalar(False, self.info().devices[0], torch.bool)
        # There are no gradients that it would divide.
        scale = self.scale.scale_on(self.scale.home)
        stats = gradients.compute(self.rule.needs, finite, [], scale, are_scaled=False)
        return StepDecision(None, stats, overflow=found)

    def update(self, decision: StepDecision) -> None:
        """Updates the scale and counts the step."""
        skipped: Flag = not decision.apply
        if self.scale.on_device:
            found = decision.overflow
            skipped = scalar(float(skipped), self.info().devices[0]) if found is None else found
        if decision.stats is not None:
            self.scale.update(decision.stats, skipped)
        self.scale.count(skipped)
