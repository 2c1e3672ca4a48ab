"""What multiplies the gradients of an optimizer since its last step: one number, or nothing.

All `.grad` of a wrapper are multiplied by the scale of one loss, or all are unscaled. Wrappers with
a parameter in common, directly or through others, always have the same number. A loss puts all
wrappers that it reaches on its number. When gradients of one of them must be unscaled, those of all
wrappers with that number are, each gradient once, and an overflow concerns them all.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lossscale.errors import CallOrderError, GradientsError
from lossscale.torch import gradients, ranks
from lossscale.torch.gradients import OverflowCheck, stamps
from lossscale.torch.optimizer_list import watch_step
from lossscale.torch.ranks import ParameterInfo
from lossscale.torch.scale import Flag, LossScale, Multiplier
from lossscale.torch.scaling import CPU, scalar

if TYPE_CHECKING:
    from lossscale.torch.engine import StepDecision

_DIVIDED = "_divided_by_lossscale"
"""The mark of a gradient that a deleted wrapper divided: its id, and its version since then."""
ONE_FOR_SEVERAL = "Make one for both: LossScaleOptimizer([optimizer, other])."

_lock = threading.RLock()
"""Held while numbers change: autograd runs hooks in a thread for each device."""
_records: set[weakref.ref[GradientRecord]] = set()


def all_records() -> list[GradientRecord]:
    """The records of all optimizers."""
    # A list of the references first: other threads make optimizers meanwhile.
    return [record for each in list(_records) if (record := each()) is not None]


def sharing(ids: frozenset[int]) -> list[GradientRecord]:
    """The records that have one of these parameters, share one with such a record, and so on."""
    found: list[GradientRecord] = []
    rest = all_records()
    while more := [r for r in rest if not r.last_info.ids.isdisjoint(ids)]:
        rest = [r for r in rest if r.last_info.ids.isdisjoint(ids)]
        found += more
        ids = ids.union(*(r.last_info.ids for r in more))
    return found


class BackwardPass:
    """A backward pass of a scaled loss, while it runs.

    Records refer to it weakly: autograd forgets a pass that raised an exception.

    Args:
        task: Autograd's number of the pass; -1 for one that `backward` runs, whose gradients it
            unscales after the pass.
    """

    def __init__(self, task: int) -> None:
        self.task, self.runs = task, True

    def end(self) -> None:
        """Autograd has added all gradients."""
        self.runs = False


class GradientRecord:
    """The state of an optimizer's gradients since its last step.

    A plain object, because compiled code loses what it writes to an optimizer.

    Only its methods change it, and those of other records that have the same number:

    | event | method | sets | clears |
    |---|---|---|---|
    | a loss is about to add | `receive` | `has_own_loss` if own, `strays` unless unscaled after | |
    | | | the pass, `running` | `decision`, `is_cleared` |
    | | `put_on` | `multiplier` | |
    | a loss is not seen | `note_unseen_loss` | `has_unseen_loss`, `has_own_loss` | `is_cleared` |
    | | its first use | `multiplier` | `has_unseen_loss` |
    | gradients are unscaled | `settle` | `last_check` | `multiplier` |
    | | `release`, by a kernel | | `multiplier`, `has_unseen_loss` |
    | all processes have decided | `note_decision` | `decision`, `last_check` | `has_unseen_loss` |
    | a step is over | `note_step` | `after_skip`, if gradients stay that it may have skipped | as |
    | | | | `reset`, and `multiplier` |
    | `zero_grad` | `note_zero_grad` | `is_cleared` if own losses were checked, | as `clear`, but |
    | | | else `is_lost` | an unseen loss stays |
    | another process has scaled | `hold`, of all that share | `multiplier` | `decision` |
    | a state is loaded | `restart` | `has_own_loss`; as `hold` | as `reset` |
    | a group is added | `info` | `unknown`, or `last_check` | `multiplier` |

    `reset` clears what is known of one step: `last_check`, `decision`, `running` and all flags but
    `strays`. `clear` clears `multiplier`, `after_skip` and `unknown` as well.

    Args:
        inner: The optimizer.
        scale: The loss scale.
        process_group: As `ranks.groups_of` takes it.
        factor: What multiplies the gradients of a copy; 0 if there are none.

    Attributes:
        rule: The rule that moves the loss scale.
        leave_out: A weak reference to what counts a step that was left out.
        last_info: What `info` returned last. A verb calls `info` once, and then reads this.
        multiplier: What multiplies all gradients, those that are assigned later included; None if
            they are unscaled.
        running: A weak reference to the backward pass that adds to them; None if none began.
        before_pass: The stamp of a single parameter's gradient before that pass.
        last_check: The result of checking unscaled gradients; None if they were not checked.
        decision: The decision of all processes, if `unscale_` or a step made one.
        has_unseen_loss: Whether a loss was scaled whose `backward` cannot be seen, in compiled code
            or under capture.
        has_own_loss: Whether the optimizer itself scaled a loss; other optimizers' losses may
            reach its parameters too.
        is_cleared: Whether `zero_grad` was called after gradients of its own losses were checked.
        is_lost: Whether it was called before they were, since the last step.
        after_skip: If gradients stay after a step that may have been skipped: the id and the
            version of the last one, and whether the step was skipped.
        left_behind: Whether the next loss began with gradients of a skipped step.
        strays: Whether a pass may have left gradients of no optimizer scaled.
        unknown: Parameters of a new group that may have brought such gradients.
        warned: Whether the user was warned of a step without a scaled loss.
    """

    leave_out: weakref.WeakMethod[Callable[[], None]]

    def __init__(
        self, inner: Optimizer, scale: LossScale, process_group: ranks.Groups, factor: float = 0.0
    ) -> None:
        self.inner, self.scale, self.rule = inner, scale, scale.rule
        self.process_group = process_group
        self.warned = self.strays = False
        self.multiplier: Multiplier | None = None
        self.unknown: ParameterInfo | None = None
        self.last_info = ParameterInfo([], [])
        self.reset()
        info = ParameterInfo(ranks.parameters_of(inner), process_group)
        _records.add(weakref.ref(self, _records.discard))
        if factor:
            self.last_info = info
            self.restart(factor)
        else:
            self._take(info)

    def __del__(self) -> None:
        """Divides gradients that no other record knows of."""
        multiplier = getattr(self, "multiplier", None)
        if multiplier is None or sys.is_finalizing():
            return
        others = [r for r in all_records() if r.multiplier is multiplier and r is not self]
        known = frozenset().union(*(r.last_info.ids for r in others))
        # A record that shares some may be deleted at the same time.
        divided = {id(p) for p in self.last_info.parameters if _was_divided(p.grad)}
        info = self.last_info.without(known | divided)
        # Gradients in float16 stay: no wrapper divides them.
        with contextlib.suppress(GradientsError):
            _divide(info, multiplier, checks=False)
            for gradient in info.gradients():
                setattr(gradient, _DIVIDED, (id(gradient), gradient._version))

    def info(self) -> ParameterInfo:
        """Facts about the parameters that the optimizer has now."""
        parameters = ranks.parameters_of(self.inner)
        if not self.last_info.is_of(parameters):
            self._take(ParameterInfo(parameters, self.process_group))
        return self.last_info

    def _take(self, info: ParameterInfo) -> None:
        """Has other parameters from now on, whose gradients have the same number as its own."""
        before = self.last_info.ids
        others = [r for r in sharing(info.ids - before) if r is not self]
        if others and not before:
            self.multiplier = others[0].multiplier
        new = info.without(before.union(*(r.last_info.ids for r in others)))
        are_unscaled = info.ids != before and new.first_gradient() is not None
        if are_unscaled and (self.strays or self.decision):
            self.unknown, are_unscaled = new, False
        if are_unscaled or any(r.multiplier is not self.multiplier for r in others):
            for record in [self, *others]:
                record.settle()
        self.last_info = info

    def reset(self) -> None:
        """Starts again, after a step or when the gradients were cleared."""
        self.last_check: OverflowCheck | None = None
        self.decision: StepDecision | None = None
        self.has_unseen_loss = self.has_own_loss = self.is_cleared = self.is_lost = False
        self.running: weakref.ref[BackwardPass] | None = None
        self.before_pass: gradients.Stamps | None = None
        self.after_skip: tuple[int, int, Flag] | None = None
        self.left_behind: Flag = False

    def clear(self) -> None:
        """The gradients of all parameters were cleared: none is scaled any more."""
        partners = self._partners()
        self.unknown = self.multiplier = None
        self.reset()
        for record in partners:
            record.settle()

    def _partners(self) -> list[GradientRecord]:
        """The records of scaled gradients that share parameters with this one, itself included."""
        return [] if self.multiplier is None else sharing(self.info().ids)

    # --- What the gradients are ---------------------------------------------------------------

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients are scaled."""
        return self.has_unseen_loss or self.multiplier is not None

    def no_loss_scaled(self) -> bool:
        """Whether no loss was scaled since the last step."""
        return not self.is_scaled and self.last_check is None

    def is_alone(self) -> bool:
        """Whether the gradients are scaled and unchecked, and no other record has their number."""
        self._adopt_unseen_loss()
        self.check_arrived()
        if self.multiplier is None or self.last_check is not None:
            return False
        return all(r is self or r.multiplier is not self.multiplier for r in all_records())

    def pass_now(self) -> BackwardPass | None:
        """The backward pass that adds to the gradients now."""
        found = None if self.running is None else self.running()
        return found if found is not None and found.runs else None

    # --- What is done to them -----------------------------------------------------------------

    def receive(self, backward_pass: BackwardPass, own: bool) -> None:
        """A pass is about to add to the gradients, of an own loss or another optimizer's."""
        self.decision, self.is_cleared = None, False
        self.has_own_loss |= own
        self.strays |= backward_pass.task != -1
        # A pass within another one may add to what the other one adds to.
        if self.pass_now() is None:
            self.running = weakref.ref(backward_pass)
            is_single = len(self.last_info.parameters) == 1
            self.before_pass = stamps(self.last_info) if is_single else None

    def settle(self) -> None:
        """Divides and checks the gradients, with all that the same number multiplies."""
        with _lock:
            self._adopt_unseen_loss()
            multiplier = self.multiplier
            if multiplier is None:
                return
            records = [r for r in all_records() if r.multiplier is multiplier]
            if any(r.pass_now() for r in records):
                # The gradients of the other records are not complete.
                records = sharing(self.last_info.ids)
            for record in records:
                record.check_arrived()
                if record.last_info.has_half:
                    gradients.check_can_be_divided(record.last_info, record.inner)
            divided: frozenset[int] = frozenset()
            flags = []
            for record in records:
                flags.append(record._unscale(multiplier, divided))
                divided |= record.last_info.ids
            for record in records:
                record.multiplier = None
            pairs = list(zip(records, flags, strict=True))
            shared = gradients.any_overflow(record._fresh(flag) for record, flag in pairs)
            for record, flag in pairs:
                record.note_check(gradients.any_overflow([shared, flag]))

    def _unscale(self, multiplier: Multiplier, divided: frozenset[int]) -> Tensor:
        """Divides gradients that are not divided yet; whether any of the record's overflowed."""
        info, checks = self.last_info, self.rule.checks_gradients
        rest = info.without(divided)
        found = _divide(rest, multiplier, checks=checks)
        if checks and rest is not info:
            given = gradients.collect(info.without(rest.ids))
            return gradients.any_overflow([*found.values(), *gradients.check(given).values()])
        return gradients.any_overflow(found.values())

    def _fresh(self, overflow: Tensor) -> Tensor:
        """An overflow, unless it was there before the loss, which concerns no other wrapper."""
        before = self.left_behind if self.last_check is None else self.last_check.overflow
        if isinstance(before, Tensor):
            return overflow * (1.0 - before.to(overflow.device))
        return torch.zeros_like(overflow) if before else overflow

    def release(self) -> None:
        """A kernel divides the gradients."""
        self.has_unseen_loss, self.multiplier = False, None

    def hold(self, multiplier: Multiplier) -> None:
        """Another process has scaled the loss, or a state says what multiplies the gradients."""
        for record in sharing(self.last_info.ids):
            record.multiplier, record.decision = multiplier, None

    def note_check(self, overflow: Tensor) -> None:
        """Gradients were checked; an overflow stays until the next step."""
        if self.last_check is not None:
            overflow = gradients.any_overflow([self.last_check.overflow, overflow])
        self.last_check = OverflowCheck.of(overflow, stamps(self.last_info), self.last_info)

    def note_unseen_loss(self) -> None:
        """A loss was scaled whose `backward` cannot be seen."""
        self.has_unseen_loss = self.has_own_loss = True
        self.is_cleared = False

    def _adopt_unseen_loss(self) -> None:
        if not self.has_unseen_loss or self.last_info.first_gradient() is None:
            return
        self.has_unseen_loss, scale, now = False, self.scale, self.multiplier
        if now is None:
            # A new one, which a CUDA graph reads in each replay.
            self.multiplier = Multiplier(scale.scale_on(scale.home), self.rule, scale.number)
            put_on(sharing(self.last_info.ids), self.multiplier)
        elif now is not scale.multiplier and (now.number is None or now.number != scale.number):
            raise GradientsError(
                "Compiled code scaled a loss by another number than multiplies the gradients. "
                f"{ONE_FOR_SEVERAL}"
            )

    def note_decision(self, decision: StepDecision, overflow: Tensor | None = None) -> None:
        """All processes have decided.

        Args:
            decision: The decision.
            overflow: Its tensor, if the gradients stay unscaled and a step is still to come.
        """
        self.has_unseen_loss = False
        self.decision = decision
        if overflow is not None:
            self.last_check = OverflowCheck.of(overflow, None, self.last_info)

    def note_step(self, decision: StepDecision) -> None:
        """A step is over."""
        self.reset()
        self.multiplier = None
        last = None if decision.apply is True else self.last_info.last_gradient()
        if last is not None:
            # By the id: nothing keeps a gradient between steps.
            self.after_skip = id(last), last._version, decision.skipped

    def note_zero_grad(self) -> None:
        """`zero_grad` was called."""
        # The `backward` of a loss that nobody sees is still to come.
        unseen = self.has_unseen_loss
        own, was_checked = self.has_own_loss, self.last_check is not None
        is_lost = self.is_lost or (own and not was_checked)
        self.clear()
        self.has_unseen_loss = self.has_own_loss = unseen
        self.is_cleared, self.is_lost = was_checked and own, is_lost

    # --- Steps that are left out --------------------------------------------------------------

    def account_for_last_step(self, multiplier: Multiplier | None = None) -> bool:
        """Before a loss adds to the gradients: was a step left out, what did a skip leave behind?

        Args:
            multiplier: That of the loss; None if it was not seen.

        Returns:
            Whether gradients were cleared that had been checked.
        """
        if self.after_skip is not None:
            # Infinite gradients that stay are no overflow of this loss.
            last, (*key, skipped) = self.last_info.last_gradient(), self.after_skip
            stay = last is not None and key == [id(last), last._version]
            self.after_skip, self.left_behind = None, skipped if stay else False
        adds_up = self.multiplier is not None and self.multiplier is multiplier
        if self.last_check is None or adds_up or not self.last_check.is_gone(self.last_info):
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
        if self.account_for_last_step():
            self.has_unseen_loss = self.has_own_loss = True
        elif self.last_check.stamps in (None, stamps(self.info())):
            self.has_unseen_loss = False
        else:
            raise CallOrderError(
                "unscale_() was called before the last backward(), which added scaled gradients "
                "to unscaled ones. Call optimizer.zero_grad() now, and unscale_() once per step, "
                "after the last backward()."
            )

    # --- Checks -------------------------------------------------------------------------------

    def watch_steps(self) -> None:
        """Refuses a direct step of the inner optimizer on scaled gradients."""
        watched = weakref.ref(self)

        def hook(optimizer: Optimizer, args: object, kwargs: object) -> None:
            record = None if torch.compiler.is_compiling() else watched()
            if record is not None:
                record.check_unscaled("step", optimizer)

        watch_step(self.inner, hook)

    def check_unscaled(self, name: str, optimizer: Optimizer) -> None:
        """Checks that a method of an inner optimizer finds no scaled gradients."""
        if not self.is_scaled or self.info().first_gradient() is None:
            return
        raise CallOrderError(
            f"{name}() of {type(optimizer).__name__} would use gradients that are multiplied "
            "by the loss scale. Call optimizer.backward(loss) in place of "
            "optimizer.scale_loss(loss).backward(), or unscale_() first; and step() of the "
            "LossScaleOptimizer."
        )

    def check_no_new_group(self) -> None:
        """Checks that no gradient came with a group that was added after the last loss."""
        if self.unknown is None or self.unknown.first_gradient() is None:
            self.unknown = None
            return
        raise CallOrderError(
            "A parameter group with gradients was added after a loss was scaled. It is unknown "
            "whether these gradients are scaled. Clear them before you add the group, for example "
            "by model.zero_grad()."
        )

    def check_can_clear(self) -> None:
        """Checks that no backward pass is still to add to the gradients."""
        for record in self._partners():
            record.check_arrived()

    def check_arrived(self) -> None:
        """Checks, within a backward pass, that it has added the gradient of the one parameter."""
        if self.pass_now() is None or self.before_pass not in (None, stamps(self.last_info)):
            return
        raise CallOrderError(
            "step() was called in a backward pass before all gradients have arrived. Call "
            "it after the backward pass, or make an optimizer for each parameter."
        )

    def check_can_receive(self, multiplier: Multiplier, task: int) -> None:
        """Checks that no other pass is still adding to the gradients, which a loss reaches."""
        running = self.pass_now()
        if running is None or self.multiplier is None:
            return
        if self.multiplier is multiplier and -1 not in (task, running.task):
            return
        if running.task == task != -1:
            raise GradientsError(
                "One backward pass reaches the same parameters by losses with different "
                f"scales. {ONE_FOR_SEVERAL}"
            )
        raise GradientsError(
            "A backward pass that is still running adds to gradients that this loss reaches. "
            "Call backward() of this loss after that pass."
        )

    # --- Saved between `backward` and `step` --------------------------------------------------

    def gradient_factor(self) -> float:
        """What multiplies the gradients, for a state: 1 if unscaled, 0 if no loss made any."""
        if self.info().first_gradient() is None or self.no_loss_scaled():
            return 0.0
        unseen = self.scale.multiplier if self.has_unseen_loss else None
        multiplier = self.multiplier or unseen
        return 1.0 if multiplier is None else multiplier.value()

    def check_restart(self, factor: float) -> None:
        """Checks, before a state is loaded, that it says what multiplies the gradients.

        Raises:
            CallOrderError: If those that are there are multiplied by another number.
        """
        is_scaled = self.multiplier is not None and self.info().first_gradient() is not None
        if factor and is_scaled and factor != self.gradient_factor():
            raise CallOrderError(
                f"{factor:g} multiplied the gradients when this state was saved, and another "
                "number multiplies them now. Call optimizer.zero_grad() before "
                "load_state_dict(), and restore the gradients after it."
            )

    def restart(self, factor: float) -> None:
        """Starts with the gradients of a state, which a factor multiplies; 0 if there are none.

        They may be assigned before or after this.
        """
        info, now = self.info(), self.multiplier
        if not factor and info.first_gradient() is not None:
            self.settle()
        elif factor and (now is None or factor != now.value()):
            if any(map(_was_divided, info.gradients())):
                # By a wrapper that was deleted since.
                factor = 1.0
            self.hold(Multiplier(scalar(factor, CPU), self.rule, factor))
        self.reset()
        self.has_own_loss = bool(factor)


def put_on(records: Iterable[GradientRecord], multiplier: Multiplier) -> None:
    """Puts the gradients of records on the number of a loss, which is about to add to them."""
    with _lock:
        records = [r for r in records if r.multiplier is not multiplier]
        for record in records:
            record.settle()
        there = [r.last_info.ids for r in all_records() if r.multiplier is multiplier]
        multiplied: frozenset[int] = frozenset().union(*there)
        for record in records:
            info = record.last_info.without(multiplied)
            if info.first_gradient() is not None:
                gradients.multiply(info, multiplier)
            multiplied |= record.last_info.ids
            record.multiplier = multiplier


def _divide(
    info: ParameterInfo, multiplier: Multiplier, *, checks: bool
) -> dict[torch.device, Tensor]:
    """Divides gradients by a number, and checks each; results as of `gradients.unscale`."""
    divides = not multiplier.rule.powers_of_two
    return gradients.unscale(
        info,
        multiplier.scale_on if divides else multiplier.reciprocal_on,
        divides=divides,
        checks=checks,
        recheck=multiplier.may_be_below_one(),
    )


def _was_divided(gradient: Tensor | None) -> bool:
    """Whether a wrapper divided a gradient when it was deleted, and nothing changed it since."""
    # A copy has the mark, too, and another id.
    mark = getattr(gradient, _DIVIDED, None)
    return gradient is not None and mark == (id(gradient), gradient._version)
