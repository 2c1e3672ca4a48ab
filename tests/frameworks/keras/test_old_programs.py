"""Programs of the years of TensorFlow 2.2 to 2.11 run unedited on Keras 3; two CPUs are virtual."""

import pathlib
import re

import pytest

import old_programs

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "training_loops.md"


@pytest.fixture(autouse=True)
def _two_replicas(monkeypatch, two_replicas):
    old_programs.on_two_replicas(monkeypatch, two_replicas)


def test_the_programs_are_found():
    assert len(old_programs.PROGRAMS) >= 6


@pytest.mark.filterwarnings(old_programs.IGNORED_WARNINGS)
@old_programs.every_program
def test_an_old_program_learns(name, caplog, capsys):
    old_programs.run(name, caplog, capsys)


def the_loop_on_the_page():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if "MirroredStrategy()" in block]
    return found


def test_the_loop_on_the_page_runs_on_two_replicas():
    namespace = {}
    exec(the_loop_on_the_page(), namespace)
    assert namespace["strategy"].num_replicas_in_sync == 2
    assert namespace["optimizer"].inner_optimizer.iterations.numpy() == 2
