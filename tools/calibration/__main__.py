"""Is the verdict of a diagnosis right? `python -m tools.calibration` trains beside it.

Each model is asked for its verdict, and then trained in float32 and in float16: without loss
scaling, with `DynamicScale()` and with the rule that was advised. The status is 1 if a training
contradicts a verdict that `KNOWN_WRONG` does not name, or none that it names. It takes some minutes
for each backend and needs the test environment; KERAS_BACKEND selects the backend, `--library jax`
the models of JAX. `--page docs/internals/calibration.md` writes the table between the markers of
that page.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import tables
from benchmarks.pages import insert
from tools.calibration.outcomes import WAYS, regret

KNOWN_WRONG = {"JAX": ("regression, targets x 1e5",)}
"""The models whose verdict is wrong, by the title of their table; docs/internals/calibration.md
has the reasons."""


def main(command_line: list[str] | None = None) -> int:
    """Runs the training runs; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.calibration", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--library", choices=("keras", "jax"), default="keras")
    parser.add_argument("--page", type=pathlib.Path, help="a page to write the table into")
    options = parser.parse_args(command_line)
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    models = importlib.import_module(f"tools.calibration.{options.library}_models")
    rows = []
    print(table([]), flush=True)
    for task in models.TASKS:
        if options.only in task.name:
            rows.append(models.run(task))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    what = "JAX" if options.library == "jax" else f"Keras on {os.environ['KERAS_BACKEND']}"
    wrong = {row["task"] for row in rows if row["wrong"] == "WRONG"}
    known = {name for name in KNOWN_WRONG.get(what, ()) if options.only in name}
    alarms = sum(row["wrong"] == "alarm" for row in rows)
    said = f"{len(rows)} models: {len(wrong)} wrong, {alarms} scales that were not needed."
    print(f"\n{said}")
    if options.page is not None:
        marks = f"<!-- {what}: python -m tools.calibration -->", f"<!-- end of {what} -->"
        insert(options.page, f"\n{table(rows)}\n\n{said}\n", *marks)
    for name in sorted(wrong ^ known):
        found = "the training contradicts" if name in wrong else "no training contradicts"
        print(f"error: {name}: {found} the verdict", file=sys.stderr)
    return 1 if wrong ^ known else 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table: of what float32 gains, the share that each way loses."""
    heads = ("model", "verdict", "first and lowest scale", *WAYS, "")
    lines = []
    for row in rows:
        rule = row["rule"]
        scales = "-"
        if rule is not None:
            first, lowest = (math.log2(scale) for scale in (rule.initial_scale, rule.min_scale))
            scales = f"2\\*\\*{first:.0f}, min 2\\*\\*{lowest:.0f}"
        shares = [_share(regret(row, way)) if way in row else "-" for way in WAYS]
        name = row["task"].replace("**", "\\*\\*")
        lines.append([name, row["verdict"], scales, *shares, row["wrong"]])
    return tables.table(heads, lines)


def _share(lost: float) -> str:
    # Rounded first, so that there is no -0.0.
    return "fails" if math.isinf(lost) else f"{round(100 * lost, 1) + 0.0:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
