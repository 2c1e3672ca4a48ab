"""How large gradients are, with PyTorch, for rules that need to see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lossscale.frameworks.torch.arrays import real_parts, widened
from lossscale.rules import Needs, Seen


def seen(
    needs: Needs, finite: Any, gradients: Sequence[Any], scale: Any, *, are_scaled: bool
) -> Seen:
    """Returns what a rule sees of a step.

    Args:
        needs: What the rule needs; nothing else is computed.
        finite: The verdict, a boolean scalar tensor or a bool.
        gradients: Tensors or None.
        scale: The loss scale of the step, float32 scalar tensor.
        are_scaled: Whether the gradients still have to be divided by it.
    """
    if needs == Needs():
        return Seen(finite)
    parts = [widened(p) for gradient in gradients for p in real_parts(gradient) if p.numel()]
    device = parts[0].device if parts else None
    largest = None
    if needs.largest:
        maxima = [part.abs().amax().to(device, torch.float32) for part in parts]
        largest = torch.stack(maxima).amax() if maxima else torch.zeros(())
        largest = largest / scale if are_scaled else largest
        verdict = torch.as_tensor(finite, device=largest.device)
        largest = torch.where(verdict, largest, torch.inf)
    if not needs.counts_from:
        return Seen(finite, largest)
    factor = 1.0 if are_scaled else scale
    magnitudes = [part.abs() * factor for part in parts]
    counts = tuple(
        sum(
            ((part >= edge).sum().to(device, torch.float32) for part in magnitudes),
            torch.zeros((), device=device),
        )
        for edge in needs.counts_from
    )
    elements = torch.tensor(float(sum(part.numel() for part in parts)), device=device)
    return Seen(finite, largest, counts, elements)
