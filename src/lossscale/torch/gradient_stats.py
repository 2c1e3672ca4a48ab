"""Statistics of gradients that a rule may need besides overflow: how large they are.

A measurement is one float32 tensor, [largest, elements, *counts], so that one transfer brings it to
the host, and one message to other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lossscale.rules import GradientStats, StatsRequest
from lossscale.torch.ranks import ParameterInfo, largest_and_added, local
from lossscale.torch.scaling import CPU, real_parts, scalar, widened


def measure(needs: StatsRequest, gradients: Sequence[Any], scale: Any, *, are_scaled: bool) -> Any:
    """Measures gradients; statistics that a rule does not need stay 0.

    Args:
        needs: What the rule needs, something.
        gradients: Tensors or None.
        scale: The loss scale of the step, float32 scalar tensor.
        are_scaled: Whether the gradients still have to be divided by it.
    """
    parts = [widened(p) for gradient in gradients for p in real_parts(gradient) if p.numel()]
    device = parts[0].device if parts else CPU
    measured = scalar(0.0, device).repeat(2 + len(needs.counts_from))
    if needs.largest and parts:
        maxima = [part.abs().amax().to(device, torch.float32) for part in parts]
        largest = torch.stack(maxima).amax()
        measured[0] = largest / scale if are_scaled else largest
    if needs.counts_from:
        measured[1] = float(sum(part.numel() for part in parts))
        magnitudes = [part.abs() * (1.0 if are_scaled else scale) for part in parts]
        for place, edge in enumerate(needs.counts_from, 2):
            for part in magnitudes:
                measured[place] += (part >= edge).sum().to(device)
    return measured


def measure_everywhere(
    needs: StatsRequest,
    gradients: Sequence[Any],
    info: ParameterInfo,
    scale: Any,
    *,
    are_scaled: bool,
) -> Any:
    """Measures the gradients of parameters on all processes that must agree."""
    if not info.groups:
        return measure(needs, gradients, scale, are_scaled=are_scaled)
    by_copies: dict[int, list[Any]] = {}
    for gradient in gradients:
        by_copies.setdefault(info.copies(gradient), []).append(local(gradient))
    numbers = scalar(0.0, scale.device, torch.float64).repeat(2 + len(needs.counts_from))
    for copies, alike in by_copies.items():
        here = measure(needs, alike, scale, are_scaled=are_scaled).to(numbers)
        numbers[0] = torch.maximum(numbers[0], here[0])
        numbers[1:] += here[1:] / copies
    numbers = largest_and_added(numbers, info.groups)
    # Counts divided by the number of copies add up to whole numbers.
    numbers[1:] = numbers[1:].round()
    return numbers.to(torch.float32)


def together(several: Sequence[Any]) -> Any:
    """Joins the measurements of several optimizers, on the host."""
    stacked = torch.stack([measured.cpu() for measured in several])
    return torch.cat([stacked[:, :1].amax(0), stacked[:, 1:].sum(0)])


def as_stats(needs: StatsRequest, measured: Any, finite: Any) -> GradientStats:
    """Returns the statistics that a rule receives.

    Args:
        needs: What the rule needs.
        measured: What `measure` returned; None for a rule that needs nothing.
        finite: Whether all gradients are finite: a bool or a boolean scalar tensor.
    """
    if measured is None:
        return GradientStats(finite)
    largest = None
    if needs.largest:
        verdict = torch.as_tensor(finite, device=measured.device)
        largest = torch.where(verdict, measured[0], torch.inf)
    counts = tuple(measured[2:])
    return GradientStats(finite, largest, counts, measured[1] if counts else None)


def compute(
    needs: StatsRequest, finite: Any, gradients: Sequence[Any], scale: Any, *, are_scaled: bool
) -> GradientStats:
    """Returns the statistics of gradients that only this process has."""
    return as_stats(needs, measure(needs, gradients, scale, are_scaled=are_scaled), finite)
