"""What the README, the docs and examples/ show is run, in one interpreter for each backend."""

import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest

from conformance.shells import TABLE

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Their programs run in a process without Keras: tests/frameworks/torch/test_pages.py.
PAGES_OF_TORCH = {"from_gradscaler.md", "pytorch_trainers.md"}
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name not in PAGES_OF_TORCH
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE), start=1
    )
]


class Interpreters:
    """One process for each backend, which runs all its programs (tests/docs/interpreter.py)."""

    def __init__(self):
        self.processes = {}

    def run(self, source):
        """Returns what a program prints."""
        named = re.search(r"^# KERAS_BACKEND=(\w+)$", source, re.MULTILINE)
        # A program without Keras runs where Keras computes with the same library.
        plain = re.search(r"^import torch$", source, re.MULTILINE) and "keras" not in source
        process = self.of(named[1] if named else "torch" if plain else "tensorflow")
        impatience = threading.Timer(300, process.kill)
        impatience.start()
        try:
            process.stdin.write(json.dumps(source) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            impatience.cancel()
        assert line, "The program took too long, or ended its interpreter."
        outcome = json.loads(line)
        assert outcome["error"] is None, outcome["error"]
        # Nor must a page show a program that logs anything.
        assert outcome["logged"] == []
        return outcome["printed"]

    def of(self, backend):
        if backend not in self.processes or self.processes[backend].poll() is not None:
            self.processes[backend] = subprocess.Popen(
                [sys.executable, str(pathlib.Path(__file__).with_name("interpreter.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "KERAS_BACKEND": backend},
            )
        return self.processes[backend]

    def close(self):
        for process in self.processes.values():
            process.communicate()


@pytest.fixture(scope="module")
def interpreters():
    made = Interpreters()
    yield made
    made.close()


def test_a_program_that_logs_is_noticed(interpreters):
    with pytest.raises(AssertionError, match="slow"):
        interpreters.run("import logging\nlogging.getLogger('tensorflow').warning('slow')")


def test_there_is_something_to_run():
    assert len(EXAMPLES) >= 4
    assert len(BLOCKS) >= 7


@pytest.mark.parametrize("source", BLOCKS)
def test_a_program_on_a_page_runs(interpreters, source):
    shown = re.search(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)
    output = interpreters.run(source)
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
def test_an_example_runs(interpreters, path):
    last = interpreters.run(path.read_text()).strip().splitlines()[-1]
    assert last == (LAST_LINES[path.name] or last)


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
    assert all(int(passed) > 25 and int(failed) == 0 for _, passed, failed in rows)
