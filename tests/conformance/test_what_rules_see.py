"""What a rule asks to see of the gradients: the same numbers on every shell, and NumPy's."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from lossscale.rules import Needs, ScaleRule

VALUES = [np.array([1.0, -2.0, 3.0], np.float32), np.array([[0.5, 0.25]], np.float32)]
GRADIENTS = [np.array([0.5, -1.0, 2.0], np.float32), np.array([[-4.0, -0.125]], np.float32)]
EDGES = (2.0**2, 2.0**4)


def gradients(factor, spoil=None):
    made = [gradient * np.float32(factor) for gradient in GRADIENTS]
    if spoil is not None:
        made[1][0, 1] = spoil
    return made


class Noted(NamedTuple):
    scale: float
    good_steps: int
    largest: float
    low: float
    high: float
    elements: float


@dataclasses.dataclass(frozen=True)
class Noting(ScaleRule):
    """Keeps what it saw in its state, and lowers the scale after a non-finite step."""

    powers_of_two = True
    needs = Needs(largest=True, counts_from=EDGES)

    def init(self):
        return Noted(8.0, 0, 0.0, 0.0, 0.0, 0.0)

    def update(self, state, seen, *, xp):
        scale = xp.where(seen.finite, state.scale, state.scale * 0.5)
        return Noted(scale, state.good_steps, seen.largest, *seen.counts, seen.elements)

    def get_config(self):
        return {}


def test_a_rule_sees_what_numpy_sees(shell):
    harness = shell.make(VALUES, "sgd", Noting())
    # One after the other on one optimizer, which is compiled once.
    for spoil, factor in itertools.product((None, np.inf, -np.inf, np.nan, None), (1.0, 0.25)):
        given = gradients(factor, spoil)
        scale = float(harness.scale())
        harness.step(given)
        seen = harness.rule_state()
        flat = np.abs(np.concatenate([gradient.ravel() for gradient in given]))
        finite = np.isfinite(flat).all()
        # Also where the host updates nothing, since such a rule has to see more than a verdict.
        assert harness.counters()[2] == (not finite)
        assert float(seen.largest) == (flat.max() if finite else np.inf)
        assert [float(seen.low), float(seen.high)] == [(flat * scale >= e).sum() for e in EDGES]
        assert float(seen.elements) == 5
        assert float(seen.scale) == (scale if finite else scale / 2)


class Scale(NamedTuple):
    scale: float
    good_steps: int


@dataclasses.dataclass(frozen=True)
class TailScale(ScaleRule):
    """Grows until more than a share of all elements is large, whatever overflows."""

    share: float = 0.3
    powers_of_two = True
    needs = Needs(counts_from=(2.0**5,))

    def init(self):
        return Scale(1.0, 0)

    def update(self, state, seen, *, xp):
        may_grow = seen.finite & (seen.counts[0] <= seen.elements * self.share)
        return Scale(xp.where(may_grow, state.scale * 2.0, state.scale * 0.5), state.good_steps)

    def get_config(self):
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class FollowsTheLargest(ScaleRule):
    """Keeps the largest scaled gradient between 2**6 and 2**7."""

    powers_of_two = True
    needs = Needs(largest=True)

    def init(self):
        return Scale(1.0, 0)

    def update(self, state, seen, *, xp):
        top = seen.largest * state.scale
        moved = xp.where(top < 2.0**6, state.scale * 2.0, state.scale)
        return Scale(xp.where(top >= 2.0**7, state.scale * 0.5, moved), state.good_steps)

    def get_config(self):
        return {}


FACTORS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 4.0, None, 0.5, 0.5)


def test_a_rule_can_target_a_share_of_large_elements(shell):
    harness = shell.make(VALUES, "sgd", TailScale())
    expected, scale = [], 1.0
    for factor in FACTORS:
        given = gradients(1.0, np.inf) if factor is None else gradients(factor)
        harness.step(given)
        flat = np.abs(np.concatenate([gradient.ravel() for gradient in given])) * scale
        grows = np.isfinite(flat).all() and (flat >= 32).sum() <= 0.3 * 5
        scale = scale * 2 if grows else scale / 2
        expected.append(scale)
        assert float(harness.scale()) == scale
    assert len(set(expected)) > 3


def test_a_rule_can_follow_the_largest_gradient(shell):
    harness = shell.make(VALUES, "sgd", FollowsTheLargest())
    scale = 1.0
    for factor in FACTORS:
        harness.step(gradients(1.0, np.nan) if factor is None else gradients(factor))
        top = np.inf if factor is None else 4.0 * factor * scale
        scale = scale / 2 if top >= 128 else scale * 2 if top < 64 else scale
        assert float(harness.scale()) == scale
    assert harness.counters()[1] == 1


def test_without_a_gradient_a_variable_is_not_counted(shell):
    harness = shell.make(VALUES, "sgd", Noting())
    with shell.missing_gradient():
        harness.step([GRADIENTS[0], None])
    seen = harness.rule_state()
    assert (float(seen.largest), float(seen.elements)) == (2.0, 3.0)
