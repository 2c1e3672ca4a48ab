"""Unscaling gradients and looking at them, with PyTorch: one pass over memory for both.

The kernel is the one behind `torch.amp.GradScaler`. It works in place, so here it only gets
tensors that nobody else reads: copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


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
        _check_and_unscale_(group, found_here, reciprocal.to(device))
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


def all_finite(tensors: Sequence[Any]) -> Any:
    """Whether every element of every tensor is finite: a boolean scalar tensor.

    Args:
        tensors: Tensors of any dtype; of sparse ones the values are looked at.
    """
    parts = [_real(_values(tensor)).detach() for tensor in tensors]
    parts = [part for part in parts if part.is_floating_point() and part.numel()]
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
    wide = [p if p.dtype in (torch.float32, torch.float64) else p.float() for p in parts]
    groups = _groups(wide).values()
    return [norm.float() for group in groups for norm in torch._foreach_norm(group, 2.0)]


def _values(tensor: Any) -> Any:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _real(tensor: Any) -> Any:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
