"""A step with a closure, which evaluates the model and calls `backward`.

Most optimizers evaluate the closure once, at the beginning. Then it is evaluated here, so that the
step can still be skipped. Others, such as LBFGS in its line search, evaluate it many times and need
unscaled gradients each time. No step can be skipped half-way: an evaluation that overflows is
repeated at a lower scale. If that does not help, LBFGS is put back to before the step.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lossscale.errors import ArgumentTypeError, GradientsError
from lossscale.torch import ranks
from lossscale.torch.backward import was_scaled
from lossscale.torch.engine import StepDecision
from lossscale.torch.master_weights import MasterWeights
from lossscale.torch.optimizer_list import OptimizerList, parts_of
from lossscale.torch.scaling import real_parts

if TYPE_CHECKING:
    from lossscale.torch.optimizer import LossScaleOptimizer


Saved: TypeAlias = tuple[list[tuple[Tensor, Tensor]], dict[Tensor, dict[str, Any]]]
"""Tensors with their values, and the state of an optimizer."""


class _Skipped(BaseException):
    """Leaves the step of an optimizer that has changed nothing yet."""


def step(optimizer: LossScaleOptimizer, closure: Callable[[], Any], **more: Any) -> Any:
    """Makes a step of a `LossScaleOptimizer` with a closure.

    Args:
        optimizer: The wrapper.
        closure: Evaluates the model, calls `backward` and returns the loss.
        **more: Passed on to `step` of the inner optimizer.

    Returns:
        The loss, or what the inner optimizer returns.
    """
    _check_closure(closure)
    inner, record = optimizer.inner_optimizer, optimizer._record
    if optimizer.decide == "device" or evaluates_first(inner):
        with torch.enable_grad():
            loss = closure()
        optimizer._take_step(**more)
        return loss
    record.account_for_unseen_backward()
    # It may be stepped along gradients that are there before it evaluates anything.
    if not record.no_loss_scaled() and not optimizer._unscale_().apply:
        optimizer._take_step()
        return None
    norms_before = None if starts_with_closure(inner) else _norms(inner)
    decision, is_first = record.decision, True

    def evaluate() -> Any:
        nonlocal decision, is_first
        loss, now = _evaluate(optimizer, closure, derives=decision is None)
        decision = now or decision
        if now is not None and not now.apply:
            # No lower scale helps: it would put what is not finite into the parameters.
            if is_first and (norms_before is None or norms_before == _norms(inner)):
                raise _Skipped(loss)
            if norms_before is not None:
                raise GradientsError(
                    f"{type(inner).__name__} can neither apply nor skip this step. It moved the "
                    "parameters and evaluated the closure again, whose gradients are not finite at "
                    "any loss scale. Load a checkpoint."
                )
        if is_first and decision is not None and norms_before is not None:
            optimizer._notify_decided(decision)
        is_first = False
        return loss

    try:
        if norms_before is None:
            # Evaluated before the step, so that a skipped one leaves the inner state as it is, too.
            losses = [evaluate()]
            saved = _saved(inner)
            loss = inner.step(lambda: losses.pop() if losses else evaluate(), **more)
            if decision is not None:
                if not decision.apply:
                    _restore(inner, saved)
                optimizer._notify_decided(decision)
        else:
            loss = inner.step(evaluate, **more)
    except _Skipped as skipped:
        assert decision is not None
        loss = skipped.args[0]
        optimizer._notify_decided(decision)
    if decision is not None:
        optimizer._finish(decision)
    return loss


def _check_closure(closure: object) -> None:
    if not callable(closure):
        raise ArgumentTypeError(
            "`closure` must be a callable that evaluates the model, calls backward() and "
            f"returns the loss. Received: {type(closure).__name__}. step() takes no loss: call "
            "optimizer.backward(loss) before it."
        )


def _norms(inner: Optimizer) -> list[float]:
    """The norms of the parameters, which show whether one was changed."""
    with torch.no_grad():
        parts = [p for t in ranks.parameters_of(inner) for p in real_parts(t)]
        norms: list[float] = torch.stack([p.float().norm() for p in parts]).tolist()
        return norms


def _saved(inner: Optimizer) -> Saved:
    """The parameters, masters and state of LBFGS, which writes to its tensors and lists."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else copy.copy(value)

    state = {p: {k: copied(v) for k, v in each.items()} for p, each in inner.state.items()}
    masters = inner.masters.values() if isinstance(inner, MasterWeights) else ()
    return [(p, p.detach().clone()) for p in (*ranks.parameters_of(inner), *masters)], state


def _restore(inner: Optimizer, saved: Saved) -> None:
    with torch.no_grad():
        for tensor, value in saved[0]:
            tensor.copy_(value)
    inner.state.clear()
    inner.state.update(saved[1])


def _evaluate(
    optimizer: LossScaleOptimizer, closure: Callable[[], Any], *, derives: bool
) -> tuple[Any, StepDecision | None]:
    """Evaluates a closure, at lower scales as long as that may help; unscales the gradients.

    Args:
        optimizer: The wrapper.
        closure: The closure.
        derives: Whether it must compute gradients: none were computed in this step.

    Returns:
        The loss, and the decision on the gradients; None if it has computed none.
    """
    engine, record = optimizer._engine, optimizer._record
    while True:
        record.clear()
        with torch.enable_grad():
            loss = closure()
        _check_loss(loss, optimizer.inner_optimizer)
        if record.no_loss_scaled() and not derives:
            return loss, None
        decision = optimizer._unscale_()
        value = loss.detach() if isinstance(loss, Tensor) else loss
        # Nothing was seen of gradients that are not scaled, and no lower scale helps them.
        if decision.apply or not decision.is_scaled or not math.isfinite(float(value)):
            break
        before = engine.scale.number
        engine.scale.update(decision.skipped)
        now = engine.scale.number
        if before is None or now is None or not now < before:
            break
    return loss, engine.clipped(decision)


def _check_loss(loss: Any, inner: Optimizer) -> None:
    if loss is None:
        raise ArgumentTypeError(
            f"The closure must return the loss: {type(inner).__name__} reads it. Received: None."
        )
    if was_scaled(loss):
        raise GradientsError(
            f"The closure returned the scaled loss. Return the loss itself: {type(inner).__name__} "
            "compares it with unscaled gradients, and with losses at other scales."
        )


# --- What optimizers do with a closure ----------------------------------------------------------


def demands_closure(inner: Optimizer) -> bool:
    """Whether `step` requires a closure, as that of LBFGS does."""
    if isinstance(inner, MasterWeights):
        return demands_closure(inner.inner_optimizer)
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def evaluates_first(inner: Optimizer) -> bool:
    """Whether a step with a closure equals one evaluation, then a step without it."""
    if isinstance(inner, MasterWeights):
        return evaluates_first(inner.inner_optimizer)
    if isinstance(inner, OptimizerList):
        return True
    step = inspect.signature(type(inner).step).parameters
    if "closure" not in step:
        return True
    return type(inner).step.__module__.startswith("torch.") and not demands_closure(inner)


def starts_with_closure(inner: Optimizer) -> bool:
    """Whether an optimizer is known to evaluate its closure before it changes anything."""
    return isinstance(parts_of(inner)[0], torch.optim.LBFGS)
