"""The trainings beside the verdicts: a contradiction is found, and the page has those known."""

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


def test_the_page_names_each_wrong_verdict_and_names_are_unique():
    page = (pathlib.Path(__file__).parents[2] / "docs/internals/results.md").read_text()
    wrong = [name for names in command.KNOWN_WRONG.values() for name in names]
    assert all(f'"{name}"' in page for name in wrong)
    assert len(wrong) <= 2
    names = [task.name for task in keras_models.TASKS]
    assert len(set(names)) == len(names) >= 20
