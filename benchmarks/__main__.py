"""Measures the cost of loss scaling, relative to the inner optimizer alone, and of other classes.

Each backend runs in its own process, where all methods of a row are interleaved, round by round.
Results go to a JSON file, tables to the standard output. docs/internals/benchmarks.md explains the
cases, the modes and the methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import machine, tables, worker
from benchmarks.rows import ALL_MODES, BACKENDS, CASES, Process

OUTPUT = pathlib.Path("build", "bench", "results.json")
_LISTS = ("rows", "not_run", "wrong")


def main(command_line: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit status."""
    options = _parser().parse_args(command_line)
    common = options.case, options.mode, options.quick, options.rounds, options.device
    processes = [Process(backend, *common) for backend in options.backend]
    processes = [process for process in processes if process.rows((options.device or "cpu",))]
    if not processes:
        names = ", ".join([*options.backend, *options.case, *options.mode])
        print(f"error: nothing runs with {names} together", file=sys.stderr)
        return 2
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {**machine.describe(), "gpus": {}},
        "versions": machine.versions(),
        "options": {name: value for name, value in vars(options).items() if name != "output"},
        **{name: [] for name in _LISTS},
    }
    failed: list[str] = []
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for process in processes:
        part, message = _run(process)
        results["machine"]["gpus"].update(part.get("gpus", {}))
        for name in _LISTS:
            results[name] += part.get(name, [])
        failed += [message] if message else []
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(tables.page(results))
    for message in [*failed, *results["wrong"]]:
        print(f"error: {message}", file=sys.stderr)
    return 1 if failed or results["wrong"] else 0


def _run(process: Process) -> tuple[dict[str, Any], str]:
    """Returns the results and the failures of a process."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "part.json")
        fields = json.dumps(dataclasses.asdict(process))
        command = [sys.executable, "-m", "benchmarks.worker", fields, str(output)]
        # Files that it leaves behind are removed with the folder.
        environment = {**os.environ, "TMPDIR": folder, **worker.environment(process)}
        status = subprocess.run(command, env=environment, check=False).returncode
        part = json.loads(output.read_text()) if output.exists() else {}
    ended = f"{process.backend} ended with status {status}, see above"
    return part, ended if status else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    for kind, known in (("backend", BACKENDS), ("case", CASES), ("mode", ALL_MODES)):
        parser.add_argument(
            f"--{kind}", nargs="+", choices=known, default=list(known), help="all by default"
        )
    rounds = "how many rounds of each row are timed; by default as many as fit in some seconds"
    parser.add_argument("--rounds", type=int, help=rounds)
    device = "the kind of device to measure on; all that a backend has by default"
    parser.add_argument("--device", choices=("cpu", "gpu"), default="", help=device)
    quick = "tiny workloads, to see that everything runs; the times mean nothing"
    parser.add_argument("--quick", action="store_true", help=quick)
    output = "the JSON file to write; %(default)s by default"
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, help=output)
    return parser


if __name__ == "__main__":
    sys.exit(main())
