"""How large gradients are, with PyTorch, for rules that need to see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lossscale.rules import Needs, Seen
from lossscale.torch.layout import Layout
from lossscale.torch.ranks import largest_and_added, local
from lossscale.torch.scaling import real_parts, widened


def seen(
    needs: Needs, finite: Any, gradients: Sequence[Any], scale: Any, *, are_scaled: bool
) -> Seen:
    """Returns what a rule sees of a step.

    Args:
        needs: What the rule needs, something; nothing else is computed.
        finite: The verdict, a boolean scalar tensor or a bool.
        gradients: Tensors or None.
        scale: The loss scale of the step, float32 scalar tensor.
        are_scaled: Whether the gradients still have to be divided by it.
    """
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


def seen_by_all(
    needs: Needs, gradients: Sequence[Any], layout: Layout, scale: Any, *, are_scaled: bool
) -> Seen:
    """Returns what a rule sees of the gradients of parameters, besides the verdict.

    Args:
        needs: What the rule needs; something.
        gradients: Those of this process, without None.
        layout: Of the parameters. The processes that have to agree send each other a few numbers.
        scale: The loss scale of the step, float32 scalar tensor.
        are_scaled: Whether the gradients still have to be divided by it.
    """
    if not layout.ranks:
        return seen(needs, True, gradients, scale, are_scaled=are_scaled)
    by_copies: dict[int, list[Any]] = {}
    for gradient in gradients:
        by_copies.setdefault(layout.copies(gradient), []).append(local(gradient))
    numbers = torch.zeros(2 + len(needs.counts_from), dtype=torch.float64, device=scale.device)
    for copies, alike in by_copies.items():
        here = seen(needs, True, alike, scale, are_scaled=are_scaled)
        for place, number in enumerate((here.largest, here.elements, *here.counts)):
            if number is None:
                continue
            there = number.to(numbers)
            if place:
                numbers[place] += there / copies
            else:
                numbers[0] = torch.maximum(numbers[0], there)
    numbers = largest_and_added(numbers, layout.ranks)
    # What was divided by a number of copies is whole again.
    whole = numbers[1:].round().to(torch.float32)
    counts = tuple(whole[1:])
    largest = numbers[0].to(torch.float32) if needs.largest else None
    return Seen(True, largest, counts, whole[0] if counts else None)


def with_verdict(sizes: Seen, finite: Any) -> Seen:
    """What a rule sees of a step, once it is known whether all gradients are finite.

    Args:
        sizes: What was seen besides.
        finite: The verdict, a boolean scalar tensor or a bool.
    """
    largest = sizes.largest
    if largest is not None:
        verdict = torch.as_tensor(finite, device=largest.device)
        largest = torch.where(verdict, largest, torch.inf)
    return sizes._replace(finite=finite, largest=largest)


def on_host(sizes: Seen) -> Seen:
    """Brings what a rule sees to the host, all at once; `finite` stays as it is."""
    asked = [sizes.largest, *sizes.counts, sizes.elements]
    there = [number for number in asked if number is not None]
    if not there:
        return sizes
    numbers = iter(torch.stack(there).cpu())
    largest = None if sizes.largest is None else next(numbers)
    counts = tuple(next(numbers) for _ in sizes.counts)
    return Seen(sizes.finite, largest, counts, next(numbers, None))


def together(several: Sequence[Seen]) -> Seen:
    """What is seen of the gradients of several optimizers, as of those of one, on the host.

    Args:
        several: At least one; all of what the same rule needs.
    """
    here = [on_host(sizes) for sizes in several]
    first = here[0]
    largest = None if first.largest is None else torch.stack([s.largest for s in here]).amax()
    counts = tuple(torch.stack(same).sum() for same in zip(*(s.counts for s in here), strict=True))
    elements = torch.stack([s.elements for s in here]).sum() if counts else None
    return Seen(first.finite, largest, counts, elements)
