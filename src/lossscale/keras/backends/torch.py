"""Keras on PyTorch: eager, with one wait for the decision in each step.

The rule runs on Python numbers, and only what has changed goes back to the device. Its own
operations would be some twenty kernels on scalars: a step of one variable would take 1.5 times as
long, one of two hundred 1.07.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import torch
from torch import Tensor

import lossscale.framework_types as ft
from lossscale import registry
from lossscale.common.arrays import Arrays
from lossscale.common.gradient_arguments import scaled_value
from lossscale.errors import GradientsError
from lossscale.keras.backends import (
    Backend,
    add,
    assign,
    check_without_tape,
    flat_variables,
    in_stateless_scope,
    trace_call,
)
from lossscale.keras_common.step import Step, check, without_overwritten
from lossscale.rules import ScaleRule
from lossscale.torch import gradients as torch_gradients
from lossscale.torch import scaling

_Saved = list[tuple[ft.Variable, Tensor]]
"""Variables, and their values at a time."""

# --- A step ---------------------------------------------------------------------------------------


def _check(step: Step, rule: ScaleRule, arrays: Arrays) -> tuple[bool, Step]:
    """Unscales dense gradients in the pass that checks them, and waits for the decision."""
    # In two passes a step takes 1.3 (100 large variables) to 1.5 times (one) as long.
    if step.scale is None or not rule.powers_of_two or torch.compiler.is_compiling():
        finite, step = check(step, rule, arrays)
        return bool(finite), step
    gradients, dense, others = list(step.gradients), [], []
    # With the list `gradients` itself, which is filled in below.
    unscaled = step._replace(gradients=gradients, scale=None)
    for index, gradient in enumerate(without_overwritten(step)):
        if gradient is None:
            if gradients[index] is not None:
                others.append(gradients[index])
        elif gradient.dtype in scaling.WIDE and not gradient.is_sparse:
            dense.append(index)
        else:
            [gradients[index]] = scaling.unscaled([gradient], step.scale, True)
            others.append(gradients[index])
    if not dense:
        finite = not rule.checks_gradients or torch_gradients.all_finite(gradients)
        return bool(finite), unscaled
    # `.grad` belongs to the user.
    scaled = [gradients[index] for index in dense]
    copies = [torch.empty_like(each) for each in scaled]
    torch._foreach_copy_(copies, scaled)
    for index, copy in zip(dense, copies, strict=True):
        gradients[index] = copy
    scale = torch.as_tensor(step.scale, dtype=torch.float32, device=copies[0].device)
    given, reciprocal = torch_gradients.of_tensors(copies), scale.reciprocal()
    if not rule.checks_gradients:
        torch_gradients.unscale_(given, reciprocal.to)
        return True, unscaled
    # The host reads one number: 1 after an overflow, otherwise the scale, which is made negative.
    found = torch_gradients.unscale_and_check_(given, reciprocal.to, into=scale.copysign(-1.0))
    overflow = torch_gradients.any_overflow(found.values(), scale.device)
    if others:
        overflow = torch.where(torch_gradients.all_finite(others), overflow, 1.0)
    read = overflow.item()
    if -math.inf < read <= -1.0:
        return True, unscaled
    # Dividing by a scale below 1 can overflow, and an infinite one hides an overflow.
    return read != 1.0 and bool(torch_gradients.all_finite(gradients)), unscaled


def _branch(
    finite: ft.Scalar,
    step: Step,
    inner: ft.KerasOptimizer,
    written: object,
    apply: Callable[..., object],
    update: Callable[[bool], object],
) -> None:
    if finite := bool(finite):
        apply(step.gradients, step.scale)
    update(finite)


def _run_guarded(
    models: object, step: ft.Function, counters: ft.Variables, weights: ft.Variables
) -> ft.Structure:
    """Copies the weights before the step."""
    before, counts = _copied(weights), _copied(counters)
    result = step()
    _put_back_if_moved(counts, before)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]  # of PyTorch
def _copied(variables: ft.Variables) -> _Saved:
    return [(variable, variable.value.detach().clone()) for variable in variables]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # of PyTorch
def _put_back_if_moved(counts: _Saved, before: _Saved) -> None:
    if any(bool(counter.value != count) for counter, count in counts):
        for weight, value in before:
            weight.assign(value)


# --- Scalar variables -----------------------------------------------------------------------------


def _holds_values() -> bool:
    """Whether variables hold their values, which the host may read and set."""
    return not in_stateless_scope() and not torch.compiler.is_compiling()


def _host_reader() -> Callable[[ft.Variable], Any] | None:
    return (lambda variable: variable._value.item()) if _holds_values() else None


def _assign(variable: ft.Variable, value: ft.Scalar) -> None:
    if isinstance(value, Tensor) or not _holds_values():
        assign(variable, value)
    else:
        variable._value.fill_(value)


def _add(variable: ft.Variable, value: ft.Scalar) -> None:
    if _holds_values():
        variable._value.add_(value)
    else:
        add(variable, value)


# --- Gradients of a loss --------------------------------------------------------------------------


def _differentiate(
    loss: ft.Loss, var_list: ft.VarList, scale: ft.Function, tape: ft.Tape, grad_loss: Any
) -> tuple[list[ft.Gradient], list[ft.Variable]]:
    check_without_tape("PyTorch", var_list, tape)
    scaled_loss = scaled_value(loss, scale)
    variables = flat_variables(var_list() if callable(var_list) else var_list)
    if not scaled_loss.requires_grad:
        raise GradientsError(
            "The loss does not depend on any variable, so that it has no gradient."
        )
    if grad_loss is None and scaled_loss.ndim:
        grad_loss = torch.ones_like(scaled_loss)
    gradients = torch.autograd.grad(
        scaled_loss, [v.value for v in variables], grad_loss, allow_unused=True
    )
    return list(gradients), variables


def _symbolic_gradients(loss: Tensor, variables: ft.Variables) -> list[ft.Gradient]:
    # A tensor knows how it was computed.
    gradients, _ = _differentiate(loss, list(variables), lambda value: value, None, None)
    return gradients


def _flat_gradients(gradients: ft.Structure) -> list[ft.Gradient]:
    return [gradient for gradient in keras.tree.flatten(gradients) if gradient is not None]


BACKEND = Backend(
    arrays=Arrays(
        scaled=scaling.scaled,
        unscaled=scaling.unscaled,
        all_finite=torch_gradients.all_finite,
        flat_gradients=_flat_gradients,
        # A copy, because variables change in place.
        read=lambda variable: variable.value.detach().clone(),
        assign=_assign,
        add=_add,
        is_on_host=lambda variable: bool(variable.value.device.type == "cpu"),
        branch=_branch,
        run_guarded=_run_guarded,
        trace_call=trace_call,
        new_overflow_tracker=lambda: registry.package("lossscale.torch.monitor").OverflowTracker(),
        check=_check,
        runs_now=lambda gradients: not torch.compiler.is_compiling(),
        host_reader=_host_reader,
        no_gradients=torch.no_grad,
    ),
    # Functions of Keras take a few times as long in eager mode.
    namespace=torch,
    differentiate=_differentiate,
    symbolic_gradients=_symbolic_gradients,
)
