"""The predicted share against rounding for real, and the measured share."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from lossscale.diagnostics import share_flushed, share_zeroed

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


@pytest.mark.parametrize("scale", [1.0, 3.0, 1000.0, 2.0**8, 2.0**-3])
@pytest.mark.parametrize("name", DTYPES)
def test_prediction_is_what_rounding_does(name, scale):
    rng = np.random.default_rng(0)
    flush = float(ml_dtypes.finfo(DTYPES[name]).smallest_subnormal) / 2
    # Around the edge, and so below the overflow.
    values = (rng.standard_normal(2000) * flush / scale).astype(np.float32)
    values[:200] = 0
    if np.frexp(scale)[0] == 0.5:  # Else the tie at the edge cannot be met.
        values[200:203] = np.array([0.5, 1, 2]) * flush / scale
    done = (values.astype(np.float64) * scale).astype(DTYPES[name])
    lost = np.count_nonzero((done == 0) & (values != 0)) / np.count_nonzero(values)
    assert 0.3 < lost < 0.9
    assert share_flushed(values, scale, name) == lost


def test_published_share_of_lognormal_gradients():
    # log2|g| ~ N(-20, 4): Φ((-25 - k + 20) / 4) of the elements is lost at a scale of 2**k.
    values = np.exp2(np.random.default_rng(0).normal(-20, 4, 400_000))
    for power, share in ((0, 0.1057), (4, 0.0122), (8, 0.00058)):
        assert share_flushed(values, 2.0**power) == pytest.approx(share, rel=0.1)


def test_only_finite_elements_that_are_not_zero_count():
    assert share_flushed([0.0, 0.0, 2.0**-30, 1.0, np.inf, np.nan]) == 0.5
    assert share_flushed([0.0, np.nan]) == 0.0
    assert share_flushed([]) == 0.0


def test_the_tie_is_flushed_and_the_next_number_is_not():
    edge = np.float32(2.0**-25)
    assert share_flushed([edge]) == 1.0
    assert share_flushed([np.nextafter(edge, np.float32(1))]) == 0.0


def test_unknown_format():
    with pytest.raises(ValueError, match="float99"):
        share_flushed([1.0], format="float99")


def test_measured_share_counts_what_was_not_zero_before():
    reference = np.array([[0.0, 1e-9], [1e-9, 0.5]], np.float32)
    assert share_zeroed(reference, reference) == 0.0
    assert share_zeroed(reference, reference.astype(np.float16)) == pytest.approx(2 / 3)
    # A zero that became something else is not flushed, and neither is an overflow.
    assert share_zeroed(reference, np.array([[1.0, np.nan], [np.inf, 0.0]])) == pytest.approx(1 / 3)
    assert share_zeroed(np.zeros(3), np.zeros(3)) == 0.0
    assert share_zeroed([np.nan, np.inf, 1.0], [0.0, 0.0, 1.0]) == 0.0


def test_measured_share_needs_equal_shapes():
    with pytest.raises(ValueError, match=r"same shape.*\(2,\).*\(3,\)"):
        share_zeroed(np.zeros(2), np.zeros(3))
