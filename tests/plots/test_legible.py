"""What stands around the pictures of a report can be read, whatever the model and the format."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.figure import Figure

from lossscale import DynamicScale
from lossscale.cli import diagnose as diagnose_verb
from lossscale.diagnostics import (
    FORMATS,
    FidelityMeter,
    GradientHistogram,
    GradientReport,
    HistoryHeader,
    StepRecord,
    TensorKind,
    TensorRange,
    TrainingHistory,
)
from lossscale.errors import ArgumentError
from lossscale.plots import plot_fidelity, plot_history, plot_layers
from lossscale.plots.labels import shortened


def report(layers, format="float16", of=None):
    """A report on a model with long names, of which the last layers are the worst.

    With `of` these layers are some of so many, the first and the last among them.
    """
    magnitudes = np.exp2(np.random.default_rng(0).normal(-8, 3, 200)).astype("float32")
    ranges = [
        TensorRange(
            f"encoder/transformer_block_{n}/multi_head_attention/query_projection/kernel",
            f"block_{n}",
            TensorKind.VARIABLE,
            GradientHistogram.from_array(magnitudes).scaled(-n // 4),
        )
        for n in np.linspace(0, (of or layers) - 1, layers).astype(int).tolist()
    ]
    return GradientReport("m", "keras", "float32", "float32", 1, 1, tuple(ranges), format=format)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Draws a report as the command line does, and returns the figure."""
    figures = []
    saved, path = Figure.savefig, tmp_path_factory.mktemp("pictures") / "picture.png"

    def savefig(figure, *arguments, **settings):
        # So that what is measured afterwards is what was saved.
        figure.set_dpi(settings["dpi"])
        saved(figure, *arguments, **settings)
        figures.append(figure)

    def draw(found):
        diagnose_verb.draw(found, path)
        return figures[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", savefig)
        yield draw


@pytest.fixture(scope="module")
def picture(drawn):
    """The picture of a report of so many layers, drawn once for all that look at it."""
    return functools.cache(lambda *arguments: drawn(report(*arguments)))


def boxes(texts):
    return [text.get_window_extent() for text in texts if text.get_text()]


def assert_apart(found):
    for one, other in itertools.combinations(found, 2):
        assert not one.shrunk(0.98, 0.98).overlaps(other)


@pytest.mark.parametrize("layers", [3, 40, 200])
def test_rows_have_room_for_their_names(picture, layers):
    ax = picture(layers).axes[1]
    labels = ax.get_yticklabels()
    assert all(label.get_fontsize() >= 7 for label in labels)
    assert_apart(boxes(labels))
    names = [label.get_text() for label in labels]
    assert len(set(names)) == len(names) == min(layers, 41)
    assert all(len(name) <= 44 and (name.endswith("kernel") or "others" in name) for name in names)
    inside = ax.figure.bbox
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes(labels))


def test_the_worst_rows_are_shown_and_the_rest_is_added_up(drawn):
    found = report(200)
    ax = plot_layers(found, Figure().subplots(), rows=3)
    names = [label.get_text() for label in ax.get_yticklabels()]
    worst = {tensor.name.split("/")[1] for tensor in found.tensors[:3]}
    numbers = {name.split("/")[0].rpartition("_")[2] for name in names[:3]}
    assert numbers == {name.rpartition("_")[2] for name in worst}
    assert names[3] == "197 others together"
    cells = ax.collections[0].get_array().reshape(4, -1)
    rest = GradientHistogram.merge(
        tensor.histogram for tensor in found.ranges if tensor.name.split("/")[1] not in worst
    )
    fullest = max(bin.elements for bin in rest.bins)
    expected = sorted(100 * bin.elements / fullest for bin in rest.bins)
    assert sorted(cells[3][cells[3] > 0]) == pytest.approx(expected)


@pytest.mark.parametrize("rows", [0, -1, 2.5])
def test_a_number_of_rows_that_is_none(rows):
    with pytest.raises(ArgumentError, match="`rows`"):
        plot_layers(report(3), Figure().subplots(), rows=rows)


# The axes of a format are as wide as its names and all gradients need; rows take room below.
@pytest.mark.parametrize(
    "arguments", [(3,), (200,), *((4, name, 200) for name in FORMATS if name != "float16")], ids=str
)
def test_names_of_ranges_are_not_printed_over_each_other(picture, arguments):
    figure = picture(*arguments)
    for ax in figure.axes[:2]:
        found = boxes(ax.texts)
        assert len(found) >= 3
        assert_apart(found)
        assert_apart([*found, *boxes([figure._suptitle])])


@pytest.mark.parametrize("layers", [3, 200])
def test_each_legend_is_below_its_axes_and_near(picture, layers):
    figure = picture(layers)
    for ax in figure.axes[:2]:
        legend, axes = ax.get_legend().get_window_extent(), ax.get_window_extent()
        label = ax.xaxis.label.get_window_extent()
        assert legend.y1 <= label.y0 + 1
        assert axes.y0 - legend.y1 < 45 / 72 * figure.dpi


def test_a_new_figure_is_as_high_as_its_rows():
    try:
        heights = [plot_layers(report(n)).figure.get_figheight() for n in (3, 30, 200)]
    finally:
        pyplot.close("all")
    assert heights[0] < heights[1] < heights[2] < 12


@pytest.mark.parametrize("loss", [None, 0.5, float("nan")])
@pytest.mark.parametrize("skipped", [False, True])
def test_a_history_of_one_step_shows_it(loss, skipped):
    record = StepRecord(7, 32768.0, skipped=skipped, loss=loss)
    history = TrainingHistory(HistoryHeader.of(DynamicScale()), [record])
    figure = Figure(layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    plot_history(history, above, below)
    figure.canvas.draw()
    assert above.lines[0].get_marker() not in ("None", None, "")
    shown = [line for line in below.lines if len(line.get_xdata()) and line.get_marker() != "None"]
    assert bool(shown) == (loss is not None)
    assert [tick for tick in above.get_xticks() if tick != int(tick)] == []


def test_a_loss_between_two_that_are_not_finite_is_marked():
    nan = float("nan")
    records = [
        StepRecord(step, 1.0, skipped=False, loss=loss)
        for step, loss in enumerate((1.0, 0.9, nan, 0.8, nan), start=1)
    ]
    ax, loss_ax = Figure().subplots(2)
    plot_history(TrainingHistory(HistoryHeader.of(DynamicScale()), records), ax, loss_ax)
    assert loss_ax.lines[0].get_markevery() == [3]


@given(
    st.lists(st.text("ab/", min_size=1, max_size=60), max_size=12, unique=True),
    st.integers(16, 40),
)
def test_shortened_names_fit_and_stay_different(names, length):
    found = shortened(names, length)
    assert len(found) == len(names) == len(set(found))
    for name, short in zip(names, found, strict=True):
        assert len(short) <= length
        assert short == name if len(name) <= length else "…" in short


def measured(variables):
    """A report with fidelity: each variable is worse than the one before."""
    found = report(variables)
    exact = np.exp2(np.random.default_rng(0).normal(-20, 3, 200))

    def gradients(batch, scale, *, reference):
        with np.errstate(over="ignore"):
            return {
                each.name: (exact * 2.0 ** -(n // 8) * scale).astype(
                    "float32" if reference else "float16"
                )
                for n, each in enumerate(found.ranges)
            }

    meter = FidelityMeter(gradients, {each.name: each.layer for each in found.ranges}, in_use=8.0)
    meter.add(None)
    return dataclasses.replace(found, fidelity=meter.result())


@pytest.mark.parametrize("variables", [1, 30])
def test_fidelity_is_drawn_first_with_the_worst_above(drawn, variables):
    found = measured(variables)
    figure = drawn(found)
    ax = figure.axes[0]
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert len(labels) == min(variables, 20)
    assert all("lost)" in label for label in labels)
    assert_apart(boxes(ax.get_yticklabels()))
    worst = found.measured_variables[0]
    names = [line.get_label() for line in ax.get_lines()]
    assert names[0] == "unscaled"
    assert any(name.endswith("(in use)") for name in names)
    unscaled = ax.get_lines()[0]
    assert unscaled.get_xdata()[0] == pytest.approx(worst.unscaled.error)
    assert ax.get_xscale() == "log"


def test_without_fidelity_there_is_nothing_to_draw_of_it(picture):
    with pytest.raises(ArgumentError, match="no fidelity"):
        plot_fidelity(report(3))
    assert "relative error" not in picture(3).axes[0].get_xlabel()
