"""The verdict on one gradient, at each of its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossscale.diagnostics import (
    FORMATS,
    ExponentBin,
    GradientHistogram,
    Thresholds,
    Verdict,
    judge,
)
from lossscale.diagnostics.verdict import share
from lossscale.errors import ArgumentError


def verdict_on(*values, **arguments):
    histogram = GradientHistogram.from_array(np.array(values, np.float64))
    return judge(histogram, arguments.pop("format", "float16"), Thresholds(**arguments))


def mixture(lost_mass, large, small=2.0**-30):
    """A gradient with one large element, and small ones that have this share of the sum."""
    count = round(lost_mass / (1 - lost_mass) * large / small)
    exponents = {small: count, large: 1}
    bins = [ExponentBin(math.frexp(x)[1] - 1, n, 0) for x, n in exponents.items() if n]
    return GradientHistogram(tuple(bins), amax=large)


@pytest.mark.parametrize(
    ("lost_mass", "expected"),
    [
        (0.0, Verdict.NOT_NEEDED),
        (0.0009, Verdict.NOT_NEEDED),
        (0.0011, Verdict.RECOMMENDED),
        (0.049, Verdict.RECOMMENDED),
        (0.051, Verdict.REQUIRED),
        (0.9, Verdict.REQUIRED),
    ],
)
def test_the_share_of_lost_mass_decides(lost_mass, expected):
    histogram = mixture(lost_mass, large=2.0**-12)
    assert histogram.flushed_mass("float16") == pytest.approx(lost_mass, rel=1e-2)
    verdict, reason = judge(histogram)
    assert verdict is expected
    assert share(histogram.flushed_mass("float16")) in reason


def test_thresholds_are_arguments():
    histogram = mixture(0.01, large=2.0**-12)
    assert judge(histogram).verdict is Verdict.RECOMMENDED
    assert judge(histogram, thresholds=Thresholds(flushed_mass=0.02)).verdict is Verdict.NOT_NEEDED
    strict = Thresholds(required_flushed_mass=0.005)
    assert judge(histogram, thresholds=strict).verdict is Verdict.REQUIRED


@pytest.mark.parametrize(
    ("value", "arguments", "expected", "words"),
    [
        (16000.0, {}, Verdict.NOT_NEEDED, "can double 2 times"),
        (17000.0, {}, Verdict.RECOMMENDED, "1.9 bits below overflow"),
        (17000.0, {"margin": 1.0}, Verdict.NOT_NEEDED, ""),
        (16000.0, {"summands": 2}, Verdict.RECOMMENDED, ""),
        (65504.0, {}, Verdict.RECOMMENDED, "below 1 leaves more room"),
        (65520.0, {}, Verdict.REQUIRED, "a loss scale below 1 is needed"),
        (1e30, {}, Verdict.REQUIRED, "too large"),
        (1e30, {"format": "bfloat16"}, Verdict.NOT_NEEDED, ""),
    ],
)
def test_so_does_the_room_below_overflow(value, arguments, expected, words):
    verdict, reason = verdict_on(value, **arguments)
    assert verdict is expected
    assert words in reason


def test_what_is_too_wide_for_the_format():
    histogram = mixture(0.5, large=2.0**14, small=2.0**-26)
    verdict, reason = judge(histogram)
    assert verdict is Verdict.INSUFFICIENT
    assert "at 0.5, the largest scale without overflow, 50.0 %" in reason
    assert judge(histogram, "bfloat16").verdict is Verdict.NOT_NEEDED


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_before_scaling_tells_nothing(bad):
    verdict, reason = verdict_on(1e-9, bad)
    assert verdict is Verdict.UNKNOWN
    assert "1 of 2 elements" in reason
    assert "no loss scale mends" in reason


def test_nothing_tells_nothing():
    assert verdict_on(0.0, 0.0) == (Verdict.UNKNOWN, "Every element is zero.")
    assert verdict_on() == (Verdict.UNKNOWN, "The loss does not depend on it.")


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool), min_size=1),
    st.sampled_from(sorted(FORMATS)),
)
def test_a_verdict_agrees_with_the_scales(values, format):
    histogram = GradientHistogram.from_array(np.float32(values))
    verdict, reason = judge(histogram, format)
    lowest, highest = Thresholds().scales(histogram, format)
    assert (verdict is Verdict.NOT_NEEDED) == (lowest <= 1 <= highest)
    assert (verdict is Verdict.INSUFFICIENT) == (lowest > highest)
    assert reason.endswith(".")


@pytest.mark.parametrize(
    "arguments",
    [
        {"flushed_mass": 0.0},
        {"flushed_mass": 0.1},
        {"required_flushed_mass": 1.0},
        {"flushed_mass": "little"},
        {"margin": -1.0},
        {"margin": math.inf},
        {"summands": 0},
        {"summands": 1.5},
        {"negligible": 1.0},
        {"negligible": -0.1},
    ],
    ids=str,
)
def test_thresholds_that_cannot_be_used_are_refused_by_name(arguments):
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        Thresholds(**arguments)
