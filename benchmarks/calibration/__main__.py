"""Is the verdict of a diagnosis right? `python -m benchmarks.calibration`.

Each model is asked for its verdict, and then trained in float32 and in float16: without loss
scaling, with `DynamicScale()` and with the rule that was advised. The status is 1 if a training
contradicts a verdict. It takes some minutes for each backend.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.calibration.outcomes import WAYS, regret


def main(command_line: list[str] | None = None) -> int:
    """Runs the trainings; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--library", choices=("keras", "jax"), default="keras")
    options = parser.parse_args(command_line)
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    models = importlib.import_module(f"benchmarks.calibration.{options.library}_models")
    rows = []
    print(table([]), flush=True)
    for task in models.TASKS:
        if options.only in task.name:
            rows.append(models.run(task))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    wrong = [row["task"] for row in rows if row["wrong"] == "WRONG"]
    alarms = sum(row["wrong"] == "alarm" for row in rows)
    print(f"\n{len(rows)} models: {len(wrong)} wrong, {alarms} scales that were not needed")
    for name in wrong:
        print(f"error: {name}: the training contradicts the verdict", file=sys.stderr)
    return 1 if wrong else 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table: of what float32 gains, the share that each way loses."""
    heads = ("model", "verdict", "rule", *WAYS, "")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        rule = row["rule"]
        scales = "-" if rule is None else f"{rule.initial_scale:.4g}, min {rule.min_scale:.4g}"
        shares = [f"{regret(row, way):+.1%}" if way in row else "-" for way in WAYS]
        cells = (row["task"], row["verdict"], scales, *shares, row["wrong"])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
