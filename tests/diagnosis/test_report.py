"""The report: its lines."""

import math

import numpy as np
import pytest

from diagnosis.test_measurement import Model, spread
from lossscale import DynamicScale
from lossscale.diagnosis.measurement import TARGETS, GradientAccuracy, Measurement
from lossscale.diagnosis.report import Report

LONG = "model/encoder/block_12/attention/self_attention/query_projection/kernel_of_the_layer"
MODELS = {
    "not needed": Model({"w": spread(-6, 0), "b": spread(-6, 0)}),
    "needed": Model({"w": spread(-34, -26), "b": spread(-20, -12)}),
    "below 1": Model({"w": spread(8, 14)}),
    "no single scale": Model({"w": spread(-40, -36), "b": spread(8, 12)}),
    "cannot help": Model({"w": spread(-6, 0)}, ends="the loss"),
    "targets": Model({"w": spread(-6, 0)}, ends=TARGETS),
    "unknown": Model({"w": spread(-6, 0)}, loss=math.nan),
    "zero": Model({"w": spread(-6, 0), "dead": np.zeros(3, np.float32)}),
    "casts": Model({"w": spread(-6, 0), "l": spread(-30, -26)}, casts=("w", "l")),
    "long names": Model({f"{LONG}_{n}": spread(-34, -26) for n in range(5)}),
    "noise": Model({"w": spread(-6, 0), "n": spread(-40, -38)}, noise=("n",)),
}


def said(found):
    """The text of a report in one line."""
    return " ".join(str(found).split())


def report(name):
    return Report("Net", "NumPy", MODELS[name].measured())


@pytest.mark.parametrize("name", MODELS)
def test_the_report_begins_with_the_verdict_and_is_short(name):
    found = report(name)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 88
    assert lines[0].startswith("Net")
    titles = [line[:14].strip() for line in lines if line[:2] == "  " and line[2] != " "]
    assert len(titles) <= 12
    assert titles[-1] == "measured"
    if found.rule is not None:
        words = said(found).partition("rule = ")[2].partition(")")[0] + ")"
        assert eval(words, {"DynamicScale": DynamicScale}) == found.rule
    if name in ("not needed", "needed", "no single scale", "cannot help", "unknown"):
        assert found.verdict == name
        assert name in lines[0]


def test_what_the_lines_say():
    needed = said(report("needed"))
    for words in (
        "without scaling, the worst gradient, of w, is wrong by",
        "every gradient is accurate from a loss scale of",
    ):
        assert words in needed
    below = said(report("below 1"))
    assert "rule = DynamicScale(initial_scale=2.0**-" in below
    assert "left out 1 of the gradients: n: wrong at every scale" in said(report("noise"))
    assert "cannot help: the loss is not finite in float16" in said(report("cannot help"))
    assert "the targets are beyond the range of float16" in said(report("targets"))
    assert "unknown: the loss or a gradient is not finite in float32" in said(report("unknown"))
    assert "left out 1 of the gradients: dead: also 0 in float32" in said(report("zero"))
    assert "reference the model casts to float16 itself" in said(report("casts"))


def test_a_gradient_that_no_scale_makes_accurate_is_not_called_accurate():
    for lowest, errors in ((0, {0: 0.3, 8: 0.3}), (4, {0: 0.9, 4: 0.3, 8: 0.3})):
        gradients = (GradientAccuracy("w", 1.0, errors),)
        found = Measurement(gradients, lowest_exponent=lowest, highest_exponent=20)
        text = said(Report("Net", "NumPy", found))
        assert "every gradient is as accurate as at any loss scale" in text
        assert "any scale the gradient of w is wrong by 30% at every loss scale" in text


def test_elsewhere_it_is_shown_by_its_first_line():
    found = report("needed")
    (headline,) = said(found).split(" small ")[:1]
    assert repr(found) == f"<Report: {headline}>"
    assert len(repr(found)) < 200
