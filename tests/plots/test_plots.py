"""The drawings, by the data on their axes and by what is written beside them."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from matplotlib import pyplot

from lossscale.plots import plot_scales


@pytest.fixture
def ax():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


@pytest.fixture
def no_figures_left():
    yield
    pyplot.close("all")


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def drawn(ax):
    ax.figure.canvas.draw()
    return np.asarray(ax.figure.canvas.buffer_rgba())


def test_scales_are_drawn_with_their_skipped_steps(ax):
    scales = [16.0, 8.0, 8.0, 16.0]
    assert plot_scales(scales, [True, False, False, True], ax, label="dynamic") is ax
    line, marks = ax.lines
    assert line.get_xdata().tolist() == [1, 2, 3, 4]
    assert line.get_ydata().tolist() == scales
    assert marks.get_xdata().tolist() == [1, 4]
    assert marks.get_ydata().tolist() == [16, 16]
    assert marks.get_linestyle() == "None"
    assert legend(ax) == ["dynamic", "skipped step"]
    assert ax.get_yscale() == "log"
    assert ax.yaxis.get_transform().base == 2
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale")


@pytest.mark.parametrize("skipped", [None, [False, False]])
def test_scales_without_skipped_steps_have_no_marks(ax, skipped):
    plot_scales([4.0, 4.0], skipped, ax)
    assert len(ax.lines) == 1
    assert legend(ax) == ["loss scale"]


def test_scales_and_skipped_steps_must_match(ax):
    with pytest.raises(ValueError, match="lengths 2 and 1"):
        plot_scales([1.0, 2.0], [True], ax)


@pytest.mark.usefixtures("no_figures_left")
@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot_scales([1.0, 2.0]),
    ],
)
def test_without_axes_a_new_figure_is_drawn_on(draw):
    first, second = draw(), draw()
    assert first.figure is not second.figure
    assert drawn(first).std() > 0


def test_a_long_run_is_drawn_by_the_ends_of_its_levels(ax):
    plot_scales([8.0] * 500_000 + [4.0] * 500_000, ax=ax)
    (line,) = ax.lines
    assert line.get_xdata().tolist() == [1, 500_000, 500_001, 1_000_000]
    assert line.get_ydata().tolist() == [8.0, 8.0, 4.0, 4.0]


def test_a_legend_over_many_points_is_put_in_a_corner(ax):
    # Where a search takes over a second, matplotlib warns when the picture is drawn.
    plot_scales([8.0, 4.0] * 20_000, ax=ax)
    ax.figure.canvas.draw()
    box = ax.get_legend().get_window_extent().transformed(ax.transAxes.inverted())
    assert 0.9 < box.x1 <= 1
    assert 0.9 < box.y1 <= 1
