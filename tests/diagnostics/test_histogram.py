"""Histograms against sums of fractions, and their answers against rounding for real."""

from __future__ import annotations

import json
import math
import operator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lossscale.diagnostics import FORMATS, ExponentBin, GradientHistogram, number_format
from lossscale.errors import ArgumentError, ArgumentTypeError

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}

float32s = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = st.lists(float32s, max_size=40)
nonzero_arrays = st.lists(finite.filter(bool), min_size=1, max_size=40)
# A scale moves float32 numbers into float16 and not far out of float64.
powers = st.integers(-60, 60)
names = st.sampled_from(sorted(FORMATS))


def histogram_of(values, dtype=np.float32):
    return GradientHistogram.from_array(np.asarray(values, dtype))


def exponent(value):
    return math.frexp(value)[1] - 1


def by_hand(values):
    """The bins of Python floats, in whole fractions."""
    sums = {}
    for value in values:
        if math.isfinite(value) and value:
            fraction = Fraction(abs(value)) / Fraction(2) ** exponent(value) - 1
            row = sums.setdefault(exponent(value), [0, 0])
            row[0] += 1
            row[1] += fraction * 2**23
    return {key: tuple(row) for key, row in sorted(sums.items())}


def below(values, edge, scale, *, tie):
    """The magnitudes that come to lie below an edge, or on it."""
    scaled = [(abs(value), abs(value) * scale) for value in values if math.isfinite(value)]
    compare = operator.le if tie else operator.lt
    return [value for value, moved in scaled if value and compare(moved, edge)]


@given(arrays)
@example([0.0, -0.0, math.inf, -math.inf, math.nan])
@example([2.0**-149, 3 * 2.0**-149, -(2.0**-126), 3.4028234663852886e38])
@example([])
def test_bins_are_counted_and_summed_exactly(values):
    histogram = histogram_of(values)
    assert {bin.exponent: tuple(bin[1:]) for bin in histogram.bins} == by_hand(values)
    assert histogram.zeros == values.count(0.0)
    assert histogram.infs == sum(math.isinf(value) for value in values)
    assert histogram.nans == sum(math.isnan(value) for value in values)
    assert histogram.size == len(values)
    known = [abs(value) for value in values if math.isfinite(value)]
    assert histogram.amax == max(known, default=0.0)
    assert histogram.mass == pytest.approx(math.fsum(known), rel=1e-15, abs=0)


def test_each_bin_holds_its_lower_edge_and_not_its_upper_one():
    for power in (-149, -25, -24, -1, 0, 15, 126):
        lower = np.float32(2.0**power)
        upper = np.nextafter(np.float32(2.0 ** (power + 1)), np.float32(0))
        assert [bin.exponent for bin in histogram_of([lower, -upper]).bins] == [power]


@pytest.mark.parametrize("name", DTYPES)
def test_every_number_of_a_narrow_format_is_counted(name):
    bits = np.dtype(DTYPES[name]).itemsize * 8
    values = np.arange(2**bits, dtype=f"u{bits // 8}").view(DTYPES[name])
    assert GradientHistogram.from_array(values) == histogram_of(values)
    assert GradientHistogram.from_array(values).size == 2**bits


@given(st.lists(st.floats(), max_size=20))
@example([5e-324, 1.7976931348623157e308, 2.0 - 2.0**-52])
def test_float64_is_counted_over_its_own_range(values):
    histogram = histogram_of(values, np.float64)
    known = [abs(value) for value in values if math.isfinite(value) and value]
    counts = {bin.exponent: bin.elements for bin in histogram.bins}
    assert counts == {e: [exponent(v) for v in known].count(e) for e in map(exponent, known)}
    assert histogram.amax == max(known, default=0.0)
    for bin in histogram.bins:
        inside = [math.ldexp(v, -bin.exponent) for v in known if exponent(v) == bin.exponent]
        mass = bin._replace(exponent=0).mass
        assert mass == pytest.approx(math.fsum(inside), rel=2**-24, abs=0)


def test_sums_beyond_float64_are_infinite_and_shares_are_right_all_the_same():
    histogram = histogram_of([1.5e308] * 3 + [1.5 * 2.0**1021], np.float64)
    assert histogram.mass == math.inf
    assert histogram.min_scale("float16", max_flushed_mass=0.0) == 2.0**-1046


def test_a_long_array_is_counted_piece_by_piece():
    # Over two million elements, each the number for which sums in float32 stall the soonest.
    values = np.full(2**21 + 5, 1 + 2.0**-8, np.float32)
    histogram = GradientHistogram.from_array(values)
    assert histogram.mass == values.size * (1 + 2.0**-8)


@pytest.mark.parametrize(
    "values",
    [[1, -2, 3], [[1.0], [2.0], [-3.0]], np.array([1, 2, 3]), np.array([1 + 2j, -3]), (True, 2, 3)],
    ids=["integers", "nested", "int64", "complex", "bool"],
)
def test_sequences_integers_and_complex_numbers(values):
    histogram = GradientHistogram.from_array(values)
    assert (histogram.nonzeros, histogram.mass) == (3, 6.0)


def test_strides_and_byte_order_do_not_matter():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    for same in (values.T, values[::-1, ::-1], values.astype(">f4"), np.asfortranarray(values)):
        assert GradientHistogram.from_array(same) == GradientHistogram.from_array(values)


@pytest.mark.parametrize(
    "values",
    ["3.5", ["a", "b"], None, [None], [object()], np.array([1.0], np.longdouble)],
    ids=["text", "texts", "None", "Nones", "object", "longdouble"],
)
def test_what_is_no_number_is_refused(values):
    with pytest.raises(ArgumentTypeError, match=r"Received: .* of dtype"):
        GradientHistogram.from_array(values)


@given(st.lists(arrays, max_size=5))
def test_merging_is_the_histogram_of_everything_together(parts):
    together = histogram_of([value for part in parts for value in part])
    histograms = [histogram_of(part) for part in parts]
    assert GradientHistogram.merge(histograms) == together
    assert GradientHistogram.merge(reversed(histograms)) == together
    assert sum(histograms, GradientHistogram()) == together


@given(arrays, arrays, arrays)
def test_addition_is_associative_and_commutative(a, b, c):
    a, b, c = map(histogram_of, (a, b, c))
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + GradientHistogram() == a


def test_only_histograms_can_be_added():
    with pytest.raises(TypeError):
        histogram_of([1.0]) + 1.0


@given(arrays, st.integers(-100, 100))
def test_scaled_is_the_histogram_of_the_scaled_array(values, power):
    scaled = histogram_of(np.float32(values).astype(np.float64) * 2.0**power, np.float64)
    assert histogram_of(values).scaled(power) == scaled


def test_scaling_out_of_float64_is_an_error():
    with pytest.raises(ArgumentError, match="amax"):
        histogram_of([1.0]).scaled(2000)
    with pytest.raises(ArgumentError, match="amax"):
        histogram_of([1.0]).scaled(-2000)


@given(nonzero_arrays, names, powers)
def test_shares_are_those_of_the_elements_up_to_the_tie(values, name, power):
    known, scale, histogram = number_format(name), 2.0**power, histogram_of(values)
    on_the_edge = [v for v in values if abs(v) * scale == known.flush_edge]
    # All ties or none: in between they are taken to stay.
    assume(not on_the_edge or histogram.amax * scale == known.flush_edge)
    lost = below(values, known.flush_edge, scale, tie=True)
    mass = math.fsum(map(abs, values))
    assert histogram.flushed_count(name, scale) == len(lost) / len(values)
    assert histogram.flushed_mass(name, scale) == pytest.approx(math.fsum(lost) / mass, rel=1e-12)
    weak = math.fsum(below(values, known.min_normal, scale, tie=False)) - math.fsum(lost)
    assert histogram.subnormal_mass(name, scale) == pytest.approx(weak / mass, rel=1e-9, abs=1e-15)


@given(nonzero_arrays, names, powers)
def test_an_overflow_is_counted_if_and_only_if_there_is_one(values, name, power):
    known, scale, histogram = number_format(name), 2.0**power, histogram_of(values)
    compare = operator.ge if known.edge_overflows else operator.gt
    over = sum(compare(abs(v) * scale, known.overflow_edge) for v in values)
    counted = histogram.overflow_count(name, scale)
    assert (counted > 0) == (over > 0)
    edge = exponent(known.overflow_edge / scale)
    at_edge = sum(bin.elements for bin in histogram.bins if bin.exponent == edge)
    assert abs(counted - over) <= at_edge
    headroom = histogram.headroom_bits(name, scale)
    assert (headroom < 0) == (histogram.amax * scale > known.overflow_edge)
    # The logarithm of a ratio next to 1 is its distance from 1.
    assert 2.0**headroom == pytest.approx(known.overflow_edge / (histogram.amax * scale), rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**-3])
@pytest.mark.parametrize("name", DTYPES)
def test_rounding_for_real_flushes_and_overflows_what_was_said(name, scale):
    rng = np.random.default_rng(0)
    known = number_format(name)
    small = np.exp2(rng.normal(math.log2(known.flush_edge / scale), 3, 3000)).astype(np.float32)
    # Numbers on the edge are taken to stay; some round to zero in float32 already.
    small = small[(small.astype(np.float64) * scale != known.flush_edge) & (small != 0)]
    lost = (small.astype(np.float64) * scale).astype(DTYPES[name]) == 0
    histogram = GradientHistogram.from_array(small)
    assert 0.3 < lost.mean() < 0.7
    assert histogram.flushed_count(name, scale) == lost.mean()
    mass = small[lost].sum(dtype=np.float64) / small.sum(dtype=np.float64)
    assert histogram.flushed_mass(name, scale) == pytest.approx(mass, rel=1e-12)

    large = np.exp2(rng.normal(math.log2(known.overflow_edge / scale), 1, 3000))
    with np.errstate(over="ignore"):
        over = np.count_nonzero(~np.isfinite((large * scale).astype(DTYPES[name])))
    assert over > 1000
    counted = GradientHistogram.from_array(large).overflow_count(name, scale)
    assert counted == pytest.approx(over, rel=0.05)


def test_published_shares_of_lognormal_gradients():
    # log2|g| ~ N(-20, 4): the share lost at a scale of 2**k is Φ((-25 - k + 20) / 4), that of the
    # sum of |g| is Φ((-25 - k + 20) / 4 - 4 ln 2), and what overflows is 1 - Φ((16 - k + 20) / 4).
    values = np.exp2(np.random.default_rng(0).normal(-20, 4, 2_000_000))
    histogram = GradientHistogram.from_array(values)
    for power, share in ((0, 0.1057), (4, 0.0122), (8, 0.00058)):
        assert histogram.flushed_count("float16", 2.0**power) == pytest.approx(share, rel=0.05)
    assert histogram.flushed_mass("float16") == pytest.approx(2.9e-5, rel=0.1)
    for power, share in ((20, 3.2e-5), (24, 1.35e-3)):
        counted = histogram.overflow_count("float16", 2.0**power)
        assert counted / values.size == pytest.approx(share, rel=0.2)


@pytest.mark.parametrize("scale", [3.0, 1000.0, 0.3])
def test_other_scales_are_estimated_within_the_bin_of_the_edge(scale):
    values = np.exp2(np.random.default_rng(1).uniform(-40, 10, 200_000))
    histogram = GradientHistogram.from_array(values)
    lost = values * scale <= 2.0**-25
    assert histogram.flushed_count("float16", scale) == pytest.approx(lost.mean(), rel=0.01)
    mass = values[lost].sum() / values.sum()
    assert histogram.flushed_mass("float16", scale) == pytest.approx(mass, rel=0.01)


@given(nonzero_arrays, names, st.sampled_from([0.0, 1e-3, 0.05, 0.5]))
def test_the_smallest_scale_is_the_least_power_of_two_that_keeps_enough(values, name, share):
    histogram = histogram_of(values)
    scale = histogram.min_scale(name, max_flushed_mass=share)
    assert math.frexp(scale)[0] == 0.5
    assert histogram.flushed_mass(name, scale) <= share
    assert histogram.flushed_mass(name, scale / 2) > share


@given(nonzero_arrays, names, st.sampled_from([0, 0.5, 1.0, 2.0]), st.sampled_from([1, 3, 64]))
def test_the_largest_scale_is_the_greatest_power_of_two_with_room(values, name, margin, summands):
    histogram = histogram_of(values)
    scale = histogram.max_scale(name, margin=margin, summands=summands)
    assert math.frexp(scale)[0] == 0.5
    room = margin + math.log2(summands)
    assert histogram.headroom_bits(name, scale) >= room
    assert histogram.overflow_count(name, scale) == 0
    assert (
        scale == 2.0**126
        or histogram.headroom_bits(name, 2 * scale) < room
        or histogram.overflow_count(name, 2 * scale)
    )


@given(nonzero_arrays, names)
def test_a_recommended_scale_neither_loses_nor_overflows(values, name):
    histogram = histogram_of(values)
    scale = histogram.recommended_scale(name)
    lowest = max(histogram.min_scale(name), 2.0**-126)
    highest = min(histogram.max_scale(name), 2.0**126)
    if scale is None:
        assert lowest > highest
        return
    assert lowest <= scale <= highest
    # As many powers of two below as above it, or one more above.
    assert scale / lowest in (highest / scale, highest / scale / 2)
    assert histogram.flushed_mass(name, scale) <= 1e-3
    assert np.isfinite((np.float64(values) * scale).astype(DTYPES[name])).all()


def test_nothing_above_zero_has_no_scale():
    for histogram in (GradientHistogram(), histogram_of([0.0, math.nan, math.inf])):
        assert histogram.min_scale("float16") is None
        assert histogram.max_scale("float16") is None
        assert histogram.recommended_scale("float16") is None
        assert histogram.headroom_bits("float16") == math.inf
        assert histogram.flushed_mass("float16") == histogram.flushed_count("float16") == 0
        assert histogram.overflow_count("float16") == 0
        assert histogram.range_bits() == histogram.mass == 0


def test_range_bits_leave_out_what_adds_up_to_nothing():
    values = [2.0**-40] * 10 + [2.0**-9] * 3 + [1.0]
    assert histogram_of(values).range_bits() == 9
    assert histogram_of(values).range_bits(lost_mass=0) == 40
    assert histogram_of([3.0, 3.0]).range_bits() == pytest.approx(math.log2(1.5))


@given(arrays)
def test_json_round_trip_is_exact(values):
    histogram = histogram_of(values)
    assert GradientHistogram.from_json(histogram.to_json()) == histogram
    json.loads(histogram.to_json(), parse_constant=lambda name: pytest.fail(name))


GOOD = {"bins": [[0, 2, 5]], "zeros": 0, "infs": 0, "nans": 0, "amax": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bins": [[0, 0, 0]]}, "elements from 1 up"),
        ({"bins": [[0, 1, -1]]}, "up to elements"),
        ({"bins": [[0, 1, 2**24]]}, "up to elements"),
        ({"bins": [[1, 1, 0], [0, 1, 0]]}, "ascending"),
        ({"bins": [[0, 1, 0], [0, 1, 0]]}, "ascending"),
        ({"bins": [[0, 1]]}, "missing 1 required"),
        ({"bins": [[0, 1.5, 0]]}, "must be integers"),
        ({"bins": 7}, "not iterable"),
        ({"bins": []}, "`amax`"),
        ({"amax": 2.0}, "`amax`"),
        ({"amax": math.nan}, "NaN is no JSON"),
        ({"amax": "one"}, "`amax`"),
        ({"zeros": -1}, "`zeros` must not be negative"),
        ({"infs": True}, "must be integers"),
        ({"extra": 1}, r"must have .*'extra' not known"),
    ],
    ids=str,
)
def test_damaged_json_is_refused(change, message):
    GradientHistogram.from_dict(GOOD)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        GradientHistogram.from_json(json.dumps({**GOOD, **change}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"bins": []}'])
def test_other_json_is_refused(text):
    with pytest.raises(ArgumentError, match=r"JSON of a histogram"):
        GradientHistogram.from_json(text)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda h: h.flushed_mass("float99"), "`format` must be one of float16"),
        (lambda h: h.flushed_count("float16", 0.0), "`scale`"),
        (lambda h: h.overflow_count("float16", -1.0), "`scale`"),
        (lambda h: h.headroom_bits("float16", math.inf), "`scale`"),
        (lambda h: h.subnormal_mass("float16", "2"), "`scale`"),
        (lambda h: h.min_scale("float16", max_flushed_mass=1.0), "`max_flushed_mass`"),
        (lambda h: h.max_scale("float16", margin=-1), "`margin`"),
        (lambda h: h.max_scale("float16", summands=0), "`summands`"),
        (lambda h: h.range_bits(lost_mass=-0.1), "`lost_mass`"),
    ],
)
def test_bad_questions_are_refused_by_name(ask, message):
    with pytest.raises(ArgumentError, match=message):
        ask(histogram_of([1.0]))


def test_a_histogram_is_a_value():
    histogram = histogram_of([1.0, 3.0])
    assert hash(histogram) == hash(histogram_of([3.0, 1.0]))
    assert histogram.bins[1] == ExponentBin(1, 1, 2**22)
    with pytest.raises(AttributeError):
        histogram.zeros = 3
