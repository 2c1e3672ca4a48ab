"""Unscaling gradients and looking at them, with PyTorch: one pass over memory for both.

The kernel is the one behind `torch.amp.GradScaler`. It works in place, so here it only gets
tensors that nobody else reads: copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lossscale.torch.private_names import check_and_unscale_
from lossscale.torch.scaling import real_parts, unscaled, widened


def unscale_(tensors: Sequence[Any], reciprocal: Any) -> Any:
    """Multiplies tensors by the reciprocal of the loss scale, in place.

    Args:
        tensors: float32 or float64 tensors, dense, that may be changed.
        reciprocal: float32 scalar tensor.

    Returns:
        Whether any element was infinite or NaN before: a float32 scalar tensor, 1 or 0.
    """
    found = torch.zeros((), dtype=torch.float32, device=reciprocal.device)
    for (device, _), group in _groups(tensors).items():
        found_here = found if device == found.device else torch.zeros((), device=device)
        check_and_unscale_(group, found_here, reciprocal.to(device))
        if found_here is not found:
            found = torch.maximum(found, found_here.to(found.device))
    return found


def multiply_(tensors: Sequence[Any], factor: Any) -> None:
    """Multiplies tensors in place without looking at them, which takes less time.

    Args:
        tensors: float32 or float64 tensors, dense, that may be changed.
        factor: float32 scalar tensor.
    """
    for (device, _), group in _groups(tensors).items():
        torch._foreach_mul_(group, factor.to(device))


def _groups(tensors: Sequence[Any]) -> dict[tuple[Any, Any], list[Any]]:
    """The tensors by device and dtype: a kernel takes those of one of each."""
    groups: dict[tuple[Any, Any], list[Any]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def all_finite(gradients: Sequence[Any], scale: Any = None, powers_of_two: bool = True) -> Any:
    """Whether every element of every gradient is finite once it is unscaled.

    Args:
        gradients: Tensors of any dtype and layout (of sparse ones the values are looked at) or
            None (skipped).
        scale: What they will be divided by; None if they are unscaled already.
        powers_of_two: As for `unscaled`.

    Returns:
        A boolean scalar tensor.
    """
    if scale is not None:
        gradients = unscaled(gradients, scale, powers_of_two)
    parts = [p for gradient in gradients for p in real_parts(gradient) if p.numel()]
    if not parts:
        return torch.tensor(True)
    if torch.compiler.is_compiling():
        return _each_finite(parts)
    # The norm of a tensor is infinite or NaN if an element is, and one fast pass. But the norm of
    # finite elements can overflow too; then each is looked at.
    fits = torch.stack([norm.to(parts[0].device) for norm in _norms(parts)]).isfinite().all()
    return fits if bool(fits) else _each_finite(parts)


def _each_finite(parts: list[Any]) -> Any:
    return torch.stack([part.isfinite().all().to(parts[0].device) for part in parts]).all()


def _norms(parts: list[Any]) -> list[Any]:
    groups = _groups([widened(part) for part in parts]).values()
    return [norm.float() for group in groups for norm in torch._foreach_norm(group, 2.0)]
