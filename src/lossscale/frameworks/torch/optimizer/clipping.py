"""One norm for two ends: whether all gradients are finite, and how much they are clipped.

The norm of a tensor is infinite or NaN if one of its elements is. So the pass over memory that
clipping needs anyway gives the verdict of loss scaling too, and the loss scale is divided out by
the number that clips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from lossscale.errors import UnsupportedError
from lossscale.frameworks.torch import ranks
from lossscale.frameworks.torch.gradients import Gradients

_SMALLER = 2.0**-80
"""What brings any float32 number to where its square is one, too."""


def norm_of(given: Gradients, groups: Sequence[Any] = ()) -> Any:
    """The 2-norm of all gradients together: a float32 or float64 tensor of no dimensions.

    Args:
        given: The gradients.
        groups: The process groups over which they are spread.
    """
    norms = [norm for group in given.groups for norm in torch._foreach_norm(group, 2.0)]
    if groups:
        return _over_processes(given, norms, groups)
    return torch.linalg.vector_norm(torch.stack([norm.to(given.device) for norm in norms]))


def _over_processes(given: Gradients, norms: list[Any], groups: Sequence[Any]) -> Any:
    """The norm over all processes, each number of a gradient counted once."""
    device = ranks._device(torch.zeros((), device=given.device), groups[0])
    total = torch.zeros((), dtype=torch.float64, device=device)
    if len(norms) != len(given.given):
        raise UnsupportedError(
            "`clip_norm` takes dense gradients where parameters are spread over processes, and no "
            "empty ones. Call unscale_(), and clip by hand."
        )
    for gradient, norm in zip(given.given, norms, strict=True):
        total += norm.to(device, torch.float64) ** 2 / _copies(gradient, groups)
    for group in groups:
        distributed.all_reduce(total, group=group)
    return total.sqrt()


def _copies(gradient: Any, groups: Sequence[Any]) -> int:
    """How many processes of the groups hold the same part of a gradient."""
    spread = ranks.groups_of([gradient])
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        raise UnsupportedError(
            "`clip_norm` cannot know the norm of a gradient that is a part of a sum (Partial). "
            "Call unscale_(), reduce it, and clip by hand."
        )
    return math.prod(group.size() for group in groups if all(group is not g for g in spread))


def norm_of_large(given: Gradients) -> Any:
    """The 2-norm of gradients whose squares overflow though they are finite themselves."""
    smaller = [torch._foreach_mul(group, _SMALLER) for group in given.groups]
    return norm_of(Gradients(given.given, smaller)).double() / _SMALLER


def coefficient(norm: Any, clip_norm: float | None) -> Any:
    """What gradients of a norm are multiplied by, as `torch.nn.utils.clip_grad_norm_` has it."""
    assert clip_norm is not None
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
