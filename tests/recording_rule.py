"""A rule that records in its state what it is told of each step."""

import dataclasses
from typing import NamedTuple

from lossscale.rules import ScaleRule


class RecordedSteps(NamedTuple):
    scale: float
    good_steps: int
    finite: float
    is_last_finite: bool


@dataclasses.dataclass(frozen=True)
class RecordingRule(ScaleRule):
    """Halves the scale after a step that is not finite."""

    checks_gradients: bool = True

    powers_of_two = True
    lowest_scale = 2.0**-20

    def init(self):
        return RecordedSteps(8.0, 0, 0.0, True)

    def update(self, state, finite, *, xp):
        return RecordedSteps(
            xp.where(finite, state.scale, state.scale * 0.5),
            state.good_steps + 1,
            xp.where(finite, state.finite + 1.0, state.finite),
            finite,
        )

    def get_config(self):
        return {}
