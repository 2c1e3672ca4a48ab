"""Measures what loss scaling costs, beside the inner optimizer alone and beside Keras' own class.

Each backend runs in a process of its own, and within it all methods of a row take turns, round by
round. Results go to a JSON file, tables to the standard output.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from benchmarks import machine, plan, tables, worker
from benchmarks.methods import METHODS
from benchmarks.plan import Process

_LISTS = ("rows", "collectives", "host_syncs", "not_run", "wrong")


def main(command_line: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit status."""
    options = _parser().parse_args(command_line)
    processes = plan.processes(options.backend, options.case, options.mode, options.quick)
    if not processes:
        asked = [*options.backend, *options.case, *options.mode]
        print(f"error: nothing runs with {', '.join(asked)} together", file=sys.stderr)
        return 2
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {**machine.describe(), "gpus": {}},
        "versions": {},
        "options": {
            "backends": options.backend,
            "cases": options.case,
            "modes": options.mode,
            "rounds": options.rounds,
            "quick": options.quick,
        },
        "measured_by": {},
        **{name: [] for name in _LISTS},
    }
    failed: list[str] = []
    options.output.parent.mkdir(parents=True, exist_ok=True)
    # Nobody looks at the times of the short form, so that there processes may disturb each other.
    at_once = 2 if options.quick else 1
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for part, message in pool.map(lambda process: _run(process, options), processes):
            results["versions"].update(part.get("versions", {}))
            results["measured_by"].update(part.get("measured_by", {}))
            results["machine"]["gpus"].update(part.get("gpus", {}))
            for name in _LISTS:
                known = results[name]
                known += [found for found in part.get(name, []) if found not in known]
            if message:
                failed.append(message)
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(tables.page(results))
    for message in [*failed, *results["wrong"]]:
        print(f"error: {message}", file=sys.stderr)
    return 1 if failed or results["wrong"] else 0


def _run(process: Process, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Returns what a process measured, and what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "part.json")
        command = [sys.executable, "-m", "benchmarks.worker"]
        command += worker.arguments(process, options.rounds, options.quick, output)
        environment = {**os.environ, **worker.environment(process, options.quick)}
        status = subprocess.run(command, env=environment, check=False).returncode
        part = json.loads(output.read_text()) if output.exists() else {}
    name = f"{process.backend} on {process.devices} devices"
    return part, f"{name} ended with status {status}, see above" if status else ""


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=_listed("cases", plan.CASES)
        + _listed("methods", {one.title: one.meaning for one in METHODS.values()}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for kind, known in (
        ("backend", plan.BACKENDS),
        ("case", list(plan.CASES)),
        ("mode", plan.ALL_MODES),
    ):
        parser.add_argument(
            f"--{kind}",
            type=functools.partial(_names, kind, known),
            default=list(known),
            metavar="NAMES",
            help=f"some of {','.join(known)}; all by default",
        )
    parser.add_argument(
        "--rounds",
        type=_positive,
        help="how many rounds of each row are timed; by default as many as fit in a few seconds",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny workloads, to see that everything runs; the times mean nothing",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("build", "bench", "results.json"),
        help="the JSON file to write; %(default)s by default",
    )
    return parser


def _listed(title: str, entries: dict[str, str]) -> str:
    lines = [f"{title}:"]
    for name, meaning in entries.items():
        lines += textwrap.wrap(
            meaning, 98, initial_indent=f"  {name:16}", subsequent_indent=" " * 18
        )
    return "\n".join(lines) + "\n\n"


def _names(kind: str, known: Sequence[str], text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"there is no {kind} {name!r}; there are {', '.join(known)}"
            )
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
