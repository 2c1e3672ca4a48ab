"""`python -m tools.gpu`: its page, and its plumbing on the processor."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import run
from tools import gpu

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "gpu.md"


def test_the_page_has_a_row_for_each_part_which_runs_what_there_is():
    rows = re.findall(r"^\| (.*?) \| ", PAGE.read_text(), re.MULTILINE)
    names = [part.name for part in gpu.PARTS]
    assert [row for row in rows if row in names] == names
    for argument in (argument for part in gpu.PARTS for argument in part.arguments):
        if argument.startswith(("tests/", "examples/")):
            path, _, test = argument.partition("::")
            source = (ROOT / path).read_text()
            assert not test or f"def {test}(" in source


def test_a_gpu_gets_the_tests_that_the_simulated_one_gets():
    given = {a.partition("::")[0] for part in gpu.PARTS for a in part.arguments}
    assert given >= set(run.SIMULATED[1:])


def test_on_the_processor_parts_run_and_say_what_came_of_them(tmp_path):
    page, output = tmp_path / "gpu.md", tmp_path / "gpu.json"
    page.write_text(f"# Page\n{PAGE.read_text()}")
    options = ["--device", "cpu", "--page", page, "--output", output]
    command = [sys.executable, "-m", "tools.gpu", *options, "--only", "CUDA graph"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = "PyTorch: a step in a CUDA graph: not run: it does not apply to this device"
    assert done.stdout == f"[1/1] {said}\n"
    assert "| PyTorch: promises | never run on a GPU |" in page.read_text()
    assert "| PyTorch: a step in a CUDA graph | not run: it does not" in page.read_text()
    [(name, part)] = json.loads(output.read_text())["parts"].items()
    assert (name, part["tests_skipped"]) == ("PyTorch: a step in a CUDA graph", 1)


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "gpus", dict)
    before = PAGE.read_text()
    assert gpu.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("No GPU: torch, jax, tensorflow found in ")
    assert printed.count("\n") == 1
    assert PAGE.read_text() == before


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "never run on a GPU"),
        ({"outcome": "passed"}, "passed"),
        ({"outcome": "failed", "why": "Error: no"}, "failed: Error: no"),
        ({"outcome": "not run", "why": "jax is not installed"}, "not run: jax is not installed"),
        (
            {"outcome": "passed", "tests_passed": 3, "tests_failed": [], "tests_skipped": 2},
            "passed, 3 tests; 2 do not apply",
        ),
        (
            {"outcome": "failed", "tests_passed": 3, "tests_failed": ["b"], "tests_skipped": 2},
            "failed: 1 of 4 tests, such as b",
        ),
    ],
)
def test_an_outcome(found, said):
    assert gpu._outcome(found) == said


def test_what_is_missing_is_the_reason():
    part = next(part for part in gpu.PARTS if part.name == "PyTorch: promises")
    assert gpu.why_not(part, {"torch": "NVIDIA H200"}) == ""
    assert gpu.why_not(part, {"jax": "NVIDIA H200"}) == "this build of torch sees no GPU"


def test_a_report_of_tests():
    printed = "..\nFAILED tests/a.py::b[1] - no\nERROR tests/a.py::d\n1 failed, 1 passed, 1 skipped"
    counted = {"tests_passed": 1, "tests_failed": ["b[1]", "d"], "tests_skipped": 1}
    assert gpu.counted(printed) == counted
    assert gpu.counted("killed") == {"tests_passed": 0, "tests_failed": [], "tests_skipped": 0}
