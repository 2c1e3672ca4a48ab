"""`python -m tools.gpu`: its page, and its plumbing on the CPU."""

import json
import pathlib
import re

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


def test_on_the_processor_parts_run_and_say_what_came_of_them(tmp_path, capsys):
    page, output = tmp_path / "gpu.md", tmp_path / "gpu.json"
    page.write_text(f"# Page\n{PAGE.read_text()}")
    options = ["--device", "cpu", "--page", str(page), "--output", str(output)]
    assert gpu.main([*options, "--only", "replayed steps"]) == 0
    part = "PyTorch: replayed steps, streams and threads"
    said = f"{part}: not run: it does not apply to this device"
    assert capsys.readouterr().out == f"[1/1] {said}\n"
    assert "| PyTorch: promises | never run on a GPU |" in page.read_text()
    assert f"| {part} | not run: it does not" in page.read_text()
    [(name, found)] = json.loads(output.read_text())["parts"].items()
    assert (name, found["tests_skipped"] > 50) == (part, True)
