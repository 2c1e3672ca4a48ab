"""What the README, the docs and examples/ show is run, each program in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from conformance.shells import TABLE

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE), start=1
    )
]


_OF_THE_MACHINE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog"
    r"|[IWE]\d{4} .*(cuda|CUDA|oneDNN|cpu_feature)"
)


def run(source, folder):
    """Runs a program from a file, as AutoGraph needs it, and returns what it prints."""
    backend = re.search(r"^# KERAS_BACKEND=(\w+)$", source, re.MULTILINE)
    environment = {**os.environ, "KERAS_BACKEND": backend[1] if backend else "tensorflow"}
    # A page must not show a program that warns.
    checked = "import warnings\nwarnings.filterwarnings('error', module='lossscale')\n" + source
    path = folder / "program.py"
    path.write_text(checked)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Nor one that logs anything; what TensorFlow says of the machine while it starts aside.
    logged = [line for line in done.stderr.splitlines() if not _OF_THE_MACHINE.match(line)]
    assert logged == []
    return done.stdout


def test_there_is_something_to_run():
    assert len(EXAMPLES) >= 4
    assert len(BLOCKS) >= 7


@pytest.mark.parametrize("source", BLOCKS)
def test_a_program_on_a_page_runs(source, tmp_path):
    shown = re.search(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)
    output = run(source, tmp_path)
    if shown:
        assert output.strip() == shown[1]


# The last line that each example prints, where it does not depend on the machine's rounding.
LAST_LINES = {
    "diagnose_gradients.py": "512 x 512 pixels: loss scaling recommended",
    "documented_names.py": "2.4: 2.0 at scale 64.0",
    "fit_mixed_float16.py": None,
    "gradient_tape.py": "after minimize: weight 1.0469",
    "monitor_training.py": "overflowed: net/hidden/bias net/hidden/kernel",
    "rule_of_your_own.py": "gradient inf: skipped 3, scale 16384",
    "simulate_a_rule.py": "3.47e-04 of all steps is what the default rule can bear",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path):
    last = run(path.read_text(), tmp_path).strip().splitlines()[-1]
    assert LAST_LINES[path.name] in (None, last)


def test_the_documents_name_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} names {target}"


@pytest.mark.parametrize("page", ["README.md", "docs/what_runs_where.md"])
def test_the_table_of_what_runs_where_has_every_shell_and_no_failure(page):
    rows = re.findall(
        r"^\| (\S+-\S+) \| (\d+) \| \d+ \| (\d+) \|$", (ROOT / page).read_text(), re.M
    )
    assert {name for name, _, _ in rows} == {shell.name for shell in TABLE}
    assert all(int(passed) > 50 and int(failed) == 0 for _, passed, failed in rows)
