"""Histograms of exponents against counting by hand and by mathematics."""

from __future__ import annotations

import math
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from lossscale.diagnostics import exponent_histogram


def as_dictionary(histogram):
    pairs = zip(histogram.exponents.tolist(), histogram.counts.tolist(), strict=True)
    return {exponent: count for exponent, count in pairs if count}


def test_each_bin_holds_its_lower_edge_and_not_its_upper_one():
    for exponent in (-149, -25, -24, -1, 0, 15, 126):
        lower = np.float32(2.0**exponent)
        upper = np.nextafter(np.float32(2.0 ** (exponent + 1)), np.float32(0))
        assert as_dictionary(exponent_histogram([lower])) == {exponent: 1}
        assert as_dictionary(exponent_histogram([-upper])) == {exponent: 1}


def test_zeros_infinities_and_nans_are_counted_apart():
    histogram = exponent_histogram(np.array([[0.0, -0.0, 1.0], [np.inf, -np.inf, np.nan]]))
    assert as_dictionary(histogram) == {0: 1}
    assert (histogram.zeros, histogram.infs, histogram.nans) == (2, 2, 1)


def test_every_element_is_counted_once():
    rng = np.random.default_rng(0)
    values = np.ldexp(rng.standard_normal((20, 50)), rng.integers(-140, 100, (20, 50)))
    values = values.astype(np.float32)
    values.flat[:7] = [0, 0, 0, np.inf, -np.inf, np.nan, 2.0**-149]
    histogram = exponent_histogram(values)
    expected = Counter(
        math.frexp(v)[1] - 1 for v in values.ravel().tolist() if math.isfinite(v) and v
    )
    assert as_dictionary(histogram) == dict(expected)
    counted = int(histogram.counts.sum()) + histogram.zeros + histogram.infs + histogram.nans
    assert counted == values.size


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_dtype_does_not_matter(dtype):
    values = np.array([2.0**-24, 2.0**-14, 1.0, 3.0], dtype)
    assert as_dictionary(exponent_histogram(values)) == {-24: 1, -14: 1, 0: 1, 1: 1}


def test_exponents_are_consecutive():
    assert exponent_histogram([2.0**-3, 2.0**2]).exponents.tolist() == [-3, -2, -1, 0, 1, 2]


@pytest.mark.parametrize("values", [[], [0.0, 0.0]])
def test_nothing_to_count(values):
    histogram = exponent_histogram(values)
    assert histogram.exponents.size == histogram.counts.size == 0
    assert histogram.zeros == len(values)


@pytest.mark.parametrize("power", [-20, 0, 15])
def test_scaled_is_the_histogram_of_the_scaled_array(power):
    values = np.random.default_rng(1).standard_normal(100)
    moved, expected = (
        exponent_histogram(values).scaled(power),
        exponent_histogram(values * 2.0**power),
    )
    assert as_dictionary(moved) == as_dictionary(expected)
    assert moved.zeros == expected.zeros
