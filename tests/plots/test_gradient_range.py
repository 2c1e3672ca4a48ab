"""The drawings of gradients, by the data on their axes and by what is written beside them."""

from __future__ import annotations

import dataclasses

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from lossscale.diagnostics import GradientHistogram, GradientReport, TensorKind, TensorRange
from lossscale.errors import ArgumentError
from lossscale.plots import plot_gradient_range, plot_layers


@pytest.fixture
def ax():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def histogram_of(*values):
    return GradientHistogram.from_array(values)


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def drawn(ax):
    ax.figure.canvas.draw()
    return np.asarray(ax.figure.canvas.buffer_rgba())


def stairs(ax):
    """Name to (heights, edges) of each histogram."""
    labelled = [patch for patch in ax.patches if patch.get_label() in legend(ax)]
    return {patch.get_label(): patch.get_data()[:2] for patch in labelled}


def report(*histograms, format="float16"):
    """The last histogram is that of what the model returns, the others are of variables."""
    kinds = [*[TensorKind.VARIABLE] * (len(histograms) - 1), TensorKind.OUTPUT]
    names = [*(f"layer{number}/kernel" for number in range(len(histograms) - 1)), "output:end"]
    ranges = tuple(
        TensorRange(name, name.partition("/")[0], kind, histogram)
        for name, kind, histogram in zip(names, kinds, histograms, strict=True)
    )
    return GradientReport("net", "Keras", "float32", "float32", 1, 1, ranges, format=format)


SMALL = report(
    histogram_of(0.0, 2.0**-30, 2.0**-30, 1.5 * 2.0**-28),
    histogram_of(2.0**-27),
    histogram_of(1.5 * 2.0**-33),
)


def test_a_bar_is_the_share_of_what_is_not_zero(ax):
    histogram = histogram_of(0.0, 2.0**-30, 2.0**-30, 2.0**-28, 1.0)
    assert plot_gradient_range({"unscaled": histogram}, ax) is ax
    heights, edges = stairs(ax)["unscaled"]
    assert edges[:4] == pytest.approx([-30, -29, -28, -27])
    assert edges[-1] == 1
    assert heights[:3] == pytest.approx([50, 0, 25])
    assert heights[-1] == pytest.approx(25)
    assert legend(ax) == ["unscaled"]


def test_a_histogram_is_drawn_as_it_is_and_at_a_scale(ax):
    plot_gradient_range(histogram_of(2.0**-30, 2.0**-27), ax, scale=2.0**20)
    before, after = legend(ax)
    assert before == "without scaling (100 % become zero)"
    assert after == "times $2^{20}$ (0 % become zero)"
    assert stairs(ax)[before][1][0] == -30
    assert stairs(ax)[after][1][0] == -10


def test_a_report_is_drawn_at_the_scale_it_recommends(ax):
    plot_gradient_range(SMALL, ax)
    before, after = stairs(ax).values()
    assert before[1][0] == -33
    assert after[1][0] == -33 + np.log2(SMALL.recommended_scale)
    # All that is not zero: of the two variables, and of what the model returns.
    assert before[0] == pytest.approx([20, 0, 0, 40, 0, 20, 20])


def test_a_report_that_needs_no_scaling_is_drawn_once(ax):
    plot_gradient_range(report(histogram_of(0.5), histogram_of(0.25)), ax)
    assert len(legend(ax)) == 1


def test_the_bands_of_the_format_are_shown(ax):
    plot_gradient_range({"unscaled": histogram_of(1.0)}, ax)
    assert [text.get_text() for text in ax.texts] == [
        "zero in float16",
        "subnormal",
        "normal",
        "overflow",
    ]
    edges = [line.get_xdata()[0] for line in ax.lines]
    assert edges == pytest.approx([-25, -14, np.log2(65520)])
    # The bands lie side by side: the names stand over their middles, in this order.
    middles = [text.get_position()[0] for text in ax.texts]
    assert middles == sorted(middles)
    assert middles[1] == pytest.approx(-19.5)


@pytest.mark.parametrize(
    "draw",
    [
        lambda ax: plot_gradient_range(histogram_of(1.0), ax, format="float8_e5m2"),
        lambda ax: plot_gradient_range(SMALL, ax, format="float8_e5m2"),
        lambda ax: plot_gradient_range(SMALL.with_format("float8_e5m2"), ax),
    ],
    ids=["histogram", "report", "report-of-it"],
)
def test_another_format(ax, draw):
    draw(ax)
    assert ax.texts[0].get_text() == "zero in float8_e5m2"
    assert ax.lines[0].get_xdata()[0] == -17


def test_histograms_differ_without_colour_and_fit(ax):
    histogram = histogram_of(1.0, 2.0)
    histograms = {"a": histogram, "b": histogram.scaled(-60), "c": histogram.scaled(40)}
    plot_gradient_range(histograms, ax)
    shown = [patch for patch in ax.patches if patch.get_label() in histograms]
    assert len({patch.get_hatch() for patch in shown}) == 3
    assert len({to_hex(patch.get_edgecolor()) for patch in shown}) == 3
    left, right = ax.get_xlim()
    assert left < -60
    assert right > 42


def test_an_empty_histogram_is_drawn(ax):
    plot_gradient_range({"nothing": histogram_of(0.0)}, ax)
    assert legend(ax) == ["nothing"]
    assert drawn(ax).std() > 0


@pytest.mark.parametrize(
    ("gradients", "arguments", "message"),
    [
        (histogram_of(1.0), {"scale": 3.0}, "power of two"),
        (histogram_of(1.0), {"scale": 0.0}, "`scale`"),
        ({"a": histogram_of(1.0)}, {"scale": 2.0}, "histogram.scaled"),
        (histogram_of(1.0), {"format": "float99"}, "`format`"),
        (SMALL, {"format": "float99"}, "`format`"),
    ],
    ids=["odd", "zero", "several", "format", "format-of-report"],
)
def test_what_cannot_be_drawn_is_refused(ax, gradients, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        plot_gradient_range(gradients, ax, **arguments)
    assert not ax.patches


def test_layers_have_a_row_each_and_cells_in_proportion(ax):
    assert plot_layers(SMALL, ax) is ax
    (mesh,) = ax.collections
    cells = mesh.get_array()
    assert cells.shape == (3, 7)
    # From 2**-33 to 2**-26: the fullest cell of each row is black.
    assert cells[0].tolist() == [0, 0, 0, 100, 0, 50, 0]
    assert cells[1].tolist() == [0, 0, 0, 0, 0, 0, 100]
    assert cells[2].tolist() == [100, 0, 0, 0, 0, 0, 0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["layer0/kernel", "layer1/kernel", "output:end"]
    # The first row is on top.
    assert ax.get_ylim() == (3, 0)
    assert "log" in ax.get_xlabel()


def test_rows_are_sorted_by_what_they_are(ax):
    inside = TensorRange("activation:a", "a", TensorKind.ACTIVATION, histogram_of(1.0))
    plot_layers(dataclasses.replace(SMALL, ranges=(inside, *SMALL.ranges[::-1])), ax)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["layer1/kernel", "layer0/kernel", "activation:a", "output:end"]


def test_layers_show_the_format_unscaled_and_at_the_recommended_scale(ax):
    plot_layers(SMALL, ax)
    solid = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "-"]
    dashed = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--"]
    shift = np.log2(SMALL.recommended_scale)
    assert solid == pytest.approx([-25, -14, np.log2(65520)])
    assert dashed == pytest.approx([-25 - shift, np.log2(65520) - shift])
    assert legend(ax) == [
        "range of float16",
        f"range of float16 at a loss scale of $2^{{{round(shift)}}}$",
    ]
    left, right = ax.get_xlim()
    assert left < min(dashed)
    assert right > max(solid)


def test_layers_that_need_no_scaling_have_one_range(ax):
    plot_layers(report(histogram_of(0.5), histogram_of(0.25), format="bfloat16"), ax)
    assert legend(ax) == ["range of bfloat16"]


def test_of_many_layers_the_worst_have_rows(ax):
    plot_layers(report(*[histogram_of(1.0)] * 100), ax)
    assert len(ax.get_yticklabels()) == 41
    assert ax.get_yticklabels()[-1].get_text() == "60 others together"
    assert ax.get_yticklabels()[0].get_fontsize() >= 5


def test_layers_without_gradients_are_refused(ax):
    with pytest.raises(ArgumentError, match="nothing to draw"):
        plot_layers(report(histogram_of(0.0)), ax)


@pytest.mark.parametrize(
    "draw",
    [lambda: plot_gradient_range(SMALL), lambda: plot_layers(SMALL)],
    ids=["range", "layers"],
)
def test_without_axes_a_new_figure_is_drawn_on(draw):
    try:
        first, second = draw(), draw()
        assert first.figure is not second.figure
        assert drawn(first).std() > 0
    finally:
        pyplot.close("all")
