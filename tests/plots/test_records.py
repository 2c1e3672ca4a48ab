"""The picture of a run, by the data on its axes and by what is written beside them."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from lossscale.monitoring import SkipReason, StepRecord
from lossscale.plots import plot_records


@pytest.fixture
def ax():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def run(*scales, **fields):
    return [StepRecord(step, scale, False, **fields) for step, scale in enumerate(scales, start=1)]


def skip(step, scale, reason):
    return StepRecord(step, scale, True, reason=reason)


def test_the_scale_is_drawn_with_the_skipped_steps_by_reason(ax):
    records = [
        skip(1, 16.0, SkipReason.OVERFLOW),
        *[StepRecord(step, 8.0, False) for step in (2, 3)],
        skip(4, 8.0, SkipReason.OVERFLOW),
        skip(6, 1.0, SkipReason.FLOOR),
    ]
    assert plot_records(records, ax, label="dynamic") is ax
    line, floor, overflow = ax.lines
    assert line.get_xdata().tolist() == [1, 2, 4, 6]
    assert line.get_ydata().tolist() == [16.0, 8.0, 8.0, 1.0]
    assert (floor.get_xdata().tolist(), floor.get_ydata().tolist()) == ([6], [1.0])
    assert (overflow.get_xdata().tolist(), overflow.get_ydata().tolist()) == ([1, 4], [16.0, 8.0])
    assert legend(ax) == [
        "dynamic",
        "skipped: not finite at min_scale (1)",
        "skipped: gradients overflowed (2)",
    ]
    assert (ax.get_yscale(), ax.yaxis.get_transform().base) == ("log", 2)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale")


def test_two_runs_on_one_axes_are_told_apart_without_colour(ax):
    for style, name in enumerate(("first", "second")):
        plot_records(run(4.0, 2.0), ax, label=name, style=style)
    assert legend(ax) == ["first", "second"]
    assert len({line.get_linestyle() for line in ax.lines}) == 2


def test_without_axes_there_is_a_new_figure_with_the_loss_if_it_is_known():
    for records, panels in ((run(1.0, 2.0), 1), (run(1.0, 2.0, loss=0.5), 2)):
        first, second = plot_records(records), plot_records(records)
        assert first.figure is not second.figure
        assert len(first.figure.axes) == panels
        first.figure.canvas.draw()
        assert np.asarray(first.figure.canvas.buffer_rgba()).std() > 0
    pyplot.close("all")


def test_no_records_are_refused(ax):
    with pytest.raises(ValueError, match="at least one record"):
        plot_records([], ax)


def test_a_long_run_is_drawn_by_the_ends_of_its_levels(ax):
    plot_records(run(*[8.0] * 50_000, *[4.0] * 50_000), ax)
    (line,) = ax.lines
    assert line.get_xdata().tolist() == [1, 50_000, 50_001, 100_000]
    assert line.get_ydata().tolist() == [8.0, 8.0, 4.0, 4.0]


def test_a_legend_over_many_points_is_put_in_a_corner(ax):
    # Where a search takes over a second, matplotlib warns when the picture is drawn.
    plot_records(run(*[8.0, 4.0] * 20_000), ax)
    ax.figure.canvas.draw()
    box = ax.get_legend().get_window_extent().transformed(ax.transAxes.inverted())
    assert 0.9 < box.x1 <= 1
    assert 0.9 < box.y1 <= 1


@pytest.mark.parametrize("loss", [None, 0.5, float("nan")])
@pytest.mark.parametrize("skipped", [False, True])
def test_a_run_of_one_step_is_seen(loss, skipped):
    figure = Figure(layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    plot_records([StepRecord(7, 32768.0, skipped=skipped, loss=loss)], above, below)
    figure.canvas.draw()
    assert above.lines[0].get_marker() not in ("None", None, "")
    shown = [line for line in below.lines if len(line.get_xdata()) and line.get_marker() != "None"]
    assert bool(shown) == (loss is not None)
    assert [tick for tick in above.get_xticks() if tick != int(tick)] == []


def test_the_loss_is_drawn_with_what_is_not_finite():
    nan = float("nan")
    records = [
        StepRecord(step, 1.0, skipped=False, loss=loss)
        for step, loss in enumerate((1000.0, 0.9, nan, 0.8, nan, float("inf")), start=1)
    ]
    ax, loss_ax = Figure().subplots(2)
    plot_records(records, ax, loss_ax)
    line, lost = loss_ax.lines
    np.testing.assert_array_equal(line.get_ydata(), [1000.0, 0.9, nan, 0.8, nan, nan])
    # A point between two that are not finite is marked.
    assert line.get_markevery() == [3]
    assert lost.get_xdata().tolist() == [3, 5, 6]
    assert legend(loss_ax) == ["loss", "not finite (3)"]
    assert loss_ax.get_yscale() == "log"
