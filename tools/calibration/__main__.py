"""Is the verdict of a diagnosis right? `python -m tools.calibration` trains beside it.

Each model is asked for its verdict, and then trained in float32 and in float16: without loss
scaling, with `DynamicScale()` and with the rule that was advised. The status is 1 if a training
contradicts a verdict that `KNOWN_WRONG` does not name, or none that it names. It takes some minutes
for each backend and needs the test environment; KERAS_BACKEND selects the backend, `--library jax`
the models of JAX. `--write` puts the rows into tools/calibration/results.json, of which
`python -m benchmarks.pages` makes a table.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from typing import Any

from benchmarks import pages, tables
from tools.calibration.outcomes import WAYS, regret

KNOWN_WRONG = {"JAX": ("regression, targets x 1e5",)}
"""The models whose verdict is wrong, by the title of their table; docs/internals/results.md
has the reason."""


def main(command_line: list[str] | None = None) -> int:
    """Runs the training runs; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.calibration", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--library", choices=("keras", "jax"), default="keras")
    parser.add_argument("--write", action="store_true", help="write tools/calibration/results.json")
    options = parser.parse_args(command_line)
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    models = importlib.import_module(f"tools.calibration.{options.library}_models")
    rows = []
    for task in models.TASKS:
        if options.only in task.name:
            rows.append(models.run(task))
            lines = tables.markdown([shown(rows[-1])]).splitlines()
            print(*lines[2 * (len(rows) > 1) :], sep="\n", flush=True)
    what = "JAX" if options.library == "jax" else f"Keras on {os.environ['KERAS_BACKEND']}"
    wrong = {row["task"] for row in rows if row["wrong"] == "WRONG"}
    known = {name for name in KNOWN_WRONG.get(what, ()) if options.only in name}
    alarms = sum(row["wrong"] == "alarm" for row in rows)
    said = f"{len(rows)} models: {len(wrong)} wrong, {alarms} scales that were not needed."
    print(f"\n{said}")
    if options.write:
        pages.write(pages.CALIBRATION, {what: [shown(row) for row in rows]})
    for name in sorted(wrong ^ known):
        found = "the training contradicts" if name in wrong else "no training contradicts"
        print(f"error: {name}: {found} the verdict", file=sys.stderr)
    return 1 if wrong ^ known else 0


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Returns a row of the table: the share of what float32 gains that each way loses."""
    scales = "-"
    if row["rule"] is not None:
        limits = (row["rule"].initial_scale, row["rule"].min_scale)
        first, lowest = (math.log2(scale) for scale in limits)
        scales = f"2**{first:.0f}, min 2**{lowest:.0f}"
    shares = {way: _share(regret(row, way)) if way in row else "-" for way in WAYS}
    found = {"model": row["task"], "verdict": row["verdict"], "first and lowest scale": scales}
    return {**found, **shares, "wrong": row["wrong"]}


def _share(lost: float) -> str:
    # Rounded first, so that there is no -0.0.
    return "fails" if math.isinf(lost) else f"{round(100 * lost, 1) + 0.0:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
