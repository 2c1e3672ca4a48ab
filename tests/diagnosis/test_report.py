"""The report: its lines, its JSON, its page and its picture."""

import dataclasses
import html
import json
import math

import pytest

from diagnosis.test_measurement import Model, spread
from lossscale import DynamicScale
from lossscale.diagnosis.passes import MODEL, Output
from lossscale.diagnosis.report import report_on

ROOM = {"dense (matmul)": Output(8.0, True), MODEL: Output(4.0, True)}
NEEDS_MUCH = {"dense (matmul)": Output(8.0, True), MODEL: Output(4.0, True, 2e4)}
MODELS = {
    "not needed": Model({"w": spread(-6, 0), "b": spread(-6, 0)}, ROOM, ROOM),
    "needed": Model({"w": spread(-34, -26), "b": spread(-20, -12)}, ROOM, ROOM),
    "below 1": Model({"w": spread(8, 14)}, ROOM, NEEDS_MUCH),
    "no single scale": Model({"w": spread(-40, -36), "b": spread(8, 12)}, ROOM, ROOM),
    "cannot help": Model({"w": spread(-6, 0)}, {"a": Output(1, False)}, {"a": Output(1e5, True)}),
    "unknown": Model({"w": spread(-6, 0)}, loss=math.nan),
    "noise": Model({"w": spread(-6, 0), "n": spread(-40, -38)}, ROOM, ROOM, noise=("n",)),
    "two losses": Model({"critic": {"c": spread(-40, -36)}, "actor": {"g": spread(-6, 0)}}),
}


def report(name, **keywords):
    return report_on(MODELS[name], (1.0, 1.0), model="Net", setting="NumPy", **keywords)


@pytest.mark.parametrize("name", MODELS)
def test_the_report_begins_with_the_verdict_and_is_short(name):
    found = report(name)
    lines = str(found).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) < 260
    assert lines[0].startswith("Net")
    assert lines[-1].lstrip().startswith("measured")
    if found.rule is not None:
        words = lines[0].partition("rule = ")[2]
        assert eval(words, {"DynamicScale": DynamicScale}) == found.rule
    if name in ("not needed", "needed", "no single scale", "cannot help", "unknown"):
        assert found.verdict == name
        assert name in lines[0]
    rows = [line for line in lines if line.startswith("  ") and " do " not in line]
    assert all(any(c.isdigit() for c in row) for row in rows)


def test_the_worst_of_several_losses_comes_first():
    small, large = {"c": spread(-40, -36)}, {"g": spread(-6, 0)}
    model = Model({"right": large, "needs one": small, "neither": {**small, "b": spread(8, 12)}})
    found = report_on(model, (1.0, 1.0), model="Net", setting="NumPy")
    assert [*found.verdicts] == ["neither", "needs one", "right"]
    assert (found.verdict, found.rule) == ("no single scale", None)


def test_what_the_lines_say():
    needed = str(report("needed", in_use=2.0**15))
    for words in (
        "without scaling the gradient of",
        "every gradient is right from a loss scale of",
        "13 bits of room; the largest output is that of dense (matmul)",
        "bfloat16    needs no loss scaling",
        "in use      at the loss scale 2**15",
    ):
        assert words in needed
    below = str(report("below 1"))
    assert "rule = DynamicScale(initial_scale=2.0**-" in below
    assert "does the same as the rule" in below
    assert "for a loss of 0 the model's output would come within 2 bits" in below
    assert "left out    1 gradient that float16 gets wrong at every scale: n " in str(
        report("noise")
    )
    assert "cannot help: a goes beyond the range of float16" in str(report("cannot help"))
    assert "unknown: the loss is not finite in float32" in str(report("unknown"))


def test_several_losses_have_a_verdict_each_the_worst_first():
    found = report("two losses")
    assert list(found.verdicts) == ["critic", "actor"]
    assert found.verdict == "needed"
    assert str(found).splitlines()[0].startswith("Net, critic: loss scaling is needed. rule = ")
    assert "Net, actor: loss scaling is not needed." in str(found)


@pytest.mark.parametrize("name", MODELS)
def test_json_is_strict_and_whole(name):
    found = report(name)
    read = json.loads(found.to_json(), parse_constant=lambda constant: pytest.fail(constant))
    assert read["verdict"] == found.verdict.value
    assert set(read["measurements"]) == set(found.measurements)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "unknown"])
def test_the_picture_has_a_line_for_each_gradient(name):
    from matplotlib.figure import Figure

    from lossscale.plots import plot_diagnosis

    found = report(name)
    ax = plot_diagnosis(found, Figure().subplots())
    assert ax.get_title(loc="left").startswith("Net")
    drawn = next(iter(found.verdicts))
    voting = [g for g in found.measurements[drawn].gradients if g.errors and not g.is_noise]
    curves = [
        line for line in ax.lines if len(line.get_xdata()) > 1 and line.get_color() == "#8b95a3"
    ]
    assert len(curves) == len(voting)
    ax.figure.canvas.draw()


def test_there_is_nothing_to_draw_of_what_was_not_measured():
    from lossscale.plots import plot_diagnosis

    with pytest.raises(ValueError, match="There is nothing to draw"):
        plot_diagnosis(report("unknown"))
    with pytest.raises(ValueError, match="`loss` must be one of 'critic', 'actor'"):
        plot_diagnosis(report("two losses"), loss="g")


def test_a_report_is_a_value():
    found = report("needed")
    assert dataclasses.replace(found) == found


def test_in_a_notebook_it_is_shown_whole_and_elsewhere_by_its_first_line():
    found = report("needed")
    assert repr(found) == f"<Report: {str(found).splitlines()[0]}>"
    assert len(repr(found)) < 200
    assert html.unescape(found._repr_html_()) == f"<pre>{found}</pre>"
    hostile = dataclasses.replace(found, model="<script>")
    assert "<script>" not in hostile._repr_html_()
