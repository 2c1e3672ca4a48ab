"""A rule that records the statistics of the gradients in its state."""

import dataclasses
from typing import NamedTuple

from lossscale.rules import ScaleRule, StatsRequest

EDGES = (4.0, 16.0)
ALL = StatsRequest(largest=True, counts_from=EDGES)


class RecordedStats(NamedTuple):
    scale: float
    good_steps: int
    largest: float
    low: float
    high: float
    elements: float


@dataclasses.dataclass(frozen=True)
class RecordingRule(ScaleRule):
    """Halves the scale after a step that is not finite."""

    checks_gradients: bool = True
    needs: StatsRequest = ALL

    powers_of_two = True
    lowest_scale = 2.0**-20

    def init(self):
        return RecordedStats(8.0, 0, 0.0, 0.0, 0.0, 0.0)

    def update(self, state, seen, *, xp):
        scale = xp.where(seen.finite, state.scale, state.scale * 0.5)
        low, high = seen.counts or (state.low, state.high)
        largest = state.largest if seen.largest is None else seen.largest
        elements = state.elements if seen.elements is None else seen.elements
        return RecordedStats(scale, state.good_steps + 1, largest, low, high, elements)

    def get_config(self):
        return {}
