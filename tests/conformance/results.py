"""Which wrappers keep the promises: the table in docs/api/what_runs_where.md, from test results.

As a pytest plugin (`-p conformance.results`) it adds the outcomes of a process to a JSON file that
the environment variable LOSSSCALE_RESULTS names. Run as a program with that file and
pages, it writes the table into the pages.
"""

import collections
import json
import os
import pathlib
import re
import sys

BEGIN, END = "<!-- table: make table -->", "<!-- end of table -->"
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
    lines = ["| wrapper | tests passed | do not apply | failed |", "|---|---|---|---|"]
    for wrapper, counts in results.items():
        passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
        lines.append(f"| {wrapper} | {passed} | {skipped} | {counts.get('failed', 0)} |")
    return "\n".join(lines)


def with_table(page, rows):
    """Returns the text of a page with other rows between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


def main(results, page):
    rows, path = table(json.loads(pathlib.Path(results).read_text())), pathlib.Path(page)
    path.write_text(with_table(path.read_text(), rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
