"""One norm for two ends: whether all gradients are finite, and how much they are clipped.

The norm of a tensor is infinite or NaN if one of its elements is. So the pass over memory that
clipping needs anyway gives the verdict of loss scaling too, and the loss scale is divided out by
the number that clips.
"""

from __future__ import annotations

from typing import Any

import torch

from lossscale.torch import ranks
from lossscale.torch.gradients import Gradients
from lossscale.torch.layout import Layout

_SMALLER = 2.0**-80
"""What brings any float32 number to where its square is one, too."""


def norm_of(given: Gradients, layout: Layout) -> Any:
    """The 2-norm of all gradients together: a float32 or float64 tensor of no dimensions.

    Args:
        given: The gradients that this process has.
        layout: Of their parameters; it says over which processes they are spread.

    Returns:
        The norm, the same in all processes; -1 if parameters are spread and no process has a
        gradient.
    """
    norms = [norm for group in given.groups for norm in torch._foreach_norm(group, 2.0)]
    if layout.ranks:
        return _over_processes(given, norms, layout)
    return torch.linalg.vector_norm(torch.stack([norm.to(given.device) for norm in norms]))


def _over_processes(given: Gradients, norms: list[Any], layout: Layout) -> Any:
    wholes = [gradient for group in given.wholes for gradient in group]
    squares = torch.zeros((), dtype=torch.float64, device=given.device)
    for gradient, norm in zip(wholes, norms, strict=True):
        squares += norm.to(given.device, torch.float64) ** 2 / layout.copies(gradient)
    present = torch.full_like(squares, float(bool(given.given)))
    squares, present = ranks.added(torch.stack([squares, present]), layout.ranks)
    return torch.where(present == 0, -1.0, squares.sqrt())


def norm_of_large(given: Gradients, layout: Layout) -> Any:
    """The 2-norm of gradients whose squares overflow though they are finite themselves."""
    smaller = [torch._foreach_mul(group, _SMALLER) for group in given.groups]
    return norm_of(Gradients(given.given, smaller, given.wholes), layout).double() / _SMALLER


def coefficient(norm: Any, clip_norm: float | None) -> Any:
    """What gradients of a norm are multiplied by, as `torch.nn.utils.clip_grad_norm_` has it."""
    assert clip_norm is not None
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
