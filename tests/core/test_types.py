"""The frameworks' types are read: mypy, set as for this library, refuses what is false of them.

If the modules of a framework were skipped, all that it has would be Any, and nothing be refused.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
FALSE = pathlib.Path(__file__).with_name("false_types.py")


def test_false_annotations_are_refused():
    # With the cache of `make types`, which has read the frameworks.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(FALSE)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    refused = {int(line) for line in re.findall(r"false_types.py:(\d+): error", ran.stdout)}
    lines = FALSE.read_text(encoding="utf-8").splitlines()
    wanted = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert len(wanted) > 20
    assert refused == wanted, ran.stdout + ran.stderr
