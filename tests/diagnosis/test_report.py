"""The report: its lines, its JSON, its page and its picture."""

import dataclasses
import html
import json
import math

import numpy as np
import pytest

from diagnosis.test_measurement import Model, spread
from lossscale import DynamicScale
from lossscale.diagnosis.gradient_function import TARGETS, OutputRange
from lossscale.diagnosis.report import make_report

ROOM = {"dense (matmul)": OutputRange(8.0, True), "out (add)": OutputRange(4.0, True)}
LONG = "model/encoder/block_12/attention/self_attention/query_projection/kernel_of_the_layer"
MODELS = {
    "not needed": Model({"w": spread(-6, 0), "b": spread(-6, 0)}, ROOM, ROOM),
    "needed": Model({"w": spread(-34, -26), "b": spread(-20, -12)}, ROOM, ROOM),
    "below 1": Model({"w": spread(8, 14)}, ROOM, ROOM),
    "no single scale": Model({"w": spread(-40, -36), "b": spread(8, 12)}, ROOM, ROOM),
    "cannot help": Model(
        {"w": spread(-6, 0)}, {"a": OutputRange(1, False)}, {"a": OutputRange(1e5, True)}
    ),
    "targets": Model(
        {"w": spread(-6, 0)}, {TARGETS: OutputRange(1, False)}, {TARGETS: OutputRange(1e5, True)}
    ),
    "unknown": Model({"w": spread(-6, 0)}, loss=math.nan),
    "zero": Model({"w": spread(-6, 0), "dead": np.zeros(3, np.float32)}, ROOM, ROOM),
    "casts": Model({"w": spread(-6, 0), "l": spread(-30, -26)}, ROOM, ROOM, casts=("w", "l")),
    "long names": Model(
        {f"{LONG}_{n}": spread(-34, -26) for n in range(5)},
        {f"{LONG} (matmul)": OutputRange(8.0, True)},
    ),
    "noise": Model({"w": spread(-6, 0), "n": spread(-40, -38)}, ROOM, ROOM, noise=("n",)),
    "two losses": Model({"critic": {"c": spread(-40, -36)}, "actor": {"g": spread(-6, 0)}}),
}


def said(found):
    """The text of a report in one line."""
    return " ".join(str(found).split())


def report(name):
    return make_report(MODELS[name], [1.0, 1.0], model="Net", setting="NumPy")


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


def test_the_worst_of_several_losses_comes_first():
    small, large = {"c": spread(-40, -36)}, {"g": spread(-6, 0)}
    model = Model({"right": large, "needs one": small, "neither": {**small, "b": spread(8, 12)}})
    found = make_report(model, (1.0, 1.0), model="Net", setting="NumPy")
    assert [*found.recommendations] == ["neither", "needs one", "right"]
    assert (found.verdict, found.rule) == ("no single scale", None)
    found = report("two losses")
    assert str(found).startswith("Net, critic: loss scaling is needed. rule = ")
    assert "Net, actor: loss scaling is not needed." in str(found)


def test_what_the_lines_say():
    needed = said(report("needed"))
    for words in (
        "without scaling, the gradient of",
        "every gradient is accurate from a loss scale of",
        "the largest output, of dense (matmul), is 13 bits below overflow",
        "bfloat16 needs no loss scaling",
    ):
        assert words in needed
    below = said(report("below 1"))
    assert "rule = DynamicScale(initial_scale=2.0**-" in below
    assert "does the same as the rule" in below
    assert "left out 1 gradient is wrong at every scale: n " in said(report("noise"))
    assert "cannot help: a overflows in float16" in said(report("cannot help"))
    assert "the targets are beyond the range of float16" in said(report("targets"))
    assert "unknown: the loss is not finite in float32" in said(report("unknown"))
    assert "zero 1 gradient is also 0 in float32, and left out: dead" in said(report("zero"))
    assert "reference the model casts to float16 itself" in said(report("casts"))


@pytest.mark.parametrize("name", MODELS)
def test_json_is_strict_and_whole(name):
    found = report(name)
    read = json.loads(found.to_json(), parse_constant=lambda constant: pytest.fail(constant))
    assert read["verdict"] == found.verdict.value
    assert set(read["measurements"]) == set(found.measurements)


NOT_DRAWN = ("unknown", "cannot help", "targets")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_DRAWN])
def test_the_picture_has_a_line_for_each_gradient(name):
    from matplotlib.figure import Figure

    found = report(name)
    ax = found.plot(Figure().subplots())
    assert ax.get_title(loc="left").startswith("Net")
    drawn = next(iter(found.recommendations))
    voting = [g for g in found.measurements[drawn].gradients if g.errors and not g.is_noise]
    curves = [
        line for line in ax.lines if len(line.get_xdata()) > 1 and line.get_color() == "#8b95a3"
    ]
    assert len(curves) == len(voting)
    ax.figure.canvas.draw()


def test_there_is_nothing_to_draw_of_what_was_not_measured():
    for name in NOT_DRAWN:
        with pytest.raises(ValueError, match="There is nothing to draw"):
            report(name).plot()
    with pytest.raises(ValueError, match="`loss` must be one of 'critic', 'actor'"):
        report("two losses").plot(loss="g")


def test_in_a_notebook_it_is_shown_whole_and_elsewhere_by_its_first_line():
    found = report("needed")
    (headline,) = said(found).split(" small ")[:1]
    assert repr(found) == f"<Report: {headline}>"
    assert len(repr(found)) < 200
    assert html.unescape(found._repr_html_()) == f"<pre>{found}</pre>"
    hostile = dataclasses.replace(found, model="<script>")
    assert "<script>" not in hostile._repr_html_()
