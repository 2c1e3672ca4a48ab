"""PyTorch: eager, with one look at the verdict on the host for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import torch

from lossscale.errors import ArgumentError, GradientsError
from lossscale.frameworks.checks import scaled_value
from lossscale.frameworks.finite import torch as finite_check
from lossscale.frameworks.keras.engines import torch_state
from lossscale.frameworks.keras.engines.common import (
    aggregation_name,
    check_strategy,
    known,
    outside_traces,
)
from lossscale.frameworks.keras.engines.common import flat_keras_variables as flat_variables
from lossscale.frameworks.keras.engines.common import is_keras_variable as is_variable
from lossscale.frameworks.keras.engines.common import only_place as current_place
from lossscale.frameworks.watches.common import Seen
from lossscale.rules import ScaleState

__all__ = [
    "aggregation_name",
    "check_strategy",
    "current_place",
    "flat_variables",
    "is_variable",
    "known",
    "outside_traces",
]

# Functions of Keras take a few times as long in eager mode.
namespace = torch

_IN_PLACE = (torch.float32, torch.float64)


def read(variable: Any) -> Any:
    """The value of a Keras variable now, as a tensor of its own: variables change in place."""
    return variable.value.detach().clone()


def unscaled(gradients: Sequence[Any], scale: Any, exact_reciprocal: bool) -> list[Any]:
    """Divides gradients by the scale, in float32 or wider.

    Args:
        gradients: Tensors of any dtype, or None. Sparse stays sparse.
        scale: float32 scalar tensor, or a Python float.
        exact_reciprocal: Whether multiplying by the reciprocal is exact. It is for powers of
            two; others are divided by.
    """
    factors: dict[Any, Any] = {}

    def divided(gradient: Any) -> Any:
        if gradient is None:
            return None
        gradient = _widened(gradient)
        kind = (gradient.device, gradient.real.dtype)
        if kind not in factors:
            divisor = torch.as_tensor(scale, dtype=kind[1], device=kind[0])
            factors[kind] = divisor.reciprocal() if exact_reciprocal else divisor
        return gradient * factors[kind] if exact_reciprocal else gradient / factors[kind]

    return [divided(gradient) for gradient in gradients]


def scaled(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the scale, in float32 or wider."""
    loss = _widened(torch.as_tensor(loss))
    return loss * torch.as_tensor(scale, dtype=loss.real.dtype, device=loss.device)


def _widened(tensor: Any) -> Any:
    wide = tensor.dtype in (torch.float32, torch.float64) or tensor.is_complex()
    return tensor if wide else tensor.to(torch.float32)


def all_finite(gradients: Sequence[Any], scale: Any = None, exact_reciprocal: bool = True) -> Any:
    """Whether every element of every gradient is finite once it is unscaled.

    Args:
        gradients: Tensors (of sparse ones the values are looked at) or None (skipped).
        scale: What they will be divided by; None if they are unscaled already.
        exact_reciprocal: As for `unscaled`.

    Returns:
        A boolean scalar tensor.
    """
    if scale is not None:
        gradients = unscaled(gradients, scale, exact_reciprocal)
    return finite_check.all_finite([gradient for gradient in gradients if gradient is not None])


def flat_gradients(gradients: Any) -> list[Any]:
    """The gradients in a nest, without None."""
    return [gradient for gradient in keras.tree.flatten(gradients) if gradient is not None]


def replica_count() -> int:
    """Always 1: this process applies its own gradients."""
    return 1


def run_step(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], scale: Any, aggregate: bool
) -> None:
    """Unscales and applies gradients or skips the step, with one wait for the verdict.

    Args:
        optimizer: The loss scale optimizer, built.
        gradients: Those of the step; None where there is none.
        variables: Their variables.
        scale: What the gradients have to be divided by; None if they are unscaled already.
        aggregate: Not used: this process applies its own gradients.
    """
    with torch.no_grad():
        judged = unscale_and_judge(optimizer, gradients, variables, scale)
        if optimizer._watch is not None:
            read = optimizer._current_scale() if scale is None else scale
            seen = Seen(judged.gradients, variables, list, judged.applied, read, None, True)
            optimizer._watch.note(seen)
        if judged.applied:
            optimizer.inner_optimizer.apply(judged.gradients, list(variables))
        if judged.on_host:
            torch_state.move(optimizer, judged.state, judged.applied)
        else:
            optimizer._move_scale(judged.finite)


def new_watch(histograms_every: int | None, new_variable: Callable[..., Any]) -> Any:
    """Returns what notes steps for a monitor.

    Args:
        histograms_every: At which multiples of this step number exponents are counted.
        new_variable: Makes a Keras variable of a name, a dtype and a shape, with zeros in it.
    """
    from lossscale.frameworks.watches.torch import Watch

    return Watch(histograms_every)


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


def unscale_and_judge(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], scale: Any
) -> Judged:
    """Unscales gradients and finds out whether the step is applied.

    Args:
        optimizer: The loss scale optimizer.
        gradients: Those of the step; None where there is none.
        variables: Their variables.
        scale: What the gradients have to be divided by; None if they are unscaled already.
    """
    on_host = torch_state.host_can_move(optimizer)
    # A LossScale of the user's own has a verdict of its own.
    in_one_pass = scale is not None and optimizer._state is not None
    if not in_one_pass or torch.compiler.is_compiling() or not optimizer._rule.powers_of_two:
        finite = optimizer._judge(gradients, variables, scale)
        divided = optimizer._unscaled(gradients, variables, scale)
        return Judged(divided, finite, finite is True or bool(finite))

    result, copied, others = list(gradients), [], []
    multiplied = optimizer._multiplied(gradients, variables)
    for index, gradient in enumerate(multiplied):
        if gradient is None:
            if result[index] is not None:
                others.append(result[index])
        elif gradient.dtype in _IN_PLACE and not gradient.is_sparse:
            copied.append(index)
        else:
            [result[index]] = unscaled([gradient], scale, True)
            others.append(result[index])

    if not copied:
        finite = optimizer._judge(result, variables, None)
        return Judged(result, finite, finite is True or bool(finite))
    # A `.grad` is its user's: it may be added to or filled again, in ways that leave no trace.
    keys = [(index, id(variables[index])) for index in copied]
    in_place = _copies(optimizer, [multiplied[index] for index in copied], keys)
    for index, tensor in zip(copied, in_place, strict=True):
        result[index] = tensor
    scale = torch.as_tensor(scale, dtype=torch.float32, device=in_place[0].device)
    checked = optimizer._rule.checks_gradients
    unscale_ = finite_check.unscale_ if checked else finite_check.multiply_
    found: Any = unscale_(in_place, scale.reciprocal())
    if not checked:
        return Judged(result, True, True, on_host)
    if others:
        found = found + torch.logical_not(finite_check.all_finite(others)).to(found)
    state = None
    if on_host:
        overflowed, state = torch_state.read_with(optimizer, found)
        may_grow = not state.scale >= 1.0
    else:
        # One number for the host.
        answer = int((found > 0) + 2 * torch.logical_not(scale >= 1.0))
        overflowed, may_grow = bool(answer & 1), bool(answer & 2)
    if may_grow and not overflowed:
        # With a scale below 1 unscaling may overflow what was finite.
        finite = finite_check.all_finite(in_place)
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
