"""What the demo says while it works."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lossscale.demo import progress
from lossscale.demo.experiment import RECIPES, Run


def screen(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, highlight=False)


def show_four_epochs(console):
    with progress.training(console, RECIPES, 4) as show:
        for recipe in RECIPES:
            run = Run(recipe)
            for epoch in range(4):
                run.accuracy.append(epoch / 4)
                show(run)
    return console.file.getvalue()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass with each look at the clock."""
    ticks = {"now": 0.0, "seconds": 0.0}

    def monotonic():
        ticks["now"] += ticks["seconds"]
        return ticks["now"]

    monkeypatch.setattr(progress.time, "monotonic", monotonic)
    return ticks


def test_without_a_terminal_each_run_has_a_line_for_its_first_and_last_epoch(clock):
    lines = show_four_epochs(screen(terminal=False)).splitlines()
    assert lines[:2] == [
        "float32              epoch 1/4  test accuracy   0.0%",
        "float32              epoch 4/4  test accuracy  75.0%",
    ]
    assert len(lines) == 2 * len(RECIPES)


def test_slow_epochs_have_a_line_each(clock):
    clock["seconds"] = 2.5
    assert len(show_four_epochs(screen(terminal=False)).splitlines()) == 4 * len(RECIPES)


def test_lines_have_no_escapes_and_come_before_the_work():
    console = screen(terminal=False)
    with progress.waiting(console, "Importing Keras"):
        assert console.file.getvalue() == "Importing Keras ...\n"
    assert "\x1b" not in console.file.getvalue() + show_four_epochs(console)


def test_a_terminal_gets_bars_for_all_runs_from_the_start():
    console = screen(terminal=True)
    with progress.training(console, RECIPES, 4):
        pass
    shown = console.file.getvalue()
    assert all(recipe.name in shown for recipe in RECIPES)
    assert "epoch 0/4" in shown
