"""PyTorch: eager, with one look at the verdict on the host for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import torch

from lossscale.common.checks import scaled_value
from lossscale.common.notes import NotesOfVariables, StepNotes
from lossscale.errors import ArgumentError, GradientsError
from lossscale.keras.backends import torch_state
from lossscale.keras.backends.common import (
    aggregation_name,
    check_strategy,
    known,
    outside_traces,
)
from lossscale.keras.backends.common import flat_keras_variables as flat_variables
from lossscale.keras.backends.common import is_keras_variable as is_variable
from lossscale.keras.backends.common import only_place as current_place
from lossscale.keras.state import Ledger
from lossscale.keras.step import Arrays, Step
from lossscale.rules import ScaleState
from lossscale.torch import finite as finite_check
from lossscale.torch import magnitudes
from lossscale.torch.arrays import WIDE, scaled, unscaled
from lossscale.torch.finite import all_finite

__all__ = [
    "aggregation_name",
    "all_finite",
    "cast",
    "check_strategy",
    "current_place",
    "differentiate",
    "flat_gradients",
    "flat_variables",
    "is_variable",
    "known",
    "namespace",
    "new_notes",
    "outside_traces",
    "read",
    "replica_count",
    "run_step",
    "scaled",
    "symbolic_gradients",
    "unscaled",
]

# Functions of Keras take a few times as long in eager mode.
namespace = torch


def read(variable: Any) -> Any:
    """The value of a Keras variable now, as a tensor of its own: variables change in place."""
    return variable.value.detach().clone()


def flat_gradients(gradients: Any) -> list[Any]:
    """The gradients in a nest, without None."""
    return [gradient for gradient in keras.tree.flatten(gradients) if gradient is not None]


def replica_count() -> int:
    """Always 1: this process applies its own gradients."""
    return 1


def cast(gradient: Any, dtype: str) -> Any:
    """Returns a gradient, dense or sparse, in another dtype."""
    return gradient.to(getattr(torch, dtype))


_ARRAYS = Arrays(unscaled, all_finite, cast)


def run_step(step: Step, inner: Any, ledger: Ledger, notes: StepNotes | None) -> None:
    """Unscales and applies gradients or skips the step, with one wait for the verdict.

    Args:
        step: The step; this process applies its own gradients.
        inner: The inner optimizer, built.
        ledger: What the step moves besides.
        notes: What a monitor wants noted, or None.
    """
    with torch.no_grad():
        judged = unscale_and_judge(step, inner, ledger)
        done = step._replace(gradients=judged.gradients, are_scaled=False)
        seen = done.seen(magnitudes.seen, judged.finite)
        if notes is not None:
            notes.note(done.decided(_ARRAYS, judged.applied, None, is_shared=True))
        if judged.applied:
            inner.apply(done.for_inner(inner, _ARRAYS), step.variables)
        if judged.on_host:
            torch_state.move(ledger, inner, judged.state, judged.applied)
        else:
            ledger.move(seen)


def new_notes(histograms_every: int | None, new_variable: Callable[..., Any]) -> NotesOfVariables:
    """Returns what notes steps for a monitor.

    Args:
        histograms_every: At which multiples of this step number exponents are counted.
        new_variable: Makes a Keras variable of a name, a dtype and a shape, with zeros in it.
    """
    from lossscale.torch.notes import Notes

    return Notes(histograms_every)


class Judged(NamedTuple):
    """A step that was decided on.

    Attributes:
        gradients: Unscaled gradients; None where there is none.
        finite: The verdict as a boolean scalar tensor, or as a bool if the host moves the state;
            True if nothing was checked.
        applied: The verdict on the host.
        on_host: Whether the host can move the state.
        state: The state before the step, as Python numbers; None if it was not read.
    """

    gradients: list[Any]
    finite: Any
    applied: bool
    on_host: bool = False
    state: ScaleState | None = None


def unscale_and_judge(step: Step, inner: Any, ledger: Ledger) -> Judged:
    """Unscales gradients and finds out whether the step is applied.

    Args:
        step: The step.
        inner: The inner optimizer.
        ledger: What the step moves besides.
    """
    on_host = torch_state.host_can_move(step, ledger)
    in_one_pass = step.are_scaled and step.decide is None and step.powers_of_two
    if not in_one_pass or torch.compiler.is_compiling():
        finite = step.is_finite(_ARRAYS)
        return Judged(step.unscaled(_ARRAYS), finite, finite is True or bool(finite))

    result, copied, others = list(step.gradients), [], []
    multiplied = step.of_the_loss
    for index, gradient in enumerate(multiplied):
        if gradient is None:
            if result[index] is not None:
                others.append(result[index])
        elif gradient.dtype in WIDE and not gradient.is_sparse:
            copied.append(index)
        else:
            [result[index]] = unscaled([gradient], step.scale, True)
            others.append(result[index])

    if not copied:
        finite = all_finite(result) if step.checks_gradients else True
        return Judged(result, finite, finite is True or bool(finite))
    # A `.grad` is its user's: it may be added to or filled again, in ways that leave no trace.
    keys = [(index, id(step.variables[index])) for index in copied]
    in_place = _copies(inner, [multiplied[index] for index in copied], keys)
    for index, tensor in zip(copied, in_place, strict=True):
        result[index] = tensor
    scale = torch.as_tensor(step.scale, dtype=torch.float32, device=in_place[0].device)
    if not step.checks_gradients:
        finite_check.multiply_(in_place, scale.reciprocal())
        return Judged(result, True, True, on_host)
    found: Any = finite_check.unscale_(in_place, scale.reciprocal())
    if others:
        found = found + torch.logical_not(all_finite(others)).to(found)
    state = None
    if on_host:
        overflowed, state = torch_state.read_with(ledger, found)
        may_grow = not state.scale >= 1.0
    else:
        # One number for the host.
        answer = int((found > 0) + 2 * torch.logical_not(scale >= 1.0))
        overflowed, may_grow = bool(answer & 1), bool(answer & 2)
    if may_grow and not overflowed:
        # With a scale below 1 unscaling may overflow what was finite.
        finite = all_finite(in_place)
        return Judged(result, finite, bool(finite), on_host, state)
    finite = not overflowed if on_host else found == 0
    return Judged(result, finite, not overflowed, on_host, state)


def _copies(optimizer: Any, gradients: Sequence[Any], keys: Sequence[Any]) -> list[Any]:
    """Returns copies of gradients; on a CPU in memory that is kept for the next step.

    There fresh memory takes several times as long as the copy itself. An accelerator's allocator
    gives the same memory out again, and has no room to keep.

    Args:
        optimizer: Who keeps it.
        gradients: Dense tensors.
        keys: What tells the memory of one gradient from that of others.
    """
    kept = optimizer.__dict__.setdefault("_copied_gradients", {})
    copies = []
    for key, gradient in zip(keys, gradients, strict=True):
        copy = kept.get(key) if gradient.device.type == "cpu" else None
        if copy is None or copy.shape != gradient.shape or copy.dtype != gradient.dtype:
            copy = torch.empty_like(gradient)
            if gradient.device.type == "cpu":
                kept[key] = copy
        copies.append(copy)
    torch._foreach_copy_(copies, list(gradients))
    return copies


def differentiate(
    loss: Any,
    variables: Any,
    scale: Callable[[Any], Any],
    *,
    tape: Any = None,
    grad_loss: Any = None,
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of a scaled loss, and the variables they belong to.

    Args:
        loss: A callable without arguments, or a tensor with a gradient function.
        variables: A list, one variable, or a callable that returns either.
        scale: Multiplies a loss by the loss scale.
        tape: Must be None: PyTorch has no tapes.
        grad_loss: Tensor of the loss's shape that multiplies the gradients, or None.
    """
    if tape is not None:
        raise ArgumentError("`tape` is for the TensorFlow backend. Leave it out.")
    scaled_loss = scaled_value(loss, scale)
    if callable(variables):
        variables = variables()
    if variables is None:
        raise ArgumentError(
            "`var_list` must be given on the PyTorch backend, which does not record the "
            "variables a loss was computed from. Pass model.trainable_variables."
        )
    variables = flat_variables(variables)
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


def symbolic_gradients(loss: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a tensor, which knows how it was computed."""
    gradients, _ = differentiate(loss, list(variables), lambda value: value)
    return gradients
