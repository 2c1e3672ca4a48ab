"""Which gradients a scale multiplies, and which parameters a loss reaches.

Every scaled `.grad` is in exactly one `ScaledGradients`: those that one number of one wrapper's
scale multiplies. Before a backward pass adds to gradients, `prepare_backward` puts them into the
set of that number, and multiplies what is there. If one of them must be unscaled, the whole set is
settled. So gradients of different scales are never added, and each is divided once.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from lossscale.errors import GradientsError
from lossscale.torch import gradients, ranks
from lossscale.torch.scale import Flag, Multiplier
from lossscale.torch.scaling import real_parts

if TYPE_CHECKING:
    from lossscale.torch.engine import Engine, StepDecision

Inputs: TypeAlias = Tensor | Sequence[Tensor] | None
"""The only tensors that a backward pass reaches, as in `torch.Tensor.backward`; None for all."""

lock = threading.RLock()
"""Held while gradients join or leave a set: autograd runs hooks in a thread for each device."""

ONE_FOR_SEVERAL = "Make one for both: LossScaleOptimizer([optimizer, other])."

_MARK = "_is_scaled_by_lossscale"
_REQUIRES_GRAD, _VERSION = map(operator.attrgetter, ("requires_grad", "_version"))


def remember_scaled(loss: Tensor) -> None:
    """Marks a loss as scaled, by any optimizer."""
    setattr(loss, _MARK, True)


def was_scaled(loss: Tensor) -> bool:
    """Whether this tensor is a scaled loss."""
    return hasattr(loss, _MARK)


# --- Whose a parameter is ---------------------------------------------------------------------

_living: dict[weakref.ref[Engine], bool] = {}
"""The engines, and whether their parameters are sharded."""
_owners: dict[int, tuple[weakref.ref[Engine], ...]] = {}
"""The engines that have a parameter, by its id, which lives as long as one of them."""
_changes = [0]
"""The number of times that an engine came, went or got other parameters."""


def register(engine: Engine, info: ranks.ParameterInfo) -> Callable[[], None]:
    """Remembers whose parameters those of an engine are; returns what forgets it."""
    ids, record = info.ids, engine.record

    def forget(ref: weakref.ref[Engine]) -> None:
        with lock:
            _changes[0] += 1
            _living.pop(ref, None)
            for key in ids:
                rest = tuple(each for each in _owners.get(key, ()) if each is not ref)
                if rest:
                    _owners[key] = rest
                else:
                    _owners.pop(key, None)

    def died(ref: weakref.ref[Engine]) -> None:
        if lock is None:
            # Python is ending, and has cleared this module.
            return  # type: ignore[unreachable]
        forget(ref)
        # An optimizer in its place knows what multiplies their gradients.
        for each in record.sets:
            for engine in owners(each.info):
                if each not in engine.record.sets:
                    engine.record.sets.append(each)

    with lock:
        _changes[0] += 1
        ref = weakref.ref(engine, died)
        _living[ref] = info.is_sharded
        for key in ids:
            _owners[key] = (*_owners.get(key, ()), ref)
    return lambda: forget(ref)


def owners(info: ranks.ParameterInfo) -> list[Engine]:
    """The engines that have some of these parameters."""
    if info.owners is None or info.owners[0] != _changes[0]:
        info.owners = _changes[0], _references(info.ids)
    return [engine for ref in info.owners[1] if (engine := ref()) is not None]


def _references(ids: Iterable[int]) -> list[weakref.ref[Engine]]:
    with lock:
        return list({ref: None for key in ids for ref in _owners.get(key, ())})


def all_engines(*, sharded: bool = False) -> list[Engine]:
    """The engines of all optimizers, or of those with sharded parameters."""
    with lock:
        refs = [ref for ref, is_sharded in _living.items() if is_sharded or not sharded]
    return [engine for ref in refs if (engine := ref()) is not None]


# --- What multiplies them ---------------------------------------------------------------------

_NOTHING = ranks.ParameterInfo([], [])


class ScaledGradients:
    """The gradients that one number of one wrapper's scale multiplies.

    A scaled gradient is in exactly one of these. All losses of that number share it until it is
    settled; the records of the optimizers that they have reached hold it until then, and are told
    whether an overflow was found. Its `.grad` may also be None: one that is still to come.

    Args:
        by: The `Multiplier` of the losses.

    Attributes:
        by: Their `Multiplier`; None once they are unscaled.
        info: The parameters.
        left: If the device may have skipped a step and left these gradients behind: whether it
            has, 1 or 0, and the engine of the loss, which such an overflow does not concern.
        task: The last backward pass that has begun; -1 for one that `backward` runs and then
            settles, None if there was none.
        has_graph: Whether a pass may have given gradients a graph.
    """

    def __init__(self, by: Multiplier) -> None:
        self.by: Multiplier | None = by
        self.info = _NOTHING
        self.left: tuple[Tensor, Engine] | None = None
        self.task: int | None = None
        self.has_graph = False
        self._before: dict[int, int] = {}

    def begin_pass(self, task: int) -> None:
        """A backward pass is about to add to them: notes those that are there, once for a pass."""
        if task == -1 or task != self.task:
            self.task = task
            # In a pass with `create_graph`.
            self.has_graph |= task != -1 and torch.is_grad_enabled()
            self._before = _versions(self.info)

    def add(self, info: ranks.ParameterInfo) -> None:
        """Adds gradients of parameters, which it multiplies; they leave the sets they were in."""
        mine = self.info
        if mine is info or info.ids <= mine.ids:
            return
        new, before = info.without(mine.ids), None
        for each in holding(new):
            self.has_graph |= each.has_graph
            if each.task == self.task != -1:
                raise GradientsError(
                    "One backward pass reaches the same parameters by losses with different "
                    f"scales. {ONE_FOR_SEVERAL}"
                )
            if each.info is new:
                # From one scale to the other in one pass, which float16 allows, too.
                before = each.by
                each.leave(new)
            else:
                each.settle(whole=True)
        if new.first_gradient() is not None:
            assert self.by is not None
            multiply(new, self.by, before)
            self._before |= _versions(new)
        some = mine.parameters
        self.info = ranks.ParameterInfo([*some, *new.parameters], []) if some else new

    def leave(self, info: ranks.ParameterInfo) -> None:
        """Takes out parameters whose gradients were cleared, or are divided elsewhere."""
        if self.by is None:
            return
        if not (self.info is info or self.info.ids <= info.ids):
            self.info = self.info.without(info.ids)
            return
        if self.by.gradients is self:
            self.by.gradients = None
        self.by = None

    def arrived(self, info: ranks.ParameterInfo) -> ranks.ParameterInfo:
        """The parameters whose gradients are whole; within a backward pass others will follow."""
        if torch._C._current_graph_task_id() == -1:
            return info
        before = self._before
        waiting = {
            id(p)
            for p in self.info.parameters
            if p.grad is None or before.get(id(p)) == p.grad._version
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
            if self.by is None:
                return
            told = [each for each in owners(self.info) if self in each.record.sets]
            info = self.info if whole else self.arrived(self.info)
            if factor is not None:
                by_device = unscale(info, factor, checks=False)
            else:
                by, divides = self.by, not self.by.rule.powers_of_two
                by_device = unscale(
                    info,
                    by.scale_on if divides else by.reciprocal_on,
                    divides=divides,
                    checks=any(each.rule.checks_gradients for each in told),
                    recheck=is_below_one(by),
                    # A tensor of no optimizer may be in float16.
                    float16=not told,
                )
            self.leave(info)
            if not (told or self.left):
                return
            found = gradients.any_overflow(by_device.values())
            for each in told:
                each.record.tell(found, each.info(), info)
            if self.left is not None:
                flag, other = self.left
                other.record.tell(found * (1.0 - flag.to(found.device)), other.info(), info)


def _versions(info: ranks.ParameterInfo) -> dict[int, int]:
    """The versions of the gradients that are there, by the id of the parameter."""
    return {id(p): gradient._version for p in info.parameters if (gradient := p.grad) is not None}


def _stamps(info: ranks.ParameterInfo) -> tuple[list[int], list[int]]:
    """Values that change if a gradient is written to, or replaced by another tensor."""
    grads = info.gradients()
    with ranks.UNSEEN():
        return list(map(id, grads)), list(map(_VERSION, grads))


def holding(info: ranks.ParameterInfo) -> list[ScaledGradients]:
    """The sets of scaled gradients of some parameters."""
    some = {each: None for engine in owners(info) for each in engine.record.sets}
    return [each for each in some if each.by is not None and not each.info.ids.isdisjoint(info.ids)]


def unheld(info: ranks.ParameterInfo) -> ranks.ParameterInfo:
    """Those of some parameters whose gradients are in no set."""
    for each in holding(info):
        info = info.without(each.info.ids)
    return info


class GradientRecord:
    """The state of an optimizer's gradients since its last step.

    A plain object, because compiled code loses what it writes to an optimizer.

    Attributes:
        sets: The sets of scaled gradients that a loss of this optimizer, or one that reaches it,
            has made.
        found: Whether an overflow was found in unscaled gradients, here or in another optimizer
            that the same loss reaches: float32 scalar tensor, 1 or 0. None if they were not
            checked.
        checked: The parameters whose gradients were checked, by id.
        unseen: Whether a loss was scaled whose `backward` cannot be seen, in compiled code or by
            hand.
        has_own_loss: Whether the optimizer itself scaled a loss; other optimizers' losses may
            reach its parameters too.
        decision: The decision of all processes, if `unscale_` made one.
        known: The parameters when it was made, or when a scaled loss last reached some.
        is_cleared: Whether `zero_grad` was called in place of the step that was decided.
        by_hand: Whether `get_scaled_loss` was called, and `get_unscaled_gradients` was not.
        divided: The gradients that `get_unscaled_gradients` was given, if it was called.
        warned: Whether the user was warned of a step without a scaled loss.
        known_before: The parameters when a pass last left gradients of others scaled, which a later
            group may bring; None if none has.
    """

    def __init__(self) -> None:
        self.warned = self.in_backward = False
        self.known_before: ranks.ParameterInfo | None = None
        self.sets: list[ScaledGradients] = []
        self.reset()

    def reset(self) -> None:
        """Starts again, after a step or when the gradients were cleared."""
        self.unseen = False
        self.found: Tensor | None = None
        self.checked: frozenset[int] = frozenset()
        self._stamps: tuple[list[int], list[int]] | None = None
        self.is_cleared = self.by_hand = self.has_own_loss = False
        self.divided: list[tuple[weakref.ref[Tensor], int]] | None = None
        self.decision: StepDecision | None = None
        self.known: ranks.ParameterInfo | None = None
        self.left: tuple[int, int, Flag] | None = None
        self.witness: tuple[Tensor, int] | None = None

    def clear(self, info: ranks.ParameterInfo) -> None:
        """The gradients of all parameters are cleared: none is scaled any more."""
        with lock:
            for each in holding(info):
                each.leave(info)
        self.sets = []
        self.reset()

    @property
    def scaled_by(self) -> Multiplier | None:
        """The `Multiplier` of the gradients, or of some; None if no set has any."""
        return next((each.by for each in self.sets if each.by is not None), None)

    @property
    def is_scaled(self) -> bool:
        """Whether some gradients are scaled."""
        return self.unseen or self.scaled_by is not None

    def tell(self, found: Tensor, info: ranks.ParameterInfo, checked: ranks.ParameterInfo) -> None:
        """Gradients of a set were checked; an overflow stays until the next step."""
        self.checked = checked.ids if checked is info else self.checked | checked.ids
        if self.found is not None:
            found = torch.maximum(self.found, found.to(self.found.device))
        self.found, self._stamps = found, _stamps(info)
        self.drop(info)
        self.remember(info)

    def drop(self, info: ranks.ParameterInfo) -> None:
        """Drops the sets that hold none of its gradients any more."""
        some = [each for each in self.sets if each.by is not None]
        self.sets = [e for e in some if e.left or not e.info.ids.isdisjoint(info.ids)]

    def is_nothing(self) -> bool:
        """Whether no loss was scaled since the last step."""
        return not self.is_scaled and self.found is None and self.divided is None

    def remember(self, info: ranks.ParameterInfo) -> None:
        """Remembers the last unscaled gradient, or that there is none, and its version."""
        # No weak reference, which would forbid `model.to` to swap the gradient for another one.
        last = info.last_gradient()
        self.witness = None if last is None else (last, last._version)

    def are_as_checked(self, info: ranks.ParameterInfo) -> bool:
        """Whether all gradients were checked and, as far as can be seen, stayed as they were."""
        # `.data` of a gradient hides what is done to it, and programs average that by hand.
        may_hide = not info.groups and ranks.has_others()
        return info.ids <= self.checked and not may_hide and self._stamps == _stamps(info)

    def leave_behind(self, info: ranks.ParameterInfo, skipped: Flag) -> None:
        """Remembers that gradients are still there after a step; `skipped` as in `left_behind`."""
        last = info.last_gradient()
        # By its id: nothing keeps a gradient between steps.
        self.left = None if last is None else (id(last), last._version, skipped)

    def left_behind(self, info: ranks.ParameterInfo) -> Flag:
        """Whether the gradients are those of a skipped step: a bool, or a tensor, 1 or 0."""
        last = info.last_gradient() if self.left is not None else None
        if self.left is None or last is None or self.left[:2] != (id(last), last._version):
            return False
        return self.left[2]

    def is_as_it_was(self, info: ranks.ParameterInfo) -> bool:
        """Whether the last gradient is the remembered one, unchanged."""
        last = info.last_gradient()
        if self.witness is None or last is None:
            return False
        return self.witness[0] is last and self.witness[1] == last._version

    def are_gone(self, info: ranks.ParameterInfo) -> bool:
        """Whether the gradients that were checked have been cleared."""
        if self.witness is None or not any(p.grad is self.witness[0] for p in info.parameters):
            return True
        if self.witness[1] == self.witness[0]._version:
            return False
        # It was changed: to zeros, if gradients were cleared in place.
        grads = (p.grad for p in info.parameters if p.grad is not None)
        return not any(part.any() for g in grads for part in real_parts(ranks.local(g)))

    def are_scaled(self, info: ranks.ParameterInfo) -> bool:
        """Whether the gradients are scaled, after `get_unscaled_gradients` was called."""
        # `get_unscaled_gradients` returns new tensors. The user may have assigned them to `.grad`,
        # copied them into it, or left `.grad` as it was.
        given = [(ref(), version) for ref, version in self.divided or ()]
        versions = {id(t): version for t, version in given if t is not None}
        as_they_were = [versions.get(id(each)) == each._version for each in info.gradients()]
        if any(as_they_were) and not all(as_they_were):
            raise GradientsError(
                "Some parameters have a `.grad` that get_unscaled_gradients() returned, and others "
                "a scaled one. Assign the unscaled gradients to all, or call unscale_(), which "
                "divides every `.grad` in place."
            )
        return bool(as_they_were) and all(as_they_were)


# --- What a loss reaches ----------------------------------------------------------------------


def is_seen(loss: Tensor) -> bool:
    """Whether a hook can run when the `backward` of a loss starts."""
    return bool(
        loss.requires_grad
        and torch.is_grad_enabled()
        and not torch._C._functorch.peek_interpreter_stack()
        and not (loss.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def watch(scaled: Tensor, loss: Tensor, by: Multiplier, own: Engine) -> None:
    """Has `prepare_backward` called when the `backward` of a scaled loss starts."""
    # A hook of a pass may scale a loss of its own.
    outer = torch._C._current_graph_task_id()

    def starts(_: object) -> None:
        if own.record.in_backward:
            raise GradientsError(
                "A part of this loss is already scaled. Pass the "
                "unscaled losses to optimizer.backward(loss)."
            )
        task = torch._C._current_graph_task_id()
        given = loss if len(_living) > 1 else None
        prepare_backward(given, by, own, task=task, outer=outer)

    # On the node, which takes less time than on the tensor.
    assert scaled.grad_fn is not None
    scaled.grad_fn.register_prehook(starts)


def prepare_backward(
    loss: Tensor | None,
    by: Multiplier,
    own: Engine,
    *,
    inputs: Inputs = None,
    task: int = -1,
    outer: int = -1,
) -> list[ScaledGradients]:
    """Gradients of a loss are about to be added: multiplies those that are there.

    Args:
        loss: The loss; None if it can reach the parameters of `own` alone.
        by: Its scale.
        own: The engine that scaled it.
        inputs: The only tensors that are reached, as in `torch.Tensor.backward`; None for all.
        task: The backward pass; -1 before it, if what it adds to is settled after it.
        outer: The backward pass in which this one runs, in a hook; -1 if there is none.

    Returns:
        The sets that they are in, with one of the tensors of no optimizer if these are settled.
    """
    others, unowned, is_mine = ([], [], True) if loss is None else reached(loss, own, inputs)
    if task == -1 and inputs is None and not (is_mine or others):
        _check_not_half(unowned)
    concerned = [(own, own.info(), True), *others]
    for each, info, _ in concerned:
        each.check_known(info if each is own else each.info())
        if outer != -1:
            _check_idle(info, outer, None if task == -1 else by)
    for each, _, _ in concerned:
        each.account_for_cleared(by)
    with lock:
        sets: list[ScaledGradients] = [
            each.put_into_set(by, info, task, own=own, certain=certain)
            for each, info, certain in concerned
        ]
    if unowned and task == -1:
        sets.append(ScaledGradients(by))
        sets[-1].add(ranks.ParameterInfo(unowned, []))
    return sets


def _check_not_half(unowned: Iterable[Tensor]) -> None:
    """Checks that gradients of tensors of no optimizer can be divided."""
    if any(map(ranks.has_half_gradients, unowned)):
        raise GradientsError(
            "The loss reaches float16 parameters of no optimizer, and none of this one. Their "
            "unscaled gradients would flush to zero. For float32 copies made by hand, call "
            "optimizer.scale_loss(loss).backward(), copy the gradients, then step(). Better wrap "
            "lossscale.torch.MasterWeights(torch.optim.AdamW(model.parameters())), which makes "
            "the copies itself."
        )


def _check_idle(info: ranks.ParameterInfo, outer: int, by: Multiplier | None) -> None:
    """Checks that a pass within another one takes no gradients that the outer one will add to."""
    for each in holding(info):
        if each.task in (outer, -1) and each.by is not by:
            raise GradientsError(
                "A backward pass that is still running adds to gradients that this loss reaches. "
                "Call backward() of this loss after that pass."
            )


def reached(
    loss: Tensor, own: Engine, inputs: Inputs = None
) -> tuple[list[tuple[Engine, ranks.ParameterInfo, bool]], list[Tensor], bool]:
    """The other engines whose parameters a loss reaches, and the tensors of no optimizer.

    Each engine comes with the parameters, and whether the loss reaches them for certain: what
    `fully_shard` computes with cannot be assigned to one of several optimizers. The last result is
    whether the loss may reach parameters of `own`.

    Args:
        loss: The loss.
        own: The engine that scaled it, whose parameters are left out.
        inputs: The only tensors that are reached, as in `torch.Tensor.backward`; None for all.
    """
    hidden = False
    if inputs is None:
        tensors, hidden = _leaves(loss)
    else:
        tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    mine = own.info()
    owned = mine.ids
    strange = {id(t): t for t in tensors if id(t) not in owned}
    sharing = owners(mine)
    if not (strange or hidden or len(sharing) > 1):
        return [], [], True
    ids = frozenset(map(id, tensors))
    # `fully_shard` computes with its own parameters, and moves their gradients.
    is_sharded = any(isinstance(t, Parameter) for t in strange.values())
    others = dict.fromkeys([*sharing, *(ref() for ref in _references(strange))])
    if hidden or is_sharded:
        others |= dict.fromkeys(all_engines(sharded=not hidden))
    found = []
    for each in filter(None, others):
        if each is own:
            continue
        info = each.info()
        certain = not info.ids.isdisjoint(ids) or (hidden and each in sharing)
        if certain or hidden or (is_sharded and info.is_sharded):
            # An overflow in what it shares is its own, also if the loss reaches nothing else of it.
            only_shares = not (hidden or is_sharded) and info.ids.isdisjoint(strange)
            found.append((each, _NOTHING if only_shares else info.without(owned), certain))
            owned = owned | info.ids
    unowned = [t for key, t in strange.items() if key not in owned]
    if mine.is_sharded or any(info.is_sharded for _, info, _ in found):
        unowned = [t for t in unowned if not isinstance(t, Parameter)]
    return found, unowned, hidden or mine.is_sharded or not mine.ids.isdisjoint(ids)


def _leaves(loss: Tensor) -> tuple[list[Tensor], bool]:
    """The tensors whose `.grad` a backward pass adds to, and whether others may be hidden.

    A `torch.autograd.Function` may run another backward pass, as reentrant checkpointing does.
    """
    if loss.grad_fn is None:
        return [loss], False
    seen, found, stack, hidden = {loss.grad_fn}, [], [loss.grad_fn], False
    while stack:
        node = stack.pop()
        following = node.next_functions
        hidden = hidden or isinstance(node, BackwardCFunction)
        if not following and isinstance(variable := getattr(node, "variable", None), Tensor):
            found.append(variable)
        for each, _ in following:
            if each is not None and each not in seen:
                seen.add(each)
                stack.append(each)
    return found, hidden


# --- From one scale to another ----------------------------------------------------------------


@torch.no_grad()
def multiply(info: ranks.ParameterInfo, by: Multiplier, before: Multiplier | None = None) -> None:
    """Multiplies gradients by a scale, and divides them by the scale that they had."""

    def factor(device: torch.device) -> Tensor:
        wanted = by.scale_on(device)
        return wanted if before is None else wanted / before.scale_on(device)

    unscale(info, factor, checks=False, float16=True)


def unscale(
    info: ranks.ParameterInfo,
    factor: gradients.Factor,
    *,
    divides: bool = False,
    checks: bool = True,
    recheck: bool = False,
    found: Tensor | None = None,
    float16: bool = False,
    sums: bool = True,
) -> dict[torch.device, Tensor]:
    """Unscales gradients, and checks each number; those that have a graph are replaced.

    Args:
        info: Their parameters.
        factor, recheck, found: As for `gradients.unscale_and_check_`.
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
        by = factor(gradient.device)
        with torch.enable_grad():
            parameter.grad = gradient / by if divides else gradient * by
    if not checks:
        gradients.unscale_(given, factor, divide=divides)
        return {}
    by_device = gradients.unscale_and_check_(
        given, factor, divide=divides, recheck=recheck, found=found
    )
    if in_graph:
        finite = gradients.all_finite([p.grad for p, _ in in_graph])
        so_far = by_device.get(finite.device)
        bad = (~finite).to(torch.float32)
        by_device[finite.device] = bad if so_far is None else torch.maximum(so_far, bad)
    return by_device


def is_below_one(by: Multiplier) -> bool:
    """Whether a scale may be below 1, so that dividing by it can overflow."""
    lowest = by.rule.lowest_scale if by.number is None else by.number
    return lowest is None or lowest < 1.0
