"""The 2-norm of all gradients together, and clipping to it.

The norm of a tensor is infinite or NaN if an element is, so the pass over memory that clipping
needs anyway checks for overflow as well.
"""

from __future__ import annotations

from typing import Any

import torch

from lossscale.torch import overflow_check, ranks
from lossscale.torch.gradients import Gradients
from lossscale.torch.scaling import scalar

_SMALLER = 2.0**-80
"""Brings any float32 number into the range where its square is finite."""


def grad_norm(
    gradients: Gradients, info: ranks.ParameterInfo, *, shrink: bool = False, wide: bool = False
) -> Any:
    """The 2-norm of all gradients together: a float32 or float64 scalar tensor.

    Args:
        gradients: The gradients that this process has.
        info: Their parameters, with the process groups that they are sharded over.
        shrink: Whether to shrink a copy first, because squares overflow.
        wide: Whether to add up in float32, because the norm overflows in float16.

    Returns:
        The norm, the same in all processes; 0 if none has a gradient.
    """
    groups = gradients.dense_groups
    if shrink:
        groups = [torch._foreach_mul(group, _SMALLER) for group in groups]
    dtype = torch.float32 if wide else None
    norms = [norm for group in groups for norm in torch._foreach_norm(group, 2.0, dtype)]
    device = gradients.device
    if not info.groups:
        norm = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
    else:
        squares = scalar(0.0, device, torch.float64)
        owners = [gradient for group in gradients.owners for gradient in group]
        for gradient, part in zip(owners, norms, strict=True):
            squares += part.to(device, torch.float64) ** 2 / info.copies(gradient)
        norm = ranks.added(squares, info.groups).sqrt()
    return norm.double() / _SMALLER if shrink else norm


def coefficient(norm: Any, clip_norm: float) -> Any:
    """The factor that clips gradients of a norm, as in `torch.nn.utils.clip_grad_norm_`."""
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)


def clip_(gradients: Gradients, info: ranks.ParameterInfo, clip_norm: float, *, wait: bool) -> None:
    """Clips unscaled gradients in place.

    Args:
        gradients: The gradients.
        info: Of their parameters.
        clip_norm: The largest norm.
        wait: Whether to wait for the norm, and compute it again if it overflowed.
    """
    if not gradients.dense_groups and not info.groups:
        return
    norm = grad_norm(gradients, info)
    if wait and norm.isinf():
        norm = grad_norm(gradients, info, shrink=True)
    factor = coefficient(norm, clip_norm)
    overflow_check.unscale_(gradients, factor.to)
