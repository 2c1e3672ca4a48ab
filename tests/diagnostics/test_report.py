"""Reports made by hand: how verdicts on tensors make that on the model, and what is printed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from lossscale.diagnostics import (
    GradientHistogram,
    GradientReport,
    TensorKind,
    TensorRange,
    Thresholds,
    Verdict,
)
from lossscale.errors import ArgumentError

FINE, FLUSHED, HUGE, ZERO = 1e-3, 1e-9, 1e5, 0.0


def gradient(name, *values, kind=TensorKind.VARIABLE, layer=None):
    histogram = GradientHistogram.from_array(np.array(values, np.float32))
    return TensorRange(name, layer or name.rpartition("/")[0], kind, histogram)


def output(*values, name="output:end"):
    return gradient(name, *values, kind=TensorKind.OUTPUT, layer="end")


def inside(*values, name="activation:hidden"):
    return gradient(name, *values, kind=TensorKind.ACTIVATION, layer="hidden")


def report(*ranges, **arguments):
    given = {
        "model": "net",
        "framework": "Keras on numpy",
        "policy": "float32",
        "measured_in": "float32",
        "batches": 2,
        "samples": 64,
    }
    return GradientReport(**{**given, **arguments}, ranges=ranges)


def test_all_fine():
    found = report(gradient("a/kernel", FINE), output(FINE), inside(FINE))
    assert found.verdict is Verdict.NOT_NEEDED
    assert found.recommended_scale == 1.0
    assert found.advice == []


def test_one_bad_variable_is_enough():
    found = report(gradient("a/kernel", FINE), gradient("b/kernel", FLUSHED), output(FINE))
    assert found.verdict is Verdict.REQUIRED
    assert found.worst.name == "b/kernel"
    assert "b/kernel" in found.reason
    assert [tensor.name for tensor in found.tensors][-1] in ("a/kernel", "output:end")


def test_what_is_next_to_the_loss_comes_first():
    found = report(gradient("a/kernel", FLUSHED / 9), output(FLUSHED, FLUSHED), inside(FLUSHED))
    assert [tensor.kind for tensor in found.tensors] == [
        TensorKind.OUTPUT,
        TensorKind.VARIABLE,
        TensorKind.ACTIVATION,
    ]


def test_what_is_lost_inside_counts_as_a_recommendation():
    found = report(gradient("a/kernel", FINE), output(FINE), inside(FLUSHED))
    assert found.tensors[0].verdict is Verdict.REQUIRED
    assert found.tensors[0].weight is Verdict.RECOMMENDED
    assert found.verdict is Verdict.RECOMMENDED
    assert found.cells(found.tensors[0])[-1] == "required (*)"
    assert any(note.startswith("(*)") for note in found.footnotes)
    # The scale that is recommended saves it too.
    assert found.tensors[0].histogram.flushed_mass("float16", found.recommended_scale) == 0


def test_what_cannot_be_saved_inside_does_not_make_all_scaling_vain():
    found = report(gradient("a/kernel", FINE, 8.0), output(FINE), inside(2.0**-60, 2.0**-59))
    assert found.verdict is Verdict.RECOMMENDED
    lowest, highest = found.suitable_scales
    assert lowest <= found.recommended_scale <= highest


def test_a_gradient_of_rounding_errors_has_no_say():
    noise = gradient("conv/bias", FINE * 2.0**-18)
    kernel = gradient("conv/kernel", FINE)
    found = report(kernel, noise, output(FINE))
    assert found.verdict is Verdict.NOT_NEEDED
    assert found.tensors[-1].name == "conv/bias"
    assert found.tensors[-1].verdict is Verdict.REQUIRED
    assert found.tensors[-1].weight is Verdict.UNKNOWN
    assert found.cells(found.tensors[-1])[-1] == "negligible"
    assert any(note.startswith("Negligible") for note in found.footnotes)
    # Beside a layer whose gradients have vanished as a whole it is no rounding error.
    vanished = gradient("conv/kernel", FINE * 2.0**-16)
    assert report(vanished, noise, output(FINE)).verdict is Verdict.REQUIRED
    strict = found.with_format("float16", Thresholds(negligible=0.0))
    assert strict.verdict is Verdict.REQUIRED


def test_gradients_that_no_single_scale_suits():
    found = report(gradient("a/kernel", 1.5 * 2.0**-40), gradient("b/kernel", 1.0), output(1.0))
    assert found.verdict is Verdict.INSUFFICIENT
    assert found.recommended_scale is None
    assert "the smallest need 2**15 or more, the largest 2**13 or less" in found.reason
    assert found.with_format("bfloat16").verdict is Verdict.NOT_NEEDED


def test_gradients_that_are_too_large_ask_for_a_scale_below_one():
    found = report(gradient("a/kernel", HUGE), output(1.0))
    assert found.verdict is Verdict.REQUIRED
    assert found.recommended_scale < 1
    assert "min_scale=" in str(found)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_makes_it_unknown(bad):
    found = report(gradient("a/kernel", FLUSHED), gradient("b/kernel", bad, 1.0), output(FINE))
    assert found.verdict is Verdict.UNKNOWN
    assert "b/kernel" in found.reason
    assert found.recommended_scale is None
    assert "not finite" in str(found)


def test_nothing_is_known_of_zeros_and_of_nothing():
    for found in (report(), report(gradient("a/kernel", ZERO)), report(gradient("a/kernel"))):
        assert found.verdict is Verdict.UNKNOWN
        assert found.reason == "Every gradient is zero."
        assert found.suitable_scales == (0.0, math.inf)
        str(found)


def test_a_zero_gradient_beside_others_has_no_say():
    found = report(gradient("a/kernel", FINE), gradient("b/kernel", ZERO), output(FINE))
    assert found.verdict is Verdict.NOT_NEEDED


def test_a_blind_measurement_makes_it_unknown():
    found = report(output(FINE), blind=("activation:a", "b", "c", "d", "e"))
    assert found.verdict is Verdict.UNKNOWN
    assert "activation:a, b, c and 2 more" in found.reason


def test_layers_collect_their_gradients():
    found = report(
        gradient("a/kernel", FINE, FINE),
        gradient("a/bias", FLUSHED / 1e9),
        gradient("hidden/kernel", FLUSHED),
        inside(FINE),
        output(FINE),
    )
    layers = {layer.name: layer for layer in found.layers}
    assert found.layers[0].name == "hidden"
    assert layers["hidden"].worst.name == "hidden/kernel"
    assert layers["hidden"].verdict is Verdict.REQUIRED
    assert layers["hidden"].histogram.size == 1
    assert layers["a"].verdict is Verdict.NOT_NEEDED
    assert layers["a"].histogram.size == 3
    assert found.total.size == 4


def test_the_text_is_aligned_and_says_what_to_do():
    found = report(gradient("a/kernel", FINE, FLUSHED), output(FLUSHED), policy="mixed_float16")
    lines = str(found).splitlines()
    assert lines[0] == "Loss scaling for net in float16: required."
    assert lines[2].startswith("Train with a dynamic scale, or with a fixed one: FixedScale(2**")
    heading = next(line for line in lines if line.startswith("gradient of"))
    rows = lines[lines.index(heading) + 1 :][:2]
    assert heading.index("verdict") == rows[0].index("required") == rows[1].index("not needed")
    # The numbers end where their headings end.
    for column in ("elements", "largest", "lost unscaled"):
        end = heading.index(column) + len(column)
        assert all(row[end - 1] != " " and row[end : end + 2] in ("  ", "") for row in rows)
    assert "on 2 batches (64 samples), with Keras on numpy." in lines[-1]
    assert "dtype policy is mixed_float16" in lines[-1]
    assert all(line == line.rstrip() for line in lines)


def test_long_reports_are_cut_unless_asked_for():
    found = report(*(gradient(f"layer{number}/kernel", FINE) for number in range(30)))
    assert "... and 10 more that lose less" in str(found)
    assert "layer29/kernel" not in found.to_text(rows=5) or "and 25 more" in found.to_text(rows=5)
    whole = found.to_text(rows=None)
    assert all(f"layer{number}/kernel" in whole for number in range(30))
    assert "more that lose less" not in whole


def test_saturating_formats_come_with_a_warning():
    assert "float8_e4m3fn has no infinity" in str(report(output(FINE), format="float8_e4m3fn"))
    assert "no infinity" not in str(report(output(FINE), format="float8_e5m2"))


REPORT = report(
    gradient("a/kernel", FINE, FLUSHED, 0.0),
    gradient("b/kernel", math.inf, math.nan),
    output(FLUSHED),
    inside(1.0),
    format="float8_e5m2",
    thresholds=Thresholds(margin=3, summands=4),
    blind=("x",),
)


@pytest.mark.parametrize(
    "found", [REPORT, report(), report(output(FLUSHED))], ids=["full", "empty", "one"]
)
def test_json_round_trip_is_exact(found):
    again = GradientReport.from_json(found.to_json())
    assert again == found
    assert str(again) == str(found)


def test_json_has_what_other_programs_ask_for():
    read = json.loads(report(output(FLUSHED), gradient("a/kernel", FINE)).to_json())
    assert read["verdict"] == "required"
    assert read["worst"] == "output:end"
    assert read["suitable_scales"][0] <= read["recommended_scale"] <= read["suitable_scales"][1]
    assert {found["name"]: found["verdict"] for found in read["ranges"]} == {
        "output:end": "required",
        "a/kernel": "not needed",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lossscale_report": 2}, "a report of format 2, and only format 1"),
        ({"ranges": [{"name": "a"}]}, "'layer'"),
        ({"ranges": None}, "not iterable"),
        ({"ranges": [3]}, "each of `ranges` must be a JSON object"),
        ({"ranges": [{**REPORT.to_dict()["ranges"][0], "kind": "odd"}]}, "odd"),
        ({"thresholds": {"margin": -1}}, "margin"),
        ({"thresholds": {"unheard": 1}}, "unheard"),
        ({"format": "float99"}, "float99"),
    ],
    ids=str,
)
def test_damaged_json_is_refused(change, message):
    damaged = json.dumps({**REPORT.to_dict(), **change})
    with pytest.raises(ArgumentError, match=message):
        GradientReport.from_json(damaged)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{"])
def test_other_json_is_refused(text):
    with pytest.raises(ArgumentError, match="JSON of a report"):
        GradientReport.from_json(text)


def test_of_a_model_that_loses_nothing_none_is_said_to_lose_the_most():
    histogram = GradientHistogram.from_array([2.0**-3])
    ranges = (TensorRange("w", "layer", TensorKind.VARIABLE, histogram),)
    report = GradientReport("m", "keras", "float32", "float32", 1, 1, ranges)
    assert "None loses anything. The one with the least room is that of w: " in report.reason
    assert "loses the most" not in report.reason
