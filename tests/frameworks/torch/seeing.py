"""A rule that keeps what it saw of the gradients in its state."""

import dataclasses
from typing import NamedTuple

import torch

from lossscale.rules import ScaleRule, StatsRequest

EDGES = (4.0, 16.0)
ALL = StatsRequest(largest=True, counts_from=EDGES)


class Noted(NamedTuple):
    scale: float
    good_steps: int
    largest: float
    low: float
    high: float
    elements: float


@dataclasses.dataclass(frozen=True)
class Noting(ScaleRule):
    """Halves the scale after a step that is not finite."""

    checks_gradients: bool = True
    needs: StatsRequest = ALL

    powers_of_two = True
    lowest_scale = 2.0**-20

    def init(self):
        return Noted(8.0, 0, 0.0, 0.0, 0.0, 0.0)

    def update(self, state, seen, *, xp):
        scale = xp.where(seen.finite, state.scale, state.scale * 0.5)
        low, high = seen.counts or (state.low, state.high)
        largest = state.largest if seen.largest is None else seen.largest
        elements = state.elements if seen.elements is None else seen.elements
        return Noted(scale, state.good_steps + 1, largest, low, high, elements)

    def get_config(self):
        return {}


def expected(gradients, scale):
    """What is to be seen of unscaled gradients: the largest, two counts, the elements."""
    flat = torch.cat([gradient.detach().flatten().abs() for gradient in gradients])
    finite = bool(flat.isfinite().all())
    counts = [float((flat * scale >= edge).sum()) for edge in EDGES]
    return [float(flat.max()) if finite else torch.inf, *counts, float(flat.numel())]


def noted(saved):
    """The same from the state dictionary of a wrapper or of a scaler."""
    if "rule_state" in saved:
        found = saved["rule_state"]
    else:
        first = saved["param_groups"][0]
        found = {name: first[f"loss_scale_{name}"] for name in Noted._fields[1:]}
    return [found[name] for name in ("largest", "low", "high", "elements")]
