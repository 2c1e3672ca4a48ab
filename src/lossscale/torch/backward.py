"""The start of the backward pass of a scaled loss, and which parameters the loss reaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from lossscale.errors import GradientsError
from lossscale.torch import ranks
from lossscale.torch.gradient_record import GradientRecord
from lossscale.torch.ranks import ParameterInfo
from lossscale.torch.scale import Multiplier
from lossscale.torch.scaled_gradients import (
    NOTHING,
    ScaledGradients,
    all_records,
    holding,
    is_only_record,
    lock,
    owners,
    owners_of,
)

Inputs: TypeAlias = Tensor | Sequence[Tensor] | None
"""The only tensors that a backward pass reaches, as in `torch.Tensor.backward`; None for all."""

_MARK = "_is_scaled_by_lossscale"


def remember_scaled(loss: Tensor) -> None:
    """Marks a loss as scaled, by any optimizer."""
    setattr(loss, _MARK, True)


def was_scaled(loss: Tensor) -> bool:
    """Whether this tensor is a scaled loss."""
    return hasattr(loss, _MARK)


# --- What a loss reaches ----------------------------------------------------------------------


def is_seen(loss: Tensor) -> bool:
    """Whether a hook can run when the `backward` of a loss starts."""
    return bool(
        loss.requires_grad
        and torch.is_grad_enabled()
        and not torch._C._functorch.peek_interpreter_stack()
        and not (loss.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def watch(scaled: Tensor, loss: Tensor, multiplier: Multiplier, of_loss: GradientRecord) -> None:
    """Has `prepare_backward` called when the `backward` of a scaled loss starts."""
    # A hook of a pass may scale a loss of its own.
    outer = torch._C._current_graph_task_id()

    def starts(_: object) -> None:
        if of_loss.in_backward:
            raise GradientsError(
                "A part of this loss is already scaled. Pass the "
                "unscaled losses to optimizer.backward(loss)."
            )
        task = torch._C._current_graph_task_id()
        given = None if is_only_record() else loss
        prepare_backward(given, multiplier, of_loss, task=task, outer=outer)

    # On the node, which takes less time than on the tensor.
    assert scaled.grad_fn is not None
    scaled.grad_fn.register_prehook(starts)


def prepare_backward(
    loss: Tensor | None,
    multiplier: Multiplier,
    of_loss: GradientRecord,
    *,
    inputs: Inputs = None,
    task: int = -1,
    outer: int = -1,
) -> list[ScaledGradients]:
    """Gradients of a loss are about to be added: multiplies those that are there.

    Args:
        loss: The loss; None if it can reach the parameters of `of_loss` alone.
        multiplier: Its scale.
        of_loss: The record of the optimizer that scaled it.
        inputs: The only tensors that are reached, as in `torch.Tensor.backward`; None for all.
        task: The backward pass; -1 before it, if what it adds to is settled after it.
        outer: The backward pass in which this one runs, in a hook; -1 if there is none.

    Returns:
        The sets that they are in, with one of the tensors of no optimizer if these are settled.
    """
    others, unowned, is_mine = ([], [], True) if loss is None else reached(loss, of_loss, inputs)
    if task == -1 and inputs is None and not (is_mine or others):
        _check_not_half(unowned)
    concerned = [(of_loss, of_loss.info(), True), *others]
    for record, info, _ in concerned:
        record.check_no_new_group()
        if outer != -1:
            _check_idle(info, outer, None if task == -1 else multiplier)
    for record, _, _ in concerned:
        record.count_left_out_step(multiplier)
    with lock:
        sets: list[ScaledGradients] = [
            record.put_into_set(multiplier, info, task, of_loss=of_loss, certain=certain)
            for record, info, certain in concerned
        ]
    if unowned and task == -1:
        sets.append(ScaledGradients(multiplier))
        sets[-1].add(ParameterInfo(unowned, []))
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


def _check_idle(info: ParameterInfo, outer: int, multiplier: Multiplier | None) -> None:
    """Checks that a pass within another one takes no gradients that the outer one will add to."""
    for scaled in holding(info):
        if scaled.task in (outer, -1) and scaled.multiplier is not multiplier:
            raise GradientsError(
                "A backward pass that is still running adds to gradients that this loss reaches. "
                "Call backward() of this loss after that pass."
            )


def reached(
    loss: Tensor, of_loss: GradientRecord, inputs: Inputs = None
) -> tuple[list[tuple[GradientRecord, ParameterInfo, bool]], list[Tensor], bool]:
    """The other optimizers whose parameters a loss reaches, and the tensors of no optimizer.

    Each record comes with the parameters, and whether the loss reaches them for certain: what
    `fully_shard` computes with cannot be assigned to one of several optimizers. The last result is
    whether the loss may reach parameters of `of_loss`.

    Args:
        loss: The loss.
        of_loss: The record of the optimizer that scaled it, whose parameters are left out.
        inputs: The only tensors that are reached, as in `torch.Tensor.backward`; None for all.
    """
    hidden = False
    if inputs is None:
        tensors, hidden = _leaves(loss)
    else:
        tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    mine = of_loss.info()
    owned = mine.ids
    strange = {id(t): t for t in tensors if id(t) not in owned}
    sharing = owners(mine)
    if not (strange or hidden or len(sharing) > 1):
        return [], [], True
    ids = frozenset(map(id, tensors))
    # `fully_shard` computes with its own parameters, and moves their gradients.
    is_sharded = any(isinstance(t, Parameter) for t in strange.values())
    records = dict.fromkeys([*sharing, *owners_of(strange)])
    if hidden or is_sharded:
        records |= dict.fromkeys(all_records(sharded=not hidden))
    others = []
    for record in records:
        if record is of_loss:
            continue
        info = record.info()
        certain = not info.ids.isdisjoint(ids) or (hidden and record in sharing)
        if certain or hidden or (is_sharded and info.is_sharded):
            # An overflow in what it shares is its own, also if the loss reaches nothing else of it.
            only_shares = not (hidden or is_sharded) and info.ids.isdisjoint(strange)
            others.append((record, NOTHING if only_shares else info.without(owned), certain))
            owned = owned | info.ids
    unowned = [t for key, t in strange.items() if key not in owned]
    if mine.is_sharded or any(info.is_sharded for _, info, _ in others):
        unowned = [t for t in unowned if not isinstance(t, Parameter)]
    return others, unowned, hidden or mine.is_sharded or not mine.ids.isdisjoint(ids)


def _leaves(loss: Tensor) -> tuple[list[Tensor], bool]:
    """The tensors whose `.grad` a backward pass adds to, and whether others may be hidden.

    A `torch.autograd.Function` may run another backward pass, as reentrant checkpointing does.
    """
    if loss.grad_fn is None:
        return [loss], False
    seen, leaves, stack, hidden = {loss.grad_fn}, [], [loss.grad_fn], False
    while stack:
        node = stack.pop()
        following = node.next_functions
        hidden = hidden or isinstance(node, BackwardCFunction)
        if not following and isinstance(variable := getattr(node, "variable", None), Tensor):
            leaves.append(variable)
        for each, _ in following:
            if each is not None and each not in seen:
                seen.add(each)
                stack.append(each)
    return leaves, hidden
