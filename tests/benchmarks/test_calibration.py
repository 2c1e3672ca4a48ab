"""The trainings beside the verdicts: that they run, and that a contradiction is found."""

import dataclasses
import math
import pathlib

import pytest

from tools.calibration import __main__ as command
from tools.calibration import keras_models
from tools.calibration.outcomes import contradiction


@pytest.mark.parametrize(
    ("verdict", "unscaled", "default", "advised", "said"),
    [
        ("not needed", 0.2, 0.2, None, ""),
        ("not needed", 0.9, 0.2, None, "WRONG"),
        ("not needed", math.nan, 0.2, None, "WRONG"),
        ("needed", 0.9, 0.9, 0.2, ""),
        ("needed", 0.2, 0.2, 0.2, "alarm"),
        ("needed", 0.9, 0.2, 0.9, "WRONG"),
        ("cannot help", math.nan, math.nan, None, ""),
        ("cannot help", 0.9, 0.2, None, "WRONG"),
        ("no single scale", 0.2, 0.9, None, "WRONG"),
        ("unknown", None, None, None, ""),
    ],
)
def test_a_contradiction_is_found(verdict, unscaled, default, advised, said):
    row = {"verdict": verdict, "float32": 0.2, "untrained": 1.2}
    ways = {"unscaled": unscaled, "default": default, "advised": advised}
    row |= {way: quality for way, quality in ways.items() if quality is not None}
    assert contradiction(row) == said


def test_the_command_runs_one(monkeypatch, capsys, tmp_path):
    short = tuple(dataclasses.replace(task, steps=12) for task in keras_models.TASKS[:3])
    monkeypatch.setattr(keras_models, "TASKS", short)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    page = tmp_path / "page.md"
    marks = "<!-- Keras on torch: python -m tools.calibration -->", "<!-- end of Keras on torch -->"
    page.write_text(f"# Verdicts\n{marks[0]}\nold\n{marks[1]}\nmore\n")
    status = command.main(["--only", "2**20", "--page", str(page)])
    out, written = capsys.readouterr().out, page.read_text()
    for text in (out, written):
        assert "| digits, dense, loss / 2\\*\\*20 | needed | 2\\*\\*" in text
    assert "old" not in written
    assert written.startswith("# Verdicts\n<!--")
    assert written.endswith("-->\nmore\n")
    assert "1 models:" in out
    assert status in (0, 1)


def test_the_page_names_each_wrong_verdict_and_names_are_unique():
    page = (pathlib.Path(__file__).parents[2] / "docs/internals/calibration.md").read_text()
    wrong = [name for names in command.KNOWN_WRONG.values() for name in names]
    assert all(f'"{name}"' in page.partition("<!--")[0] for name in wrong)
    assert len(wrong) <= 2
    names = [task.name for task in keras_models.TASKS]
    assert len(set(names)) == len(names) >= 20
