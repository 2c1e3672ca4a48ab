"""The start of the backward pass of a scaled loss, and which parameters the loss reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from lossscale.errors import GradientsError
from lossscale.torch import gradient_record, gradients, ranks
from lossscale.torch.gradient_record import BackwardPass, GradientRecord
from lossscale.torch.ranks import ParameterInfo
from lossscale.torch.scale import Multiplier

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

    def starts(_: object) -> None:
        running = of_loss.pass_now()
        if running is not None and running.task == -1:
            raise GradientsError(
                "A part of this loss is already scaled. Pass the "
                "unscaled losses to optimizer.backward(loss)."
            )
        of_loss.see_parameters()
        backward_pass = BackwardPass(torch._C._current_graph_task_id())
        prepare_backward(loss, multiplier, of_loss, backward_pass)
        # Autograd holds the pass until then.
        torch.autograd.Variable._execution_engine.queue_callback(backward_pass.end)

    # On the node, which takes less time than on the tensor.
    assert scaled.grad_fn is not None
    scaled.grad_fn.register_prehook(starts)


def prepare_backward(
    loss: Tensor,
    multiplier: Multiplier,
    of_loss: GradientRecord,
    backward_pass: BackwardPass,
    inputs: Inputs = None,
) -> Callable[[], None]:
    """Puts the gradients that a loss is about to add to on the scale of the loss.

    Args:
        loss: The unscaled loss.
        multiplier: Its scale.
        of_loss: The record of the optimizer that scaled it.
        backward_pass: The pass that begins.
        inputs: The only tensors that are reached, as in `torch.Tensor.backward`; None for all.

    Returns:
        A function that ends the pass and unscales all that it has added to, for `backward`.
    """
    task = backward_pass.task
    if task != -1 and len(gradient_record.all_records()) == 1:
        # All gradients that this pass leaves scaled belong to this wrapper, or to no wrapper.
        records, unowned = [of_loss], list[Tensor]()
    else:
        records, unowned = _reached(loss, of_loss, inputs, task)
    for record in records:
        record.check_can_receive(multiplier, task)
    for record in records:
        record.account_for_last_step(multiplier)
    gradient_record.put_on(records, multiplier)
    for record in records:
        record.receive(backward_pass, own=record is of_loss)
    # Those of a pass that leaves gradients scaled stay scaled, too.
    info = ParameterInfo(unowned, []) if unowned and task == -1 else None
    if info is not None:
        gradients.multiply(info, multiplier)

    def finish() -> None:
        backward_pass.end()
        for record in records:
            record.settle()
        if info is not None:
            gradients.unscale(info, multiplier.reciprocal_on, checks=False, float16=True)

    return finish


def _reached(
    loss: Tensor, of_loss: GradientRecord, inputs: Inputs, task: int
) -> tuple[list[GradientRecord], list[Tensor]]:
    """The records that a loss concerns, and the tensors of no optimizer that it reaches.

    It concerns those of the parameters that it reaches and its own, and all that share parameters
    with these.
    """
    if inputs is None:
        tensors, hidden = leaves_of(loss)
    else:
        tensors, hidden = [inputs] if isinstance(inputs, Tensor) else list(inputs), False
    mine = of_loss.info.ids
    records = [of_loss, *gradient_record.owning([id(t) for t in tensors if id(t) not in mine])]
    reached = gradient_record.sharing(gradient_record.all_records() if hidden else records)
    owned = mine.union(*(r.info.ids for r in reached))
    unowned = [t for t in tensors if id(t) not in owned]
    # `fully_shard` may compute with float16 copies of float32 parameters.
    is_alone = len(unowned) == len(tensors) and not (hidden or of_loss.info.is_sharded)
    if task == -1 and inputs is None and is_alone:
        _check_not_half(unowned)
    sharded = gradient_record.sharded_records()
    if sharded and any(isinstance(t, Parameter) for t in unowned):
        # `fully_shard` computes with its own parameters, and moves their gradients.
        reached = gradient_record.sharing([*reached, *sharded])
        unowned = [t for t in unowned if not isinstance(t, Parameter)]
    return reached, unowned


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


def leaves_of(loss: Tensor) -> tuple[list[Tensor], bool]:
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
