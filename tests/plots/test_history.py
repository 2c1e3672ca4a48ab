"""The drawing of a run, by the data on its axes and by what is written beside them."""

from __future__ import annotations

import math

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from matplotlib import pyplot

from lossscale import DynamicScale
from lossscale.monitoring import HistoryHeader, SkipReason, StepRecord, TrainingHistory
from lossscale.plots import plot_history, plot_scales

HEADER = HistoryHeader.of(DynamicScale(initial_scale=16))
RUN = TrainingHistory(
    HEADER,
    [
        StepRecord(1, 16.0, True, loss=4.0, reason="overflow"),
        StepRecord(2, 8.0, False, loss=3.0),
        StepRecord(3, 8.0, False, loss=2.0),
        StepRecord(4, 8.0, False, loss=None),
        StepRecord(5, 8.0, True, loss=math.nan, reason="loss"),
        StepRecord(6, 1.0, True, loss=1.0, reason="floor"),
        StepRecord(7, 1.0, True, reason="unknown"),
        StepRecord(8, 1.0, True, loss=math.inf, reason="loss"),
    ],
)


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    pyplot.close("all")


@pytest.fixture
def panels():
    return pyplot.subplots(2, sharex=True)[1]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def line(ax, label):
    (found,) = (line for line in ax.lines if line.get_label().startswith(label))
    return found


def drawn(ax):
    ax.figure.canvas.draw()
    return np.asarray(ax.figure.canvas.buffer_rgba())


def test_the_scale_and_the_skips(panels):
    ax, loss_ax = panels
    assert plot_history(RUN, ax, loss_ax) is ax
    marks = {
        "skipped: gradients overflowed (1)": ([1], [16]),
        "skipped: loss not finite (2)": ([5, 8], [8, 1]),
        "skipped: not finite at the lowest scale (1)": ([6], [1]),
        "skipped: reason not recorded (1)": ([7], [1]),
    }
    assert sorted(legend(ax)) == ["loss scale", *sorted(marks)]
    for label, (steps, scales) in marks.items():
        found = line(ax, label)
        assert (found.get_xdata().tolist(), found.get_ydata().tolist()) == (steps, scales)
        assert found.get_linestyle() == "None"
    assert ax.get_yscale() == "log"
    assert ax.yaxis.get_transform().base == 2
    assert ax.get_ylabel() == "loss scale"
    assert (ax.get_xlabel(), loss_ax.get_xlabel()) == ("", "step")


def test_reasons_differ_without_colour(panels):
    plot_history(RUN, *panels)
    marks = [line for line in panels[0].lines if line.get_linestyle() == "None"]
    assert len({line.get_marker() for line in marks}) == len(SkipReason)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_run_is_drawn_as_every_point_would_be(seed):
    rng = np.random.default_rng(seed)
    steps = np.cumsum(rng.integers(1, 4, 60)).tolist()
    scales = (2.0 ** np.repeat(rng.integers(0, 5, 12), 5)).tolist()
    history = TrainingHistory(
        HEADER, [StepRecord(*pair, False) for pair in zip(steps, scales, strict=True)]
    )
    figure = pyplot.figure()
    few = plot_history(history, figure.subplots())
    few.margins(y=0.05)
    kept = len(few.lines[0].get_xdata())
    assert kept < 40
    picture = drawn(few)
    figure.clear()
    every = plot_scales(scales, None, figure.subplots(), steps=steps)
    every.legend(fontsize="small")
    assert (drawn(every) == picture).all()


def test_the_loss(panels):
    _, loss_ax = panels
    plot_history(RUN, *panels)
    curve = line(loss_ax, "loss")
    assert curve.get_xdata().tolist() == [1, 2, 3, 5, 6, 8]
    np.testing.assert_array_equal(curve.get_ydata(), [4, 3, 2, np.nan, 1, np.nan])
    marks = line(loss_ax, "not finite (2)")
    assert marks.get_xdata().tolist() == [5, 8]
    # At the upper edge, wherever the losses are.
    assert marks.get_transform() == loss_ax.get_xaxis_transform()
    assert 0.9 < marks.get_ydata()[0] < 1
    assert loss_ax.get_ylabel() == "loss"
    assert loss_ax.get_yscale() == "linear"


@pytest.mark.parametrize(
    ("losses", "scale"),
    [
        ([5.0, 0.04], "log"),
        ([5.0, 0.06], "linear"),
        ([5.0, -0.01], "linear"),
        ([1.0, 0.0], "linear"),
    ],
)
def test_a_loss_over_many_decades_has_a_logarithmic_axis(panels, losses, scale):
    run = [StepRecord(step, 8.0, False, loss=loss) for step, loss in enumerate(losses, start=1)]
    plot_history(TrainingHistory(HEADER, run), *panels)
    assert panels[1].get_yscale() == scale


def test_skips_between_the_records_are_said(panels):
    run = [StepRecord(10, 8.0, False, steps_skipped=1), StepRecord(20, 4.0, True, steps_skipped=4)]
    plot_history(TrainingHistory(HEADER, run), *panels)
    assert "skipped between the recorded steps (2)" in legend(panels[0])
    assert "skipped: reason not recorded (1)" in legend(panels[0])


def test_without_axes_there_is_a_figure_with_two_panels():
    ax = plot_history(RUN)
    assert len(ax.figure.axes) == 2
    assert ax.figure.axes[0] is ax
    assert drawn(ax).std() > 0


def test_without_a_loss_there_is_one_panel():
    ax = plot_history(TrainingHistory(HEADER, [StepRecord(1, 8.0, False)]))
    assert ax.figure.axes == [ax]
    assert ax.get_xlabel() == "step"
    assert drawn(ax).std() > 0


def test_an_axes_of_ones_own_gets_the_scale_only():
    _, ax = pyplot.subplots()
    plot_history(RUN, ax)
    assert ax.figure.axes == [ax]
    assert ax.get_xlabel() == "step"


@pytest.mark.parametrize("losses", [[math.nan], [math.nan, math.inf]])
def test_a_run_whose_loss_was_never_finite_is_drawn(losses):
    run = [StepRecord(step, 8.0, False, loss=loss) for step, loss in enumerate(losses, start=1)]
    ax = plot_history(TrainingHistory(HEADER, run))
    assert f"not finite ({len(losses)})" in legend(ax.figure.axes[1])
    assert drawn(ax).std() > 0


def test_steps_must_match_the_scales():
    _, ax = pyplot.subplots()
    with pytest.raises(ValueError, match=r"`scales` and `steps` .* lengths 2 and 1"):
        plot_scales([1.0, 2.0], None, ax, steps=[1])


def test_skips_are_marked_at_the_steps_that_are_given():
    _, ax = pyplot.subplots()
    plot_scales([4.0, 2.0], [True, False], ax, steps=[10, 20])
    assert ax.lines[0].get_xdata().tolist() == [10, 20]
    assert ax.lines[1].get_xdata().tolist() == [10]
