"""Losses and gradients as PyTorch tensors: their parts, widening, scaling and unscaling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lossscale.errors import ScalerArgumentError, UnsupportedError

CPU = torch.device("cpu")

WIDE = (torch.float32, torch.float64)
"""The dtypes of real numbers in which gradients are unscaled."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps a method out of compiled code, which would be recompiled for each number it reads.

    `torch.compiler.disable` alone would also slow down calls outside compiled code. It also keeps
    it out of inference mode, whose tensors cannot be changed after that.
    """
    disabled: Callable[_P, _R] = torch.compiler.disable(method)

    @functools.wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return disabled(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return method(*args, **kwargs)
        return method(*args, **kwargs)

    return called


def scalar(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a new 0-d tensor that may be changed in place, also in inference mode."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def filled(number: Tensor) -> Callable[[torch.device], Tensor]:
    """Returns what makes a scalar tensor of the CPU on a device, without a copy, which waits."""
    return lambda device: scalar(number.item(), device, number.dtype)


def read(tensor: Tensor) -> float:
    """Reads a number from a tensor; see `read_all`."""
    _check_readable(tensor)
    # Not by a copy, which is a launch more.
    return float(tensor.item())


def read_all(tensor: Tensor) -> Tensor:
    """Copies a tensor to the CPU, which waits for its device.

    Raises:
        UnsupportedError: While a CUDA graph is captured.
    """
    _check_readable(tensor)
    return tensor.cpu()


def is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph records what is computed with a tensor."""
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_readable(tensor: Tensor) -> None:
    if is_captured(tensor):
        raise UnsupportedError(
            "step() cannot run while a CUDA graph is captured: the host reads from the GPU whether "
            "to skip the step. Make the optimizer with decide='device', or capture backward() and "
            "call step() after the graph."
        )


def stored(gradient: Tensor) -> Tensor:
    """The dense tensor that holds a gradient: the coalesced values of a sparse one."""
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()
    return gradient if gradient.layout == torch.strided else gradient.values()


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is an infinity or NaN; reads it from its device."""
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(stored(tensor.detach()).isfinite().all())


def real_parts(gradient: Tensor | None) -> list[Tensor]:
    """The tensors of real numbers that a gradient is made of, as they are stored.

    Args:
        gradient: Tensor of any dtype and layout, or None.

    Returns:
        One tensor, with a last dimension of 2 for a complex dtype; none for None and integers.
    """
    if gradient is None:
        return []
    values = stored(gradient.detach())
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return [values] if values.is_floating_point() else []


def widened(tensor: Tensor) -> Tensor:
    """A tensor in float32 or wider."""
    return tensor if tensor.dtype in WIDE or tensor.is_complex() else tensor.to(torch.float32)


def scaled(loss: Tensor | float, scale: Tensor | float) -> Tensor:
    """Multiplies a loss by the scale, in float32 or wider."""
    if not isinstance(loss, Tensor):
        # A default device would place it elsewhere.
        loss = torch.as_tensor(loss, device=CPU)
    loss = widened(loss)
    return loss * torch.as_tensor(scale, dtype=loss.real.dtype, device=loss.device)


def unscaled(
    gradients: Sequence[Tensor | None], scale: Tensor | float, powers_of_two: bool
) -> list[Tensor | None]:
    """Divides gradients by the scale, in float32 or wider; returns new tensors.

    Args:
        gradients: Tensors of any dtype, or None. Sparse stays sparse.
        scale: float32 scalar tensor, or a Python float.
        powers_of_two: Whether the scale is a power of two, so that multiplying by the reciprocal
            is exact. Others are divided by.
    """
    factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def divided(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        gradient = widened(gradient)
        kind = (gradient.device, gradient.real.dtype)
        if kind not in factors:
            divisor = torch.as_tensor(scale, dtype=kind[1], device=kind[0])
            factors[kind] = divisor.reciprocal() if powers_of_two else divisor
        return gradient * factors[kind] if powers_of_two else gradient / factors[kind]

    return [divided(gradient) for gradient in gradients]


def mapped(function: Callable[[Tensor], object], outputs: Any) -> Any:
    """Applies a function to each tensor of a nest; an iterable is returned as an iterator."""
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, Mapping):
        return {key: mapped(function, value) for key, value in outputs.items()}
    if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
        nest = [mapped(function, value) for value in outputs]
        if hasattr(outputs, "_fields"):
            return type(outputs)(*nest)
        return type(outputs)(nest) if isinstance(outputs, (list, tuple)) else iter(nest)
    raise ScalerArgumentError(
        "`outputs` must be a tensor, or a dictionary, sequence or other iterable of tensors: the "
        f"losses to scale. Received: {outputs!r} of type {type(outputs).__name__}."
    )
