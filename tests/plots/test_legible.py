"""A picture of a run of one step, and names that are too long."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from lossscale.monitoring import StepRecord
from lossscale.plots import plot_history
from lossscale.plots.labels import shortened


@pytest.mark.parametrize("loss", [None, 0.5, float("nan")])
@pytest.mark.parametrize("skipped", [False, True])
def test_a_history_of_one_step_shows_it(loss, skipped):
    record = StepRecord(7, 32768.0, skipped=skipped, loss=loss)
    history = [record]
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
    plot_history(records, ax, loss_ax)
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
