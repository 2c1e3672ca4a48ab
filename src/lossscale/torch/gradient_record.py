"""The state of an optimizer's gradients since its last step, and what may be done with them now."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lossscale.errors import CallOrderError
from lossscale.torch import gradients, ranks
from lossscale.torch.optimizer_list import with_parts
from lossscale.torch.ranks import ParameterInfo
from lossscale.torch.scale import Flag, LossScale, Multiplier
from lossscale.torch.scaled_gradients import ScaledGradients, holding, owners, register, unheld
from lossscale.torch.scaling import CPU, real_parts, scalar

if TYPE_CHECKING:
    from lossscale.torch.engine import StepDecision

Stamps: TypeAlias = tuple[list[int], list[int]]
"""Values that change if a gradient is written to, or replaced by another tensor."""
_VERSION = operator.attrgetter("_version")
_HOOK = "record"
"""The mark of our hook, by which another one finds it."""


def _stamps(info: ParameterInfo) -> Stamps:
    grads = info.gradients()
    with ranks.UNSEEN():
        return list(map(id, grads)), list(map(_VERSION, grads))


class OverflowCheck(NamedTuple):
    """The result of checking unscaled gradients.

    Attributes:
        overflow: Whether one was infinite or NaN, here or in another optimizer that the same loss
            reaches: float32 scalar tensor, 1 or 0.
        ids: The parameters whose gradients were checked, by id.
        stamps: The stamps of all gradients then; None if nobody needs them.
        last: The last gradient; None if there was none.
        version: Its version.
    """

    overflow: Tensor
    ids: frozenset[int]
    stamps: Stamps | None
    last: Tensor | None
    version: int

    @classmethod
    def of(
        cls, overflow: Tensor, ids: frozenset[int], stamps: Stamps | None, info: ParameterInfo
    ) -> OverflowCheck:
        """The result for the gradients that are there now."""
        # No weak reference, which would forbid `model.to` to swap the gradient for another one.
        last = info.last_gradient()
        return cls(overflow, ids, stamps, last, 0 if last is None else last._version)

    def renewed(self, info: ParameterInfo) -> OverflowCheck:
        """The same result, with the last gradient that is there now."""
        return OverflowCheck.of(self.overflow, self.ids, self.stamps, info)

    def covers(self, info: ParameterInfo) -> bool:
        """Whether all gradients were checked and, as far as can be seen, stayed as they were."""
        # `.data` of a gradient hides what is done to it, and programs average that by hand.
        may_hide = not info.groups and ranks.has_others()
        return info.ids <= self.ids and not may_hide and self.stamps == _stamps(info)

    def is_unchanged(self, info: ParameterInfo) -> bool:
        """Whether the last gradient is the same one, unchanged."""
        last = self.last
        return last is not None and info.last_gradient() is last and last._version == self.version

    def is_gone(self, info: ParameterInfo) -> bool:
        """Whether the gradients that were checked have been cleared."""
        if self.last is None or not any(p.grad is self.last for p in info.parameters):
            return True
        if self.version == self.last._version:
            return False
        # It was changed: to zeros, if gradients were cleared in place.
        grads = (p.grad for p in info.parameters if p.grad is not None)
        return not any(part.any() for g in grads for part in real_parts(ranks.local(g)))


class GradientRecord:
    """The state of an optimizer's gradients since its last step.

    A plain object, because compiled code loses what it writes to an optimizer.

    Only its methods change it. Which fields each moves together:

    | method | sets | clears |
    |---|---|---|
    | `put_into_set` | `sets`; `has_own_loss` of an own loss; in a pass, both `parameters_at_*` | |
    | | | `decision` (of all owners), `is_cleared` |
    | `note_unseen_loss` | `has_unseen_loss`, `has_own_loss` | `is_cleared` |
    | `settle`, `note_check` | `last_check` | what is settled of `sets`, `has_unseen_loss` |
    | `release` | | what is released of `sets`, `has_unseen_loss` |
    | `note_decision` | `decision`, `parameters_at_loss` | `has_unseen_loss` |
    | `note_step` | `after_skip`, if it may be skipped and gradients stay | as `reset` |
    | `note_zero_grad` | `is_cleared`, after a check of own losses | as `clear`, but |
    | | | `has_unseen_loss` stays |
    | `reset` | | all but `sets`, `parameters_at_pass` and the flags at the end |
    | `clear` | | as `reset`, and `sets` |
    | `restart` | without gradients nothing; else `sets`, `has_own_loss`, `parameters_at_loss` | |
    | | | as `reset` |

    Args:
        inner: The optimizer.
        scale: The loss scale.
        process_group: As `ranks.groups_of` takes it.

    Attributes:
        rule: The rule that moves the loss scale.
        leave_out: A weak reference to what counts a step that was left out.
        last_info: What `info` returned last. A verb calls `info` once, and then reads this.
        sets: The sets of scaled gradients that a loss of this optimizer, or one that reaches it,
            has made.
        last_check: The result of checking unscaled gradients; None if they were not checked.
        has_unseen_loss: Whether a loss was scaled whose `backward` cannot be seen (compiled code).
        has_own_loss: Whether the optimizer itself scaled a loss; other optimizers' losses may
            reach its parameters too.
        decision: The decision of all processes, if `unscale_` or a step made one.
        parameters_at_loss: The parameters at the last decision, or when a pass of a scaled loss
            last reached some.
        parameters_at_pass: The parameters when a pass last left gradients of others scaled, which a
            later group may bring; None if none has.
        is_cleared: Whether `zero_grad` was called after gradients of its own losses were checked.
        after_skip: If gradients stay after a step that may have been skipped: the id and the
            version of the last one, and whether the step was skipped.
        in_backward: Whether `backward` runs.
        warned: Whether the user was warned of a step without a scaled loss.
    """

    leave_out: weakref.WeakMethod[Callable[[], None]]

    def __init__(self, inner: Optimizer, scale: LossScale, process_group: ranks.Groups) -> None:
        self.inner, self.scale, self.rule = inner, scale, scale.rule
        self.process_group = process_group
        self.warned = self.in_backward = False
        self.parameters_at_pass: ParameterInfo | None = None
        # One list for good: what `register` keeps outlives the record.
        self.sets: list[ScaledGradients] = []
        self.last_info = ParameterInfo(ranks.parameters_of(inner), process_group)
        self._forget = register(self, self.last_info)
        self.reset()

    def info(self) -> ParameterInfo:
        """Facts about the parameters that the optimizer has now."""
        parameters = ranks.parameters_of(self.inner)
        if not self.last_info.is_of(parameters):
            self._forget()
            self.last_info = ParameterInfo(parameters, self.process_group)
            self._forget = register(self, self.last_info)
        return self.last_info

    def reset(self) -> None:
        """Starts again, after a step or when the gradients were cleared."""
        self.last_check: OverflowCheck | None = None
        self.has_unseen_loss = self.has_own_loss = self.is_cleared = False
        self.decision: StepDecision | None = None
        self.parameters_at_loss: ParameterInfo | None = None
        self.after_skip: tuple[int, int, Flag] | None = None

    def clear(self) -> None:
        """The gradients of all parameters are cleared: none is scaled any more."""
        info = self.info()
        for scaled in holding(info):
            scaled.leave(info)
        self.sets.clear()
        self.reset()

    # --- What the gradients are ---------------------------------------------------------------

    @property
    def multiplier(self) -> Multiplier | None:
        """The `Multiplier` of the gradients, or of some; None if no set has any."""
        return next((s.multiplier for s in self.sets if s.multiplier is not None), None)

    @property
    def is_scaled(self) -> bool:
        """Whether some gradients are scaled."""
        return self.has_unseen_loss or self.multiplier is not None

    @property
    def overflow(self) -> Tensor | None:
        """The result of the last check on the device; None if the gradients were not checked."""
        return None if self.last_check is None else self.last_check.overflow

    def no_loss_scaled(self) -> bool:
        """Whether no loss was scaled since the last step."""
        return not self.is_scaled and self.last_check is None

    def only_set(self) -> ScaledGradients | None:
        """The set of the gradients, if it is one and has no others; else they are unscaled."""
        info = self.last_info
        spoiled = (s for s in self.sets if s.multiplier is not None and s.spoiled_before)
        sets = [*holding(info), *spoiled]
        sets += self._adopt_unseen_loss()
        if self.last_check is None and len(sets) == 1 and sets[0].info is info:
            return sets[0]
        self.settle(sets)
        return None

    # --- What is done to them -----------------------------------------------------------------

    def note_check(self, overflow: Tensor, checked: ParameterInfo) -> None:
        """Gradients of a set were checked; an overflow stays until the next step."""
        info, ids = self.info(), checked.ids
        if self.last_check is not None:
            before = self.last_check.overflow
            overflow = torch.maximum(before, overflow.to(before.device))
            ids = ids if checked is info else ids | self.last_check.ids
        self.last_check = OverflowCheck.of(overflow, ids, _stamps(info), info)
        self._drop_empty_sets()

    def note_unseen_loss(self) -> None:
        """A loss was scaled whose `backward` cannot be seen."""
        self.has_unseen_loss = self.has_own_loss = True
        self.is_cleared = False

    def note_decision(self, decision: StepDecision, overflow: Tensor | None = None) -> None:
        """All processes have decided.

        Args:
            decision: The decision.
            overflow: Its tensor, if the gradients stay unscaled and a step is still to come.
        """
        self.has_unseen_loss = False
        self.decision, self.parameters_at_loss = decision, self.last_info
        if overflow is not None:
            self.last_check = OverflowCheck.of(overflow, self.last_info.ids, None, self.last_info)

    def note_step(self, decision: StepDecision) -> None:
        """A step is over."""
        self.reset()
        last = None if decision.apply is True else self.info().last_gradient()
        if last is not None:
            # Infinite ones that stay are no overflow of a later loss. By the id: nothing keeps a
            # gradient between steps.
            self.after_skip = id(last), last._version, decision.skipped

    def note_zero_grad(self) -> None:
        """`zero_grad` is called."""
        # The `backward` of a loss that nobody sees is still to come.
        unseen = self.has_unseen_loss
        was_checked = self.last_check is not None and self.has_own_loss
        self.clear()
        self.has_unseen_loss = self.has_own_loss = unseen
        self.is_cleared = was_checked

    def put_into_set(
        self,
        multiplier: Multiplier,
        info: ParameterInfo,
        task: int,
        *,
        of_loss: GradientRecord,
        certain: bool = True,
    ) -> ScaledGradients:
        """Puts gradients of parameters into the set of a loss that will add to them.

        Args:
            multiplier: The `Multiplier` of the loss.
            info: The parameters.
            task: The backward pass.
            of_loss: The record of the optimizer that scaled the loss.
            certain: Whether the loss reaches them for certain.
        """
        is_own = of_loss is self
        target = next((s for s in self.sets if s.multiplier is multiplier), None)
        if target is None:
            # What was infinite before, and what the loss may not reach, is no overflow of it.
            spoiled = not is_own and bool(info.ids) and self._overflowed_before(multiplier, task)
            target = ScaledGradients(multiplier)
            if certain and spoiled is False:
                target = multiplier.gradients = multiplier.gradients or target
            if isinstance(spoiled, Tensor):
                target.spoiled_before = spoiled, weakref.ref(of_loss)
                of_loss.sets.append(target)
        for record in owners(info):
            # Decided on gradients that it shares, and that are about to change.
            record.decision = None
        self._adopt_unseen_loss()
        target.begin_pass(task)
        target.add(info)
        if target not in self.sets:
            self.sets.append(target)
        if self.last_check is not None:
            # Some may have been replaced.
            self.last_check = self.last_check.renewed(self.last_info)
        self.has_own_loss = self.has_own_loss or is_own
        if task != -1 or self.parameters_at_loss is not None:
            self.parameters_at_loss = self.last_info
        if task != -1:
            self.parameters_at_pass = self.parameters_at_loss
        self.decision, self.is_cleared = None, False
        return target

    def _overflowed_before(self, multiplier: Multiplier, task: int) -> Flag:
        """Whether gradients overflowed that a loss of another optimizer is about to reach."""
        info = self.info()
        if not info.has_half:
            # Within a change from one scale to the other nothing is checked.
            for scaled in holding(info):
                in_this_pass = task != -1 and scaled.task == task
                if scaled.multiplier is not multiplier and not in_this_pass:
                    scaled.settle(whole=True)
        if self.overflow is not None:
            is_on_host = self.overflow.device.type == "cpu"
            return bool(self.overflow) if is_on_host else self.overflow
        last = None if self.after_skip is None else info.last_gradient()
        if self.after_skip is None or last is None:
            return False
        *key, skipped = self.after_skip
        return skipped if key == [id(last), last._version] else False

    def _adopt_unseen_loss(self) -> list[ScaledGradients]:
        """Makes a set of what is scaled by a loss whose backward pass could not be seen."""
        if not self.has_unseen_loss:
            return []
        self.has_unseen_loss = False
        # A new one, which a CUDA graph reads in each replay.
        scale = self.scale
        multiplier = Multiplier(scale.scale_on(scale.home), self.rule, scale.number)
        return [self.hold(unheld(self.info()), multiplier)]

    def hold(self, info: ParameterInfo, multiplier: Multiplier) -> ScaledGradients:
        """Makes a set of gradients that are multiplied already."""
        made = ScaledGradients(multiplier)
        made.info = info
        self.sets.append(made)
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
        sets = [*(holding(self.info()) if sets is None else sets), *self._adopt_unseen_loss()]
        self._check_arrived(sets)
        for scaled in sets:
            if scaled not in self.sets:
                self.sets.append(scaled)
            scaled.settle(factor=factor)

    def release(self, sets: Sequence[ScaledGradients]) -> None:
        """Takes the gradients out of their sets: something else divides them."""
        self.has_unseen_loss = False
        self._check_arrived(sets)
        for scaled in sets:
            scaled.leave(scaled.arrived(self.last_info))
        self._drop_empty_sets()

    def _drop_empty_sets(self) -> None:
        """Drops the sets that hold none of its gradients any more."""
        ids = self.last_info.ids
        held = [s for s in self.sets if s.multiplier is not None]
        self.sets[:] = [s for s in held if s.spoiled_before or not s.info.ids.isdisjoint(ids)]

    # --- Losses and steps that were not seen --------------------------------------------------

    def watch_steps(self) -> None:
        """Refuses a direct step of the inner optimizer on scaled gradients."""
        watched = weakref.ref(self)

        def hook(optimizer: Optimizer, args: object, kwargs: object) -> None:
            record = None if torch.compiler.is_compiling() else watched()
            if record is not None:
                record.check_unscaled("step", optimizer)

        hook.of_lossscale = _HOOK  # type: ignore[attr-defined]  # of a function
        for optimizer in with_parts(self.inner):
            hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
            # An object with the interface of an optimizer may have no hooks.
            if hooks is None:
                continue
            for key in [k for k, h in hooks.items() if getattr(h, "of_lossscale", "") == _HOOK]:
                del hooks[key]
            optimizer.register_step_pre_hook(hook)

    def count_left_out_step(self, multiplier: Multiplier | None = None) -> bool:
        """Counts a step that was left out, before a loss with a scale adds to the gradients.

        Args:
            multiplier: That of the loss; None if its `backward` could not be seen.

        Returns:
            Whether gradients were cleared that had been checked.
        """
        adds_up = multiplier and any(s.multiplier is multiplier for s in self.sets)
        if self.last_check is None or adds_up or not self.last_check.is_gone(self.info()):
            return False
        leave_out = self.leave_out()
        if leave_out is not None:
            leave_out()
        self.reset()
        return True

    def account_for_unseen_backward(self) -> None:
        """Accounts for the backward pass of a scaled loss that could not be observed."""
        if not self.has_unseen_loss or self.last_check is None:
            return
        if self.count_left_out_step():
            self.has_unseen_loss = self.has_own_loss = True
        elif self.last_check.is_unchanged(self.info()):
            self.has_unseen_loss = False
        else:
            raise CallOrderError(
                "unscale_() was called before the last backward(), which added scaled gradients "
                "to unscaled ones. Call optimizer.zero_grad() now, and unscale_() once per step, "
                "after the last backward()."
            )

    # --- Checks -------------------------------------------------------------------------------

    def check_unscaled(self, name: str, optimizer: Optimizer) -> None:
        """Checks that a method of an inner optimizer finds no scaled gradients."""
        if not self.is_scaled:
            return
        info = self.info()
        if info.first_gradient() is None:
            return
        # A set may be left that holds none of them: another optimizer has cleared those they share.
        if self.has_unseen_loss or holding(info):
            raise CallOrderError(
                f"{name}() of {type(optimizer).__name__} would use gradients that are multiplied "
                "by the loss scale. Call optimizer.backward(loss) in place of "
                "optimizer.scale_loss(loss).backward(), or unscale_() first; and step() of the "
                "LossScaleOptimizer."
            )

    def check_no_new_group(self) -> None:
        """Checks that no gradient came with a group that was added after the last loss."""
        at_loss, info = self.parameters_at_loss, self.last_info
        before = at_loss or self.parameters_at_pass
        if before is None or info is before or (at_loss is None and self.has_unseen_loss):
            return
        if unheld(info.without(before.ids)).first_gradient() is None:
            return
        raise CallOrderError(
            "A parameter group with gradients was added after a loss was scaled. It is unknown "
            "whether these gradients are scaled. Clear them before you add the group, for example "
            "by model.zero_grad()."
        )

    def _check_arrived(self, sets: Iterable[ScaledGradients]) -> None:
        """Checks that a step within a backward pass finds no gradient that is still scaled."""
        if torch._C._current_graph_task_id() == -1:
            return
        ids = self.info().ids
        for scaled in sets:
            waiting = scaled.info.without(scaled.arrived(scaled.info).ids)
            if any(id(p) in ids and p.grad is not None for p in waiting.parameters):
                raise CallOrderError(
                    "step() was called in a backward pass before all gradients have arrived. Call "
                    "it after the backward pass, or make an optimizer for each parameter."
                )

    # --- Saved between `backward` and `step` --------------------------------------------------

    def gradient_factor(self) -> float:
        """The factor of the gradients, which a state saves: 1 if unscaled, 0 if no loss made any.

        Raises:
            CallOrderError: If it is not one number.
        """
        rest, numbers = self.info(), set()
        if rest.first_gradient() is None:
            return 0.0
        for scaled in holding(rest):
            numbers.add(scaled.number())
            rest = rest.without(scaled.info.ids)
        if (numbers or not self.no_loss_scaled()) and rest.first_gradient() is not None:
            numbers.add(float(self.scale.scale_on(CPU)) if self.has_unseen_loss else 1.0)
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
        for scaled in holding(self.info()) if number else ():
            if scaled.number() != number and self.info().first_gradient() is not None:
                raise CallOrderError(
                    f"{number:g} multiplied the gradients when this state was saved, and another "
                    "number multiplies them now. Call optimizer.zero_grad() before "
                    "load_state_dict(), and restore the gradients after it."
                )

    def restart(self, number: float) -> None:
        """Starts with the gradients of a state, which `number` multiplies; 0 if there are none."""
        info = self.info()
        if not number:
            # Without gradients of its own, the sets are those of others, which may be loaded, too.
            if info.first_gradient() is not None:
                self.settle([s for s in self.sets if s.multiplier is not None])
            self.reset()
            return
        # They may be assigned before or after this.
        for scaled in holding(info):
            scaled.leave(info)
        self.reset()
        self.hold(info, Multiplier(scalar(number, CPU), self.rule, number))
        self.has_own_loss, self.parameters_at_loss = True, info
