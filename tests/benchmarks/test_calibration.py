"""The trainings beside the verdicts: that they run, and that a contradiction is found."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.calibration import __main__ as command
from benchmarks.calibration import tasks
from benchmarks.calibration.table import contradictions, fails, table
from benchmarks.calibration.training import Outcome, Row


def row(verdict="required", unscaled=0.1, recommended=0.9, dynamic=0.9, scale=8.0):
    outcomes = {
        "float32": Outcome(0.9, 0),
        "without scaling": Outcome(unscaled, 0),
        "recommended scale": Outcome(recommended, 0),
        "dynamic scale": Outcome(dynamic, 3),
    }
    accuracy = "sparse_categorical_accuracy"
    return Row("digits", 2**20, accuracy, 0.02, True, verdict, scale, 0.1, outcomes)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (row(), None),
        (row("recommended"), None),
        (row("recommended", unscaled=0.9), None),
        (row("not needed", unscaled=0.89), None),
        (row(unscaled=0.9), "required, but it trains without"),
        (row("not needed"), "not needed, but it fails"),
        (row(recommended=0.5), "fails with the recommended scale"),
        (row(dynamic=math.nan), "fails with the dynamic scale"),
        (row("unknown", scale=None), "unknown, with no scale"),
    ],
)
def test_what_contradicts_a_verdict_is_named(found, said):
    sentences = contradictions([found])
    assert len(sentences) == (said is not None)
    assert all(said in sentence for sentence in sentences)


def test_less_is_better_of_an_error():
    found = row()._replace(quality="mean_squared_error", higher_is_better=False)
    assert not fails(found, "without scaling")
    assert fails(found._replace(outcomes={**found.outcomes, "x": Outcome(1.0, 0)}), "x")


def test_the_table_marks_what_fails():
    line = table([row()]).splitlines()[-1]
    assert "| digits | 2**20 | required | accuracy | 90.0% | **10.0%** | 90.0% (8) |" in line


def test_a_training_runs_and_lands_in_a_page(tmp_path, capsys, monkeypatch):
    shortened = [dataclasses.replace(task, outputs=task.outputs[:1]) for task in tasks.TASKS]
    monkeypatch.setattr(tasks, "TASKS", shortened)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{command.BEGIN}\n{command.END}\nafter\n")
    # Too few steps to learn anything, so what they say is not looked at.
    command.main(["--only", "topics", "--steps", "1", "--page", str(page)])
    written = page.read_text()
    assert written.startswith("before")
    assert written.endswith("after\n")
    assert written.count("| topics of 32 words") == 1
    assert command.main(["--only", "nothing"]) == 2
    assert "no training has 'nothing'" in capsys.readouterr().err
