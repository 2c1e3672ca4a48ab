"""`python -m tools.gpu`: its rows, and its plumbing on the CPU."""

import json
import pathlib

import run
from benchmarks import pages
from tools import gpu

ROOT = pathlib.Path(__file__).parents[2]


def test_each_part_has_a_row_and_runs_what_there_is():
    rows = [row["part"] for row in pages.read(pages.ON_A_GPU)["Outcomes"]]
    assert rows == [part.name for part in gpu.PARTS]
    for argument in (argument for part in gpu.PARTS for argument in part.arguments):
        if argument.startswith(("tests/", "examples/")):
            path, _, test = argument.partition("::")
            source = (ROOT / path).read_text()
            assert not test or f"def {test}(" in source


def test_a_gpu_gets_the_tests_that_the_simulated_one_gets():
    given = {a.partition("::")[0] for part in gpu.PARTS for a in part.arguments}
    assert given >= set(run.SIMULATED[1:])


def test_on_the_processor_parts_run_and_say_what_came_of_them(tmp_path, capsys):
    tables, output = tmp_path / "tables.json", tmp_path / "gpu.json"
    options = ["--device", "cpu", "--tables", str(tables), "--output", str(output)]
    assert gpu.main([*options, "--only", "replayed steps"]) == 0
    part = "PyTorch: replayed steps, streams and threads"
    said = f"{part}: not run: it does not apply to this device"
    assert capsys.readouterr().out == f"[1/1] {said}\n"
    outcomes = {row["part"]: row["outcome"] for row in pages.read(tables)["Outcomes"]}
    assert outcomes["PyTorch: promises"] == "never run on a GPU"
    assert outcomes[part] == said.removeprefix(f"{part}: ")
    [(name, found)] = json.loads(output.read_text())["parts"].items()
    assert (name, found["tests_skipped"] > 50) == (part, True)
