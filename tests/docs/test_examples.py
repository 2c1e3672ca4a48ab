"""What the README, the docs and examples/ show is run, each program by the tests of its backend."""

import functools
import os
import pathlib
import re
import tempfile

import pytest

from conformance.wrappers import TABLE
from forks import Program
from pages import OF_THE_MACHINE, outputs, programs

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "PACKAGE.md", *sorted((ROOT / "docs").rglob("*.md"))]
# These run in a process without Keras (tests/frameworks/torch/test_documents.py).
RUN_ELSEWHERE = {"from_gradscaler.md", "parallel.md", "trainers.md"}
BLOCKS = [
    (f"{page.name}-{number}", block)
    for page in PAGES
    if page.name not in RUN_ELSEWHERE
    for number, block in enumerate(programs(page), start=1)
]


def backend_of(source):
    """The backend that a program runs on."""
    named = re.search(r"^# KERAS_BACKEND=(\w+)$", source, re.MULTILINE)
    # A program without Keras runs where Keras computes with the same library.
    plain = re.search(r"^import torch$", source, re.MULTILINE) and "keras" not in source
    return named[1] if named else "torch" if plain else "tensorflow"


# Each process of tests/run.py runs the programs of its own backend.
BACKEND = os.environ["KERAS_BACKEND"]
BLOCKS_HERE = {name: block for name, block in BLOCKS if backend_of(block) == BACKEND}
EXAMPLES_HERE = [path for path in EXAMPLES if backend_of(path.read_text()) == BACKEND]

THAT_LOGS = "import logging\nlogging.getLogger('tensorflow').warning('slow')"


RUN = """
import runpy, sys, warnings
# A page must not show a program that warns.
warnings.filterwarnings("error", module="lossscale")
runpy.run_path(sys.argv.pop(), run_name="__main__")
"""


@functools.cache
def output_of(source):
    """What a program prints, which neither fails nor logs anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "program.py")
        path.write_text(source)
        done = Program(RUN, path).finished()
    assert done.returncode == 0, done.stderr
    logged = [line for line in done.stderr.splitlines() if not OF_THE_MACHINE.match(line)]
    assert logged == []
    return done.stdout


def test_a_program_that_logs_is_noticed():
    with pytest.raises(AssertionError, match="slow"):
        output_of(THAT_LOGS)


@pytest.mark.parametrize("name", BLOCKS_HERE)
def test_a_program_on_a_page_runs(name):
    output = output_of(BLOCKS_HERE[name])
    shown = re.search(r"^print\(.*\)  # (.*)$", BLOCKS_HERE[name], re.MULTILINE)
    if shown:
        assert output.strip() == shown[1]
    below = re.search(r"((?:^# .*\n)+)\Z", BLOCKS_HERE[name], re.MULTILINE)
    if below:
        assert output == re.sub("^# ", "", below[1], flags=re.MULTILINE)


def without_measures(report):
    """A report without what rounding and the machine decide: shares and seconds."""
    one_line = " ".join(report.split())
    return re.sub(r"(under )?[\d.]+(%| s\b)", r"N\2", one_line)


PRINTED = [pair for page in PAGES if page.name not in RUN_ELSEWHERE for pair in outputs(page)]


def test_there_is_something_to_run():
    assert {backend_of(block) for _, block in BLOCKS} == {"tensorflow", "jax", "torch"}
    assert len(EXAMPLES) >= 4
    assert len(PRINTED) == 2


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_the_output_on_a_page_is_what_its_program_prints(number):
    source, printed = PRINTED[number]
    if backend_of(source) != BACKEND:
        pytest.skip("another backend's")
    assert without_measures(output_of(source)) == without_measures(printed)


# The last line that each example prints, where it does not depend on the machine's rounding.
LAST_LINES = {
    "diagnose_gan.py": "generator: loss scaling not needed",
    "diagnose_gradients.py": "1024 x 1024 pixels: loss scaling needed",
    "documented_names.py": "2.4: 2.0 at scale 64.0",
    "fit_mixed_float16.py": None,
    "gradient_tape.py": "after minimize: weight 1.0469",
    "monitor_training.py": "overflowed: net/hidden/bias net/hidden/kernel",
    "jax_train_step.py": "32768.0",
    "custom_rule.py": "gradient inf: skipped 3, scale 16384",
}


def test_what_the_readme_shows_is_what_programs_of_the_pages_print():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    # Those have outputs and reports that the tests above compare.
    pages = [
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        for name in ("monitoring", "diagnosis")
    ]
    lines = {line.strip("# ") for page in pages for line in page.splitlines()}
    assert len(shown) == 2
    assert [
        line for block in shown for line in block.splitlines() if line.strip() not in lines
    ] == []


@pytest.mark.parametrize("path", EXAMPLES_HERE, ids=lambda path: path.name)
def test_an_example_runs(path):
    last = output_of(path.read_text()).strip().splitlines()[-1]
    assert last == (LAST_LINES[path.name] or last)


def test_the_table_of_what_runs_where_has_every_wrapper_and_no_failure():
    page = "docs/api/what_runs_where.md"
    rows = re.findall(
        r"^\| (\S+-\S+) \| (\d+) \| \d+ \| (\d+) \|$", (ROOT / page).read_text(), re.M
    )
    assert {name for name, _, _ in rows} == {wrapper.name for wrapper in TABLE}
    assert all(int(passed) > 25 and int(failed) == 0 for _, passed, failed in rows)
