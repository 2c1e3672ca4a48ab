"""The written constants against what ml_dtypes and NumPy round to."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from lossscale.diagnostics import FLOAT16, FORMATS, number_format

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


def rounded(value: float, name: str) -> float:
    # An overflow is what some of these tests provoke.
    with np.errstate(over="ignore"):
        return float(np.float64(value).astype(DTYPES[name]))


def test_every_format_has_a_dtype():
    assert FORMATS.keys() == DTYPES.keys()


@pytest.mark.parametrize("name", DTYPES)
def test_limits_are_those_of_the_dtype(name):
    info = ml_dtypes.finfo(DTYPES[name])
    known = FORMATS[name]
    assert known.name == name
    assert known.max == float(info.max)
    assert known.min_normal == float(info.smallest_normal)
    assert known.min_subnormal == float(info.smallest_subnormal)


@pytest.mark.parametrize("name", DTYPES)
def test_flush_edge_is_the_largest_magnitude_that_becomes_zero(name):
    edge = FORMATS[name].flush_edge
    assert rounded(edge, name) == 0
    # One float32 step: ml_dtypes may round float64 to float32 on the way.
    above = float(np.nextafter(np.float32(edge), np.float32(1)))
    assert rounded(above, name) == FORMATS[name].min_subnormal


@pytest.mark.parametrize("name", DTYPES)
def test_overflow_edge_is_where_finite_numbers_end(name):
    known = FORMATS[name]
    edge = np.float32(known.overflow_edge)
    assert float(edge) == known.overflow_edge
    below, above = (float(np.nextafter(edge, end, dtype=np.float32)) for end in (0, np.inf))
    assert rounded(below, name) == known.max
    assert not np.isfinite(rounded(above, name))
    assert np.isfinite(rounded(known.overflow_edge, name)) != known.edge_overflows


def test_number_format_takes_names_and_formats():
    assert number_format("float16") is FLOAT16
    assert number_format(FLOAT16) is FLOAT16


@pytest.mark.parametrize("name", ["half", "", None, ["float16"]])
def test_unknown_formats_are_refused_by_name(name):
    with pytest.raises(ValueError, match="`format` must be one of float16, bfloat16"):
        number_format(name)
