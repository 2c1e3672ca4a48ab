"""The framework of two pages of docs, added to a copy of the sources as the pages say."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from core import test_import
from core.source_tree import PACKAGE, imports

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "internals"
PAGE = "\n".join(
    (DOCS / name).read_text(encoding="utf-8")
    for name in ("add_a_framework.md", "add_a_diagnosis.md")
)
# By what the first line says that each is.
BLOCKS = dict(re.findall(r"```python\n# ([^\n]*)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the sources with the files and the row of the page."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, copy / "src/lossscale", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in BLOCKS.items():
        if ":" not in name:
            (copy / name).parent.mkdir(exist_ok=True)
            (copy / name).write_text(text)
    registry = copy / "src/lossscale/registry.py"
    before, start, after = registry.read_text().partition("FRAMEWORKS = (\n")
    assert start
    row = BLOCKS["src/lossscale/registry.py: a row of FRAMEWORKS"]
    registry.write_text(f"{before}{start}{row}{after}")
    return copy


def run(sources, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(sources / "src"), str(sources)])},
        cwd=sources,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("program", "said"), [("train.py", "It prints"), ("diagnose.py", "The program prints")]
)
def test_a_program_prints_what_the_page_says(sources, program, said):
    done = run(sources, program)
    [printed] = re.findall(said + r"\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert (done.stdout, done.returncode) == (printed, 0), done.stderr


def test_its_arrow_allows_all_that_it_imports(sources, monkeypatch):
    entry = BLOCKS["tests/core/test_import.py: an entry of ARROWS"]
    [(part, allowed)] = re.findall(r'"(.*?)": "(.*?)",', entry)
    monkeypatch.setitem(test_import.ARROWS, part, allowed)
    used = set()
    for path in (sources / "src/lossscale" / part).glob("*.py"):
        name = f"lossscale.{part}.{path.stem}".removesuffix(".__init__")
        assert test_import.violations(name, path.read_text()) == []
        used |= {test_import.part_of(one.name) for one in imports(path.read_text())}
    assert set(allowed.split()) <= used
