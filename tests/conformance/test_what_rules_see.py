"""A custom rule is told on every wrapper whether gradients are finite, and keeps its own state."""

import numpy as np
import pytest

from conformance.recordings import GRADIENTS, VALUES, spoiled
from lossscale.rules import ScaleRule
from recording_rule import RecordingRule


class Following(RecordingRule):
    """Doubles the scale after a finite step."""

    # As of a rule that says nothing of its scales.
    powers_of_two, lowest_scale = ScaleRule.powers_of_two, ScaleRule.lowest_scale

    def update(self, state, finite, *, xp):
        noted = super().update(state, finite, xp=xp)
        return noted._replace(scale=xp.where(finite, state.scale * 2.0, noted.scale))


@pytest.mark.parametrize("checks", [True, False])
def test_a_custom_rule_is_told_whether_gradients_are_finite(wrapper, checks):
    harness = wrapper.make(VALUES, "sgd", Following(checks_gradients=checks))
    scale, finite_steps = 8.0, 0
    for number, spoil in enumerate((None, 2.0**10, np.inf, -np.inf, np.nan, None), 1):
        harness.step(GRADIENTS if spoil is None else spoiled(spoil, tensor=1))
        # Without a check every step is applied, and is finite to the rule.
        finite = not checks or spoil is None or bool(np.isfinite(spoil))
        scale, finite_steps = scale * (2.0 if finite else 0.5), finite_steps + finite
        noted = harness.rule_state()
        found = [float(noted.finite), bool(noted.is_last_finite), int(noted.good_steps)]
        assert found == [finite_steps, finite, number]
        assert float(harness.scale()) == float(noted.scale) == scale
        assert harness.counters()[1:3] == (number - finite_steps, not finite)
