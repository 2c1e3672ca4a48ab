"""Writes the table of docs/api/what_runs_where.md.

`python -m tools.page_tables` runs the promises on each backend, which takes about three
minutes on 2 cores and needs the test environment, and counts the outcomes of each wrapper. It is a
plugin of pytest, too (`-p tools.page_tables`), which adds the outcomes of a process to the JSON
file that the environment variable LOSSSCALE_RESULTS names.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from benchmarks import tables
from benchmarks.pages import insert
from run import JAX, TENSORFLOW, TF_KERAS, TORCH
from tools import ROOT

MARKS = "<!-- table: python -m tools.page_tables -->", "<!-- end of table -->"
TESTS = "tests/conformance/test_promises.py"
_outcomes = collections.defaultdict(collections.Counter)


def pytest_runtest_logreport(report):
    found = re.search(
        r"test_promises\.py::(\w+)\[((?:keras|tf_keras|torch|optax)-[\w.]+-[\w.]+)", report.nodeid
    )
    done = report.when == "call" or (report.when == "setup" and report.outcome == "skipped")
    if found and done:
        _outcomes[found[2]][report.outcome] += 1


def pytest_sessionfinish(session):
    path = os.environ.get("LOSSSCALE_RESULTS")
    if path is None or hasattr(session.config, "workerinput"):
        return
    file = pathlib.Path(path)
    known = json.loads(file.read_text()) if file.exists() else {}
    known.update({wrapper: dict(counts) for wrapper, counts in _outcomes.items()})
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def table(results):
    """Returns the rows of the page, one for each wrapper."""
    kinds = {"passed": "tests passed", "skipped": "do not apply", "failed": "failed"}
    lines = ([name, *(str(n.get(kind, 0)) for kind in kinds)] for name, n in results.items())
    return tables.table(["wrapper", *kinds.values()], lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="2", help="processes at a time (default: 2)")
    arguments = parser.parse_args()
    failed = []
    with tempfile.NamedTemporaryFile("w+", suffix=".json") as file:
        file.write("{}")
        file.flush()
        for environment in (TENSORFLOW, JAX, TORCH, TF_KERAS):
            command = [sys.executable, "-m", "pytest", "-p", "tools.page_tables"]
            command += ["--numprocesses", arguments.jobs, TESTS]
            environment = {**os.environ, **environment, "LOSSSCALE_RESULTS": file.name}
            if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
                failed.append(environment)
        results = json.loads(pathlib.Path(file.name).read_text())
    insert(ROOT / "docs/api/what_runs_where.md", table(results), *MARKS)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
