"""Whether gradients are unscaled or scaled by one number, and which parameters a loss reaches.

Before a backward pass adds to gradients, `Engine.begin` multiplies those that are there by the
scale of the loss. Afterwards `Engine.end` divides them all and checks each number.
`optimizer.backward` calls both. A scaled loss calls `begin` by a hook when its `backward` starts;
`unscale_` or `step` then call `end`. So gradients with different scales are never added.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from lossscale.errors import GradientsError
from lossscale.torch import gradients, overflow_check, ranks
from lossscale.torch.scale import LossScale, Multiplier
from lossscale.torch.scaling import real_parts

engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""The engines of all optimizers: one loss may reach the parameters of several."""

ONE_FOR_SEVERAL = "Make one for both: LossScaleOptimizer([optimizer, other])."

_MARK = "_is_scaled_by_lossscale"


def remember_scaled(loss: Any) -> None:
    """Marks a loss as scaled, by any optimizer."""
    setattr(loss, _MARK, True)


def was_scaled(loss: Any) -> bool:
    """Whether this tensor is a scaled loss."""
    return hasattr(loss, _MARK)


class GradientRecord:
    """The state of an optimizer's gradients since its last step.

    A plain object, because compiled code loses what it writes to an optimizer.

    Attributes:
        scaled_by: The scale that multiplies them; None if they are unscaled. The `LossScale` itself
            if a loss was scaled whose `backward` cannot be seen, in compiled code or by hand.
        found: Whether an overflow was found in unscaled gradients, here or in another optimizer
            that the same loss reaches: float32 scalar tensor, 1 or 0. None if they were not
            checked.
        has_own_loss: Whether the optimizer itself scaled a loss; other optimizers' losses may
            reach its parameters too.
        is_uncertain: Whether the loss may not reach them at all: what `fully_shard` computes with
            cannot be assigned to one of several optimizers.
        is_graph: Whether they are parts of a graph (`create_graph=True`).
        part: The parameters that the loss of another optimizer has reached, a `ParameterInfo`;
            None if they are all of the optimizer, or the loss is its own.
        task: The last backward pass that has begun.
        decision: The decision of all processes, if `unscale_` made one.
        clips: Whether they are still to be clipped.
        is_settled: Whether `zero_grad` was called in place of the step that was decided.
        by_hand: Whether `get_scaled_loss` was called, and `get_unscaled_gradients` was not.
        divided: The gradients that `get_unscaled_gradients` was given, if it was called.
        warned: Whether the user was warned of a step without a scaled loss.
    """

    def __init__(self) -> None:
        self.warned = self.in_backward = False
        self.task = -1
        self.reset()

    def reset(self) -> None:
        """Starts again, after a step or when the gradients were cleared."""
        self.scaled_by: Multiplier | LossScale | None = None
        self.found: Any = None
        self.is_graph = self.clips = self.is_settled = self.by_hand = False
        self.has_own_loss = self.is_uncertain = False
        self.part: ranks.ParameterInfo | None = None
        self.divided: list[tuple[Any, int]] | None = None
        self.decision: Any = None
        self.witness: tuple[Any, int] | None = None

    def is_nothing(self) -> bool:
        """Whether no loss was scaled since the last step."""
        return self.scaled_by is None and self.found is None and self.divided is None

    def add(self, found: Any) -> None:
        """Adds what was found of gradients; an overflow stays until the next step."""
        if self.found is not None and found is not None:
            found = torch.maximum(self.found, found.to(self.found.device))
        self.found = self.found if found is None else found

    def remember(self, info: ranks.ParameterInfo) -> None:
        """Remembers the last unscaled gradient, or that there is none, and its version."""
        last = info.last_gradient()
        self.witness = None if last is None else (weakref.ref(last), last._version)

    def is_as_it_was(self, info: ranks.ParameterInfo) -> bool:
        """Whether the last gradient is the remembered one, unchanged."""
        last = info.last_gradient()
        if self.witness is None or last is None:
            return False
        return self.witness[0]() is last and self.witness[1] == last._version

    def are_gone(self, info: ranks.ParameterInfo) -> bool:
        """Whether the gradients that were checked have been cleared."""
        known = None if self.witness is None else self.witness[0]()
        if known is None or not any(p.grad is known for p in info.parameters):
            return True
        if self.witness is not None and self.witness[1] == known._version:
            return False
        # It was changed: to zeros, if gradients were cleared in place.
        grads = (p.grad for p in info.parameters if p.grad is not None)
        return not any(part.any() for g in grads for part in real_parts(ranks.local(g)))

    def are_scaled(self, grads: Sequence[Any]) -> bool | None:
        """Whether the gradients are scaled; None if no loss was scaled."""
        if self.is_nothing():
            return None
        if self.divided is None:
            return self.scaled_by is not None
        # `get_unscaled_gradients` returns new tensors. The user may have assigned them to `.grad`,
        # copied them into it, or left `.grad` as it was.
        versions = {id(t): version for ref, version in self.divided if (t := ref()) is not None}
        as_they_were = [versions.get(id(each)) == each._version for each in grads]
        if any(as_they_were) and not all(as_they_were):
            raise GradientsError(
                "Some parameters have a `.grad` that get_unscaled_gradients() returned, and others "
                "a scaled one. Assign the unscaled gradients to all, or call unscale_(), which "
                "divides every `.grad` in place."
            )
        return bool(as_they_were) and all(as_they_were)


def share(found: Sequence[Any], some: Iterable[Any]) -> None:
    """Gives each of some engines what was found in all of them.

    The scale that multiplied their gradients is too large if any overflows: all skip, and it falls.
    """
    for each in some:
        for one in found:
            each.record.add(one)


def versions_of(grads: Iterable[Any]) -> list[tuple[Any, int]]:
    """Gradients by weak references, with their versions."""
    return [(weakref.ref(each), each._version) for each in grads]


# --- What a loss reaches ----------------------------------------------------------------------


def alive(some: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The engines whose optimizer is alive, each with its optimizer.

    A traceback or a cycle may keep only the engine. Keep the list while you use an engine: garbage
    is collected at any moment.
    """
    return [(each, inner) for each in some if (inner := each.inner) is not None]


def is_seen(loss: Any) -> bool:
    """Whether a hook can run when the `backward` of a loss starts."""
    return bool(
        loss.requires_grad
        and not torch._C._functorch.peek_interpreter_stack()
        and not (loss.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def watch(scaled: Any, loss: Any, multiplier: Multiplier, own: Any, scaler: Any = None) -> None:
    """Multiplies existing gradients by the scale of a loss when its `backward` starts.

    Args:
        scaled: The scaled loss.
        loss: The loss.
        multiplier: The scale of the loss.
        own: The engine that scaled it; None for a scaler, whose loss is for all optimizers.
        scaler: The scaler of a loss that is for all of its optimizers.
    """

    def starts(_: Any) -> None:
        task, graph = torch._C._current_graph_task_id(), torch.is_grad_enabled()
        if own is not None and own.record.in_backward:
            raise GradientsError(
                "A part of this loss is already scaled. Pass the "
                "unscaled losses to optimizer.backward(loss)."
            )
        others = [each for each in engines if own is None or each.record is not own.record]
        # Several may have the same parameters: those of the scaler come first.
        others.sort(key=lambda each: each.scale is not scaler)
        mine = None if own is None else own.info()
        needed = others or scaler is not None
        found, rest = reached(loss, others, own=mine) if needed else ([], [])
        if own is not None:
            own.begin(multiplier, task=task, graph=graph, own_loss=True)
        for each, info, sure in found:
            each.begin(multiplier, info, task=task, graph=graph, own_loss=each.scale is scaler)
            each.record.is_uncertain = not sure
        if scaler is not None:
            scaler.track_unowned(rest, multiplier)

    scaled.register_hook(starts)


def reached(
    loss: Any, others: Iterable[Any], inputs: Any = None, own: Any = None
) -> tuple[list[tuple[Any, ranks.ParameterInfo, bool]], list[Any]]:
    """The engines whose parameters a loss reaches, and other tensors.

    Each engine comes with the parameters, and whether the loss reaches them for sure.

    Args:
        loss: The loss.
        others: The engines that it may reach.
        inputs: The only tensors that are reached, as in `torch.Tensor.backward`; None for all.
        own: Parameters that are left out of the result.
    """
    hidden = False
    if inputs is None:
        tensors, hidden = _leaves(loss)
    else:
        tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    rest = {id(t): t for t in tensors}
    taken = own.ids if own is not None else frozenset()
    rest = {key: t for key, t in rest.items() if key not in taken}
    ids = frozenset(rest)
    # `fully_shard` computes with its own parameters, and moves their gradients.
    is_sharded = any(isinstance(t, torch.nn.Parameter) for t in rest.values())
    found = []
    living = alive(others)
    for each, _ in living:
        info = each.info()
        sure = not ids.isdisjoint(info.ids)
        if not (sure or hidden or (is_sharded and info.is_sharded)):
            continue
        mine = [p for p in info.parameters if id(p) not in taken]
        whole = len(mine) == len(info.parameters)
        found.append((each, info if whole else ranks.ParameterInfo(mine, []), sure))
        taken = taken | info.ids
        rest = {key: t for key, t in rest.items() if key not in info.ids}
    if any(info.is_sharded for info in (own, *(info for _, info, _ in found)) if info is not None):
        rest = {key: t for key, t in rest.items() if not isinstance(t, torch.nn.Parameter)}
    return found, list(rest.values())


def _leaves(loss: Any) -> tuple[list[Any], bool]:
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
        if not following and isinstance(variable := getattr(node, "variable", None), torch.Tensor):
            found.append(variable)
        for each, _ in following:
            if each is not None and each not in seen:
                seen.add(each)
                stack.append(each)
    return found, hidden


# --- From one scale to another ----------------------------------------------------------------


@torch.no_grad()  # type: ignore[untyped-decorator]
def multiply(info: ranks.ParameterInfo, by: Any, before: Any = None) -> None:
    """Multiplies gradients by a scale, and divides them by the scale that they had."""
    if info.first_gradient() is None:
        return

    def factor(device: Any) -> Any:
        wanted = by.on(device).scale
        return wanted if before is None else wanted / before.on(device).scale

    changed = _changed_in_the_graph(info, lambda grad: grad * factor(grad.device))
    overflow_check.unscale_(_others(info, changed), factor)


@torch.no_grad()  # type: ignore[untyped-decorator]
def divide(
    info: ranks.ParameterInfo,
    by: Any,
    *,
    graph: bool = False,
    checks: bool = True,
    allow_float16: bool = False,
    found: Any = None,
) -> dict[Any, Any]:
    """Divides gradients by their scale, and checks each number.

    Args:
        info: Their parameters.
        by: A `Multiplier` or a `LossScale`; None if they are unscaled, to check them only.
        graph: Whether some are parts of a graph: these are replaced.
        checks: Whether to check them.
        allow_float16: Whether some may be in float16.
        found: The tensor to write the result of its device into, or None.

    Returns:
        By device, whether any number was infinite or NaN: float32 scalar tensor, 1 or 0.
    """
    powers = by is None or by.rule.powers_of_two

    def factor(device: Any) -> Any:
        factors = by.on(device)
        return factors.reciprocal if powers else factors.scale

    changed = []
    if graph and by is not None:
        changed = _changed_in_the_graph(
            info, lambda g: g * factor(g.device) if powers else g / factor(g.device)
        )
    given = _others(info, changed, allow_float16=allow_float16)
    if not checks:
        if by is not None:
            overflow_check.unscale_(given, factor, divide=not powers)
        return {}
    if by is None:
        by_device = overflow_check.check(given, found)
    else:
        by_device = overflow_check.unscale_and_check_(
            given, factor, divide=not powers, recheck=is_below_one(by), found=found
        )
    if changed:
        finite = overflow_check.all_finite([p.grad for p in changed])
        so_far = by_device.get(finite.device)
        bad = (~finite).to(torch.float32)
        by_device[finite.device] = bad if so_far is None else torch.maximum(so_far, bad)
    return by_device


def is_below_one(by: Any) -> bool:
    """Whether a scale may be below 1, so that dividing by it can overflow."""
    lowest = by.rule.lowest_scale if by.number is None else by.number
    return lowest is None or lowest < 1.0


def _changed_in_the_graph(info: ranks.ParameterInfo, changed: Callable[[Any], Any]) -> list[Any]:
    """Replaces gradients that are parts of a graph; returns their parameters."""
    having = [p for p in info.parameters if p.grad is not None and p.grad.requires_grad]
    with torch.enable_grad():
        for parameter in having:
            parameter.grad = changed(parameter.grad)
    return having


def _others(
    info: ranks.ParameterInfo, changed: Sequence[Any], *, allow_float16: bool = True
) -> gradients.Gradients:
    if changed:
        ids = set(map(id, changed))
        info = ranks.ParameterInfo([p for p in info.parameters if id(p) not in ids], [])
    return gradients.collect(info, allow_float16=allow_float16)
