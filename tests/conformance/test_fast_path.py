"""The fast path against a plain one: NumPy divides and looks, a bare optimizer applies.

The other conformance tests have a handful of numbers in each variable. Here there are enough for
each way in which gradients are read: many small ones together, large ones by their sums.
"""

import numpy as np
import pytest

from conformance.recordings import same_training
from conformance.wrappers import WRAPPERS
from core import oracle
from lossscale import DynamicScale

SHAPES = [(130, 130), (5,), (3, 2), (20000,), (1,)]
LARGE, SMALL = 0, 1
RULE = DynamicScale(2.0**6, growth_interval=3, min_scale=2.0**-4)


def values():
    generator = np.random.default_rng(0)
    return [generator.normal(size=shape).astype(np.float32) for shape in SHAPES]


def gradients(seed):
    generator = np.random.default_rng(seed)
    # Multiples of 2**-12 below 8, so that scaling and unscaling them is exact.
    return [
        (generator.integers(-(2**15), 2**15, shape) * 2.0**-12).astype(np.float32)
        for shape in SHAPES
    ]


def with_element(tensor, position, value):
    def change(given):
        given[tensor].flat[position] = value
        return given

    return change


def opposite_infinities(given):
    given[LARGE].flat[:2] = np.inf, -np.inf
    return given


def finite_with_a_sum_that_is_not(given):
    given[LARGE][:] = np.float32(2.0**114)
    return given


def tiny(given):
    return [gradient * np.float32(2.0**-120) for gradient in given]


def zero(given):
    return [gradient * np.float32(-0.0) for gradient in given]


OVERFLOWING = "the sum overflows"
STEPS = {
    "finite": lambda given: given,
    "inf in a large one": with_element(LARGE, -1, np.inf),
    "-inf in a small one": with_element(SMALL, 0, -np.inf),
    "nan in a large one": with_element(LARGE, 77, np.nan),
    "nan in a small one": with_element(SMALL, -1, np.nan),
    "inf and -inf": opposite_infinities,
    OVERFLOWING: finite_with_a_sum_that_is_not,
    "tiny": tiny,
    "zero": zero,
}
# One after the other on one optimizer, which is compiled once: the scale falls to its floor and
# grows until sums overflow again. These come last, since nothing small shows beside them any more.
SEQUENCE = [
    *[name for name in STEPS if name != OVERFLOWING],
    *["nan in a small one"] * 8,
    *["finite"] * 15,
    *[OVERFLOWING] * 4,
    *["inf and -inf"] * 3,
    *[OVERFLOWING] * 2,
]


class Plain:
    """A bare optimizer behind scaling, unscaling and looking in NumPy."""

    def __init__(self, wrapper, inner):
        self.harness = wrapper.make_bare(values(), inner, RULE)
        self.state = (RULE.initial_scale, 0)

    def step(self, given):
        scale = np.float32(self.state[0])
        with np.errstate(over="ignore", invalid="ignore"):
            unscaled = [(gradient * scale) * (np.float32(1) / scale) for gradient in given]
        finite = all(np.isfinite(gradient).all() for gradient in unscaled)
        if finite:
            self.harness.step(unscaled)
        self.state = oracle.next_state(
            *self.state,
            finite,
            interval=RULE.growth_interval,
            growth=RULE.growth_factor,
            backoff=RULE.backoff_factor,
            lowest=RULE.min_scale,
            highest=2.0**126,
        )
        return finite


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("inner", ["momentum", "adamw-clipnorm"])
def test_every_step_trains_as_the_plain_path(wrapper, inner):
    sequence = SEQUENCE
    if inner != "momentum":
        # The squares of these gradients overflow in the optimizer itself.
        sequence = ["finite" if name == OVERFLOWING else name for name in sequence]
    if wrapper.like:
        pytest.skip(f"the code that reads gradients is that of {wrapper.like}")
    if wrapper.takes_loss_scales_only:
        pytest.skip("a DynamicLossScale has no floor below 1")
    if inner != "momentum" and not wrapper.compiles and any(row.compiles for row in WRAPPERS):
        pytest.skip("no compiler puts clipping and dividing together, and promise 1 has it")
    fast, plain = wrapper.make(values(), inner, RULE), Plain(wrapper, inner)
    applied = skipped = 0
    for seed, name in enumerate(sequence):
        given = STEPS[name](gradients(seed))
        finite = plain.step([gradient.copy() for gradient in given])
        fast.step([gradient.copy() for gradient in given])
        applied, skipped = applied + finite, skipped + (not finite)
        assert (float(fast.scale()), fast.counters()[:3]) == (
            plain.state[0],
            (plain.state[1], skipped, not finite),
        ), name
        if applied:
            # Before the first applied step a bare optimizer may have no variables yet.
            same_training(wrapper, fast.parameters(), plain.harness.parameters())
            same_training(wrapper, fast.inner_state(), plain.harness.inner_state())
    assert applied
    assert skipped
