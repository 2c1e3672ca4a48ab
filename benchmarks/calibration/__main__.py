"""Is the verdict of a diagnosis right? `python -m benchmarks.calibration`.

Each training is asked for its verdict, and then run in float32 and in float16: without loss
scaling, at the recommended scale and with a dynamic one. The status is 1 if the results contradict
a verdict: if one that requires scaling trains without, or one that does not need it fails, or
the recommended scale does not train. It takes about ten minutes of one core.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

BEGIN, END = "<!-- calibration: make calibration -->", "<!-- end of calibration -->"


def main(command_line: list[str] | None = None) -> int:
    """Runs the trainings; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", help="trainings whose name has this in it")
    parser.add_argument("--steps", type=int, help="steps of each training, to try it out")
    parser.add_argument("--page", type=pathlib.Path, help="the page to write the table into")
    options = parser.parse_args(command_line)
    # PyTorch rounds to float16 after each operation. A compiler may keep float32 between two.
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from benchmarks import pages
    from benchmarks.calibration import training
    from benchmarks.calibration.table import contradictions, table
    from benchmarks.calibration.tasks import TASKS

    rows = []
    for task in (task for task in TASKS if options.only in task.name):
        for outputs in task.outputs:
            rows.append(training.run(task, outputs, options.steps))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    if not rows:
        print(f"error: no training has {options.only!r} in its name", file=sys.stderr)
        return 2
    print(f"\n{table(rows)}")
    if options.page is not None:
        pages.insert(options.page, table(rows), BEGIN, END)
    found = contradictions(rows)
    for sentence in found:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
