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

if TYPE_CHECKING:
    from lossscale.torch.engine import StepDecision

ONE_FOR_SEVERAL = "Make one for both: LossScaleOptimizer([optimizer, other])."

_lock = threading.RLock()
"""Held while numbers change: autograd runs hooks in a thread for each device."""
_records: set[weakref.ref[GradientRecord]] = set()
_owners: dict[int, set[weakref.ref[GradientRecord]]] = {}
"""By the id of each parameter, the records that have it."""
_sharded: set[weakref.ref[GradientRecord]] = set()
_shared: set[int] = set()
"""The ids of parameters that more than one record has."""


def _living(references: Iterable[weakref.ref[GradientRecord]]) -> list[GradientRecord]:
    # A list of the references first: other threads make optimizers meanwhile.
    return [record for each in list(references) if (record := each()) is not None]


def all_records() -> list[GradientRecord]:
    """The records of all optimizers."""
    return _living(_records)


def sharded_records() -> list[GradientRecord]:
    """The records of parameters that a model does not compute with itself, as of FSDP."""
    return _living(_sharded)


def owning(ids: Iterable[int]) -> list[GradientRecord]:
    """The records that have one of these parameters."""
    return _living(dict.fromkeys(ref for each in ids for ref in _owners.get(each, ())))


def sharing(records: Iterable[GradientRecord]) -> list[GradientRecord]:
    """These records, those that have a parameter in common with one of them, and so on."""
    found: dict[GradientRecord, None] = {}
    rest = list(records)
    for record in rest:
        if record not in found:
            found[record] = None
            rest += owning(record.info.ids & _shared)
    return list(found)


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
    | a loss is about to add | `receive` | `has_own_loss` if own, `running` | `decision`, |
    | | | | `is_cleared` |
    | | `put_on` | `multiplier` | |
    | | `account_for_last_step` | `left_behind` | `after_skip`; as `reset`, if checked gradients |
    | | | | were cleared |
    | a loss is not seen | `note_unseen_loss` | `has_unseen_loss`, `has_own_loss` | `is_cleared` |
    | | its first use | `multiplier` | `has_unseen_loss` |
    | gradients are unscaled | `settle` | `last_check` | `multiplier` |
    | | `release`, by a kernel | | `multiplier`, `has_unseen_loss` |
    | all processes have decided | `note_decision` | `decision`, `last_check` | `has_unseen_loss` |
    | a step is over | `note_step` | `after_skip`, if gradients stay that it may have skipped | as |
    | | | | `reset`, and `multiplier` |
    | `zero_grad` | `note_zero_grad` | `is_cleared` if own losses were checked, | `multiplier`; |
    | | | `is_lost` if no skip was counted | as `reset`, but an unseen loss stays |
    | another process has scaled | `hold`, of all that share | `multiplier` | `decision` |
    | a state is loaded | `restart` | | as `settle` and `reset` |
    | a group is added | `see_parameters` | `info`, or `last_check` | `multiplier` |

    `reset` clears what is known of one step: `last_check`, `decision`, `running` and all flags.

    Args:
        inner: The optimizer.
        scale: The loss scale.
        process_group: As `ranks.groups_of` takes it.

    Attributes:
        rule: The rule that moves the loss scale.
        leave_out: A weak reference to what counts a step that was left out.
        info: Facts about the parameters that the last verb has seen.
        multiplier: What multiplies all gradients, those that are assigned later included; None if
            they are unscaled.
        running: A weak reference to the backward pass that adds to them; None if none began.
        last_check: The result of checking unscaled gradients; None if they were not checked.
        decision: The decision of all processes, if `unscale_` or a step made one.
        has_unseen_loss: Whether a loss was scaled whose `backward` cannot be seen, in compiled code
            or under capture.
        has_own_loss: Whether the optimizer itself scaled a loss; other optimizers' losses may
            reach its parameters too.
        is_cleared: Whether `zero_grad` was called after gradients of its own losses were checked.
        is_lost: Whether `zero_grad` cleared those of its own losses since the last step, and that
            was no skip.
        after_skip: If gradients stay after a step that may have been skipped: the id and the
            version of the last one, and whether the step was skipped.
        left_behind: Whether the next loss began with gradients of a skipped step.
        warned: Whether the user was warned of a step without a scaled loss.
    """

    leave_out: weakref.WeakMethod[Callable[[], bool]]

    def __init__(self, inner: Optimizer, scale: LossScale, process_group: ranks.Groups) -> None:
        self.inner, self.scale, self.rule = inner, scale, scale.rule
        self.process_group, self.warned = process_group, False
        self.multiplier: Multiplier | None = None
        self.info = ParameterInfo([], [])
        self.reset()
        info = ParameterInfo(ranks.parameters_of(inner), process_group)
        self._reference = weakref.ref(self, _records.discard)
        _records.add(self._reference)
        others = owning(info.ids)
        if others:
            self._put(others[0].multiplier)
        unowned = info.without(frozenset().union(*(r.info.ids for r in sharing(others))))
        self._take(info, are_unscaled=unowned.first_gradient() is not None)

    def __del__(self) -> None:
        """Divides gradients that no other record knows of."""
        multiplier = getattr(self, "multiplier", None)
        if sys.is_finalizing() or not hasattr(self, "_reference"):
            return
        self._own(frozenset())
        _sharded.discard(self._reference)
        if multiplier is None:
            return
        others = [r for r in _multiplied_by(multiplier) if r is not self]
        # A record that shares some may be deleted at the same time.
        info = self.info.without(multiplier.divided.union(*(r.info.ids for r in others)))
        multiplier.divided |= info.ids
        # Gradients in float16 stay: no wrapper divides them.
        with contextlib.suppress(GradientsError):
            _divide(info, multiplier, checks=False)

    # --- The parameters -----------------------------------------------------------------------

    def see_parameters(self, *, are_cleared: bool = False) -> None:
        """Sees the parameters that the optimizer has now; called once in each verb.

        Args:
            are_cleared: Whether no gradient is left.

        Raises:
            CallOrderError: If a new group brings gradients. Then nothing is changed.
        """
        parameters = ranks.parameters_of(self.inner)
        if not self.info.is_of(parameters):
            if not are_cleared:
                self._check_no_new_gradients(parameters)
            self._take(ParameterInfo(parameters, self.process_group))

    def note_added_group(self) -> None:
        """Sees an added group, unless it changes what gradients are: then the next verb does."""
        ids = frozenset(map(id, ranks.parameters_of(self.inner)))
        others = owning(ids - self.info.ids)
        if all(record.multiplier is self.multiplier for record in others):
            # Gradients that it brings can still be cleared.
            with contextlib.suppress(CallOrderError):
                self.see_parameters()

    def _take(self, info: ParameterInfo, *, are_unscaled: bool = False) -> None:
        """Has other parameters from now on, whose gradients have the same number as its own."""
        others = [r for r in sharing(owning(info.ids - self.info.ids)) if r is not self]
        if are_unscaled or any(r.multiplier is not self.multiplier for r in others):
            for record in [self, *others]:
                record.settle()
        self._own(info.ids)
        self.info = info
        if info.is_sharded:
            _sharded.add(self._reference)

    def _own(self, ids: frozenset[int]) -> None:
        """Enters the record for its new parameters, and removes it from its old ones."""
        with _lock:
            for each in self.info.ids ^ ids:
                owners = _owners.setdefault(each, set())
                (owners.add if each in ids else owners.discard)(self._reference)
                (_shared.add if len(owners) > 1 else _shared.discard)(each)
                if not owners:
                    del _owners[each]

    def _put(self, multiplier: Multiplier | None) -> None:
        self.multiplier = multiplier
        if multiplier is not None:
            multiplier.records.add(self._reference)
            multiplier.divided -= self.info.ids

    def reset(self) -> None:
        """Starts again, after a step or when the gradients were cleared."""
        self.last_check: OverflowCheck | None = None
        self.decision: StepDecision | None = None
        self.has_unseen_loss = self.has_own_loss = self.is_cleared = self.is_lost = False
        self.running: weakref.ref[BackwardPass] | None = None
        self.after_skip: tuple[int, int, Flag] | None = None
        self.left_behind: Flag = False

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
        self.check_no_pass()
        if self.multiplier is None or self.last_check is not None:
            return False
        return _multiplied_by(self.multiplier) == [self]

    def pass_now(self) -> BackwardPass | None:
        """The backward pass that adds to the gradients now."""
        found = None if self.running is None else self.running()
        return found if found is not None and found.runs else None

    # --- What is done to them -----------------------------------------------------------------

    def receive(self, backward_pass: BackwardPass, own: bool) -> None:
        """A pass is about to add to the gradients, of an own loss or another optimizer's."""
        self.decision, self.is_cleared = None, False
        self.has_own_loss |= own
        # A pass within another one may add to what the other one adds to.
        if self.pass_now() is None:
            self.running = weakref.ref(backward_pass)

    def settle(self) -> None:
        """Divides and checks the gradients, with all that the same number multiplies."""
        with _lock:
            self._adopt_unseen_loss()
            multiplier = self.multiplier
            if multiplier is None:
                return
            records = _multiplied_by(multiplier)
            if any(r.pass_now() for r in records):
                # The gradients of the other records are not complete.
                records = sharing([self])
            for record in records:
                record.check_no_pass()
                if record.info.has_half:
                    gradients.check_can_be_divided(record.info, record.inner)
            divided: frozenset[int] = frozenset()
            flags = []
            for record in records:
                flags.append(record._unscale(multiplier, divided))
                divided |= record.info.ids
            for record in records:
                record.multiplier = None
            pairs = list(zip(records, flags, strict=True))
            shared = gradients.any_overflow(record._fresh(flag) for record, flag in pairs)
            for record, flag in pairs:
                record.note_check(gradients.any_overflow([shared, flag]))

    def _unscale(self, multiplier: Multiplier, divided: frozenset[int]) -> Tensor:
        """Divides gradients that are not divided yet; whether any of the record's overflowed."""
        info, checks = self.info, self.rule.checks_gradients
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
        """Another process has scaled the loss."""
        for record in sharing([self]):
            record._put(multiplier)
            record.decision = None

    def note_check(self, overflow: Tensor) -> None:
        """Gradients were checked; an overflow stays until the next step."""
        if self.last_check is not None:
            overflow = gradients.any_overflow([self.last_check.overflow, overflow])
        self.last_check = OverflowCheck.of(overflow, stamps(self.info), self.info)

    def note_unseen_loss(self) -> None:
        """A loss was scaled whose `backward` cannot be seen."""
        self.has_unseen_loss = self.has_own_loss = True
        self.is_cleared = False

    def _adopt_unseen_loss(self) -> None:
        if not self.has_unseen_loss or self.info.first_gradient() is None:
            return
        self.has_unseen_loss, scale, now = False, self.scale, self.multiplier
        if now is None:
            # A new one, which a CUDA graph reads in each replay.
            multiplier = Multiplier(scale.scale_on(scale.home), self.rule, scale.number)
            self._put(multiplier)
            put_on(sharing([self]), multiplier)
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
            self.last_check = OverflowCheck.of(overflow, None, self.info)

    def note_step(self, decision: StepDecision) -> None:
        """A step is over."""
        self.reset()
        self.multiplier = None
        last = None if decision.apply is True else self.info.last_gradient()
        if last is not None:
            # By the id: nothing keeps a gradient between steps.
            self.after_skip = id(last), last._version, decision.skipped

    def note_zero_grad(self, is_counted: bool) -> None:
        """`zero_grad` was called, and a skipped step was counted or not."""
        # The `backward` of a loss that nobody sees is still to come.
        unseen, own = self.has_unseen_loss, self.has_own_loss
        is_cleared = own and self.last_check is not None
        is_lost = self.is_lost or (own and not is_counted)
        partners = sharing([self]) if self.multiplier is not None else []
        self.multiplier = None
        self.reset()
        for record in partners:
            record.settle()
        self.has_unseen_loss = self.has_own_loss = unseen
        self.is_cleared, self.is_lost = is_cleared, is_lost
        self.see_parameters(are_cleared=True)

    def restart(self) -> None:
        """A state was loaded: what was known of the step is forgotten."""
        if self.info.first_gradient() is not None:
            self.settle()
        self.reset()

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
            last, (*key, skipped) = self.info.last_gradient(), self.after_skip
            stay = last is not None and key == [id(last), last._version]
            self.after_skip, self.left_behind = None, skipped if stay else False
        adds_up = self.multiplier is not None and self.multiplier is multiplier
        if self.last_check is None or adds_up or not self.last_check.is_gone(self.info):
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
        elif self.last_check.stamps in (None, stamps(self.info)):
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
        if not self.is_scaled or self.info.first_gradient() is None:
            return
        raise CallOrderError(
            f"{name}() of {type(optimizer).__name__} would use gradients that are multiplied "
            "by the loss scale. Call optimizer.backward(loss) in place of "
            "optimizer.scale_loss(loss).backward(), or unscale_() first; and step() of the "
            "LossScaleOptimizer."
        )

    def check_can_be_saved(self) -> None:
        """Checks, before a state is saved or copied, that no gradients are scaled.

        Raises:
            CallOrderError: If some are, or a new group has brought gradients.
        """
        parameters = ranks.parameters_of(self.inner)
        self._check_no_new_gradients(parameters)
        # Those of a group that no verb has seen may belong to another wrapper.
        others = owning(set(map(id, parameters)) - self.info.ids)
        if any(r.is_scaled and r.info.first_gradient() is not None for r in [self, *others]):
            raise CallOrderError(
                "Gradients that are multiplied by the loss scale are not saved. Call unscale_() "
                "first, or save or copy the optimizer after step()."
            )

    def _check_no_new_gradients(self, parameters: Iterable[Tensor]) -> None:
        if any(p.grad is not None and id(p) not in _owners for p in parameters):
            raise CallOrderError(
                "A parameter group was added whose parameters have gradients. It is unknown "
                "whether these are scaled. Clear them, for example by model.zero_grad()."
            )

    def check_can_clear(self) -> None:
        """Checks that no backward pass is still to add to the gradients."""
        for record in sharing([self]) if self.multiplier is not None else ():
            record.check_no_pass()

    def check_no_pass(self) -> None:
        """Checks that no backward pass is still to add to the gradients."""
        if self.pass_now() is not None:
            raise CallOrderError(
                "step() was called in a backward pass, before all gradients have arrived. Call it "
                "after the backward pass."
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


def _multiplied_by(multiplier: Multiplier) -> list[GradientRecord]:
    """The records whose gradients a number multiplies."""
    return [r for r in _living(multiplier.records) if r.multiplier is multiplier]


def put_on(records: Iterable[GradientRecord], multiplier: Multiplier) -> None:
    """Puts the gradients of records on the number of a loss, which is about to add to them."""
    with _lock:
        records = [r for r in records if r.multiplier is not multiplier]
        for record in records:
            record.settle()
        there = [r.info.ids for r in _multiplied_by(multiplier)]
        multiplied: frozenset[int] = frozenset().union(*there)
        for record in records:
            info = record.info.without(multiplied)
            if info.first_gradient() is not None:
                gradients.multiply(info, multiplier)
            multiplied |= record.info.ids
            record._put(multiplier)


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
