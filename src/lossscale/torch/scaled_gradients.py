"""Which gradients a scale multiplies, and whose they are.

Every scaled `.grad` is in exactly one `ScaledGradients`: those that one number of one wrapper's
scale multiplies. Before a backward pass adds to gradients, `prepare_backward` puts them into the
set of that number, and multiplies what is there. If one of them must be unscaled, the whole set is
settled. So gradients of different scales are never added, and each is divided once.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lossscale.errors import GradientsError
from lossscale.torch import gradients, ranks
from lossscale.torch.scale import Multiplier
from lossscale.torch.scaling import CPU

if TYPE_CHECKING:
    from lossscale.torch.gradient_record import GradientRecord

lock = threading.RLock()
"""Held while gradients join or leave a set: autograd runs hooks in a thread for each device."""

ONE_FOR_SEVERAL = "Make one for both: LossScaleOptimizer([optimizer, other])."

_REQUIRES_GRAD = operator.attrgetter("requires_grad")

# --- Whose a parameter is ---------------------------------------------------------------------

_living: dict[weakref.ref[GradientRecord], bool] = {}
"""The records, and whether their parameters are sharded."""
_owners: dict[int, tuple[weakref.ref[GradientRecord], ...]] = {}
"""The records that have a parameter, by its id, which lives as long as one of them."""
_changes = [0]
"""The number of times that a record came, went or got other parameters."""


def register(record: GradientRecord, info: ranks.ParameterInfo) -> Callable[[], None]:
    """Remembers whose parameters those of a record are; returns what forgets it."""
    ids, sets = info.ids, record.sets

    def forget(dead: weakref.ref[GradientRecord]) -> None:
        with lock:
            _changes[0] += 1
            _living.pop(dead, None)
            for key in ids:
                rest = tuple(other for other in _owners.get(key, ()) if other is not dead)
                if rest:
                    _owners[key] = rest
                else:
                    _owners.pop(key, None)

    def died(dead: weakref.ref[GradientRecord]) -> None:
        if lock is None:
            # Python is ending, and has cleared this module.
            return  # type: ignore[unreachable]
        forget(dead)
        # An optimizer in its place knows what multiplies their gradients.
        for scaled in sets:
            for other in owners(scaled.info):
                if scaled not in other.sets:
                    other.sets.append(scaled)

    with lock:
        _changes[0] += 1
        ref = weakref.ref(record, died)
        _living[ref] = info.is_sharded
        for key in ids:
            _owners[key] = (*_owners.get(key, ()), ref)
    return lambda: forget(ref)


def owners(info: ranks.ParameterInfo) -> list[GradientRecord]:
    """The records that have some of these parameters."""
    if info.owners is None or info.owners[0] != _changes[0]:
        info.owners = _changes[0], _references(info.ids)
    return _living_of(info.owners[1])


def owners_of(ids: Iterable[int]) -> list[GradientRecord]:
    """The records that have some of the parameters with these ids."""
    return _living_of(_references(ids))


def _references(ids: Iterable[int]) -> list[weakref.ref[GradientRecord]]:
    with lock:
        return list({ref: None for key in ids for ref in _owners.get(key, ())})


def _living_of(refs: Iterable[weakref.ref[GradientRecord]]) -> list[GradientRecord]:
    return [record for ref in refs if (record := ref()) is not None]


def all_records(*, sharded: bool = False) -> list[GradientRecord]:
    """The records of all optimizers, or of those with sharded parameters."""
    with lock:
        refs = [ref for ref, is_sharded in _living.items() if is_sharded or not sharded]
    return _living_of(refs)


def is_only_record() -> bool:
    """Whether there is one optimizer with loss scaling, which each loss concerns."""
    return len(_living) <= 1


# --- What multiplies them ---------------------------------------------------------------------

NOTHING = ranks.ParameterInfo([], [])


class ScaledGradients:
    """The gradients that one number of one wrapper's scale multiplies.

    A scaled gradient is in exactly one of these. All losses of that number share it until it is
    settled; the records of the optimizers that they have reached hold it until then, and get the
    result of the check. Its `.grad` may also be None: one that is still to come.

    Args:
        multiplier: The `Multiplier` of the losses.

    Attributes:
        multiplier: Their `Multiplier`; None once they are unscaled.
        info: The parameters.
        spoiled_before: If the device may have skipped a step and left these gradients behind:
            whether it has, 1 or 0, and a reference to the record of the loss, which such an
            overflow does not concern.
        task: The last backward pass that has begun; -1 for one that `backward` runs and then
            settles, None if there was none.
        has_graph: Whether a pass may have given gradients a graph.
    """

    def __init__(self, multiplier: Multiplier) -> None:
        self.multiplier: Multiplier | None = multiplier
        self.info = NOTHING
        # Weakly, because what is remembered of an optimizer that is gone holds its sets.
        self.spoiled_before: tuple[Tensor, weakref.ref[GradientRecord]] | None = None
        self.task: int | None = None
        self.has_graph = False
        self._versions: dict[int, int] = {}

    def number(self) -> float:
        """The number that multiplies them."""
        return 1.0 if self.multiplier is None else float(self.multiplier.scale_on(CPU))

    def begin_pass(self, task: int) -> None:
        """A backward pass is about to add to them: notes those that are there, once for a pass."""
        if task == -1 or task != self.task:
            self.task = task
            # In a pass with `create_graph`.
            self.has_graph |= task != -1 and torch.is_grad_enabled()
            self._versions = _versions(self.info)

    def add(self, info: ranks.ParameterInfo) -> None:
        """Adds gradients of parameters, which it multiplies; they leave the sets they were in."""
        mine = self.info
        if mine is info or info.ids <= mine.ids:
            return
        new, before = info.without(mine.ids), None
        for other in holding(new):
            self.has_graph |= other.has_graph
            if other.task == self.task != -1:
                raise GradientsError(
                    "One backward pass reaches the same parameters by losses with different "
                    f"scales. {ONE_FOR_SEVERAL}"
                )
            if other.info is new:
                # From one scale to the other in one pass, which float16 allows, too.
                before = other.multiplier
                other.leave(new)
            else:
                other.settle(whole=True)
        if new.first_gradient() is not None:
            assert self.multiplier is not None
            multiply(new, self.multiplier, before)
            self._versions |= _versions(new)
        some = mine.parameters
        self.info = ranks.ParameterInfo([*some, *new.parameters], []) if some else new

    def leave(self, info: ranks.ParameterInfo) -> None:
        """Takes out parameters whose gradients were cleared, or are divided elsewhere."""
        with lock:
            if self.multiplier is None:
                return
            if not (self.info is info or self.info.ids <= info.ids):
                self.info = self.info.without(info.ids)
                return
            if self.multiplier.gradients is self:
                self.multiplier.gradients = None
            self.multiplier = None

    def arrived(self, info: ranks.ParameterInfo) -> ranks.ParameterInfo:
        """The parameters whose gradients are whole; within a backward pass others will follow."""
        if torch._C._current_graph_task_id() == -1:
            return info
        waiting = {
            id(p)
            for p in self.info.parameters
            if p.grad is None or self._versions.get(id(p)) == p.grad._version
        }
        return info.without(waiting)

    def settle(self, *, whole: bool = False, factor: gradients.Factor | None = None) -> None:
        """Divides the gradients, and checks each number.

        Args:
            whole: Whether all of them have arrived.
            factor: Returns what to multiply them by on a device instead, if they are known to be
                finite.
        """
        with lock:
            multiplier = self.multiplier
            if multiplier is None:
                return
            records = [record for record in owners(self.info) if self in record.sets]
            info = self.info if whole else self.arrived(self.info)
            if factor is not None:
                by_device = unscale(info, factor, checks=False)
            else:
                divides = not multiplier.rule.powers_of_two
                by_device = unscale(
                    info,
                    multiplier.scale_on if divides else multiplier.reciprocal_on,
                    divides=divides,
                    checks=any(record.rule.checks_gradients for record in records),
                    recheck=multiplier.may_be_below_one(),
                    # A tensor of no optimizer may be in float16.
                    float16=not records,
                )
            self.leave(info)
            if not (records or self.spoiled_before):
                return
            overflow = gradients.any_overflow(by_device.values())
            for record in records:
                record.note_check(overflow, info)
            if self.spoiled_before is not None:
                flag, ref = self.spoiled_before
                if (of_loss := ref()) is not None:
                    of_loss.note_check(overflow * (1.0 - flag.to(overflow.device)), info)


def _versions(info: ranks.ParameterInfo) -> dict[int, int]:
    """The versions of the gradients that are there, by the id of the parameter."""
    return {id(p): gradient._version for p in info.parameters if (gradient := p.grad) is not None}


def holding(info: ranks.ParameterInfo) -> list[ScaledGradients]:
    """The sets of scaled gradients of some parameters."""
    sets = {scaled: None for record in owners(info) for scaled in record.sets}
    return [s for s in sets if s.multiplier is not None and not s.info.ids.isdisjoint(info.ids)]


def unheld(info: ranks.ParameterInfo) -> ranks.ParameterInfo:
    """Those of some parameters whose gradients are in no set."""
    for scaled in holding(info):
        info = info.without(scaled.info.ids)
    return info


# --- From one scale to another ----------------------------------------------------------------


@torch.no_grad()
def multiply(
    info: ranks.ParameterInfo, multiplier: Multiplier, before: Multiplier | None = None
) -> None:
    """Multiplies gradients by a scale, and divides them by the scale that they had."""

    def factor(device: torch.device) -> Tensor:
        wanted = multiplier.scale_on(device)
        return wanted if before is None else wanted / before.scale_on(device)

    unscale(info, factor, checks=False, float16=True)


def unscale(
    info: ranks.ParameterInfo,
    factor: gradients.Factor,
    *,
    divides: bool = False,
    checks: bool = True,
    recheck: bool = False,
    into: Tensor | None = None,
    float16: bool = False,
    sums: bool = True,
) -> dict[torch.device, Tensor]:
    """Unscales gradients, and checks each number; those that have a graph are replaced.

    Args:
        info: Their parameters.
        factor, recheck, into: As for `gradients.unscale_and_check_`.
        divides: Whether to divide by the factor.
        checks: Whether to check them.
        float16: Whether some may be in float16.
        sums: As for `gradients.collect`.

    Returns:
        By device, whether any number was infinite or NaN: float32 scalar tensor, 1 or 0. Empty if
        they are not checked.
    """
    grads = info.gradients()
    in_graph: list[tuple[Tensor, Tensor]] = []
    with ranks.UNSEEN():
        has_graph = any(map(_REQUIRES_GRAD, grads))
    if has_graph:
        in_graph = [
            (p, g) for p in info.parameters if (g := p.grad) is not None and g.requires_grad
        ]
        info = info.without({id(p) for p, _ in in_graph})
        grads = info.gradients()
    # It may raise.
    given = gradients.collect(info, grads, allow_float16=float16, sums=sums)
    for parameter, gradient in in_graph:
        number = factor(gradient.device)
        with torch.enable_grad():
            parameter.grad = gradient / number if divides else gradient * number
    if not checks:
        gradients.unscale_(given, factor, divide=divides)
        return {}
    by_device = gradients.unscale_and_check_(
        given, factor, divide=divides, recheck=recheck, into=into
    )
    if in_graph:
        finite = gradients.all_finite([p.grad for p, _ in in_graph])
        so_far = by_device.get(finite.device)
        bad = (~finite).to(torch.float32)
        by_device[finite.device] = bad if so_far is None else torch.maximum(so_far, bad)
    return by_device
