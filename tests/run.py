"""Runs the tests of every backend: several processes at a time, the longest first.

Keras fixes its backend when it is imported, so each backend needs processes of its own. One queue
for all of them keeps every core busy to the end. Of a job that passes the last lines are shown, of
one that fails everything; the status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).parents[1]

TENSORFLOW = {"KERAS_BACKEND": "tensorflow"}
TF_KERAS = {**TENSORFLOW, "LOSSSCALE_TEST_KERAS": "tf_keras"}
JAX = {"KERAS_BACKEND": "jax"}
TORCH = {"KERAS_BACKEND": "torch"}

# What runs the programs of its own backend, in forks of a process that `tests/backends` has forks
# of as well.
PROGRAMS = ("tests/docs", "tests/benchmarks/test_command.py")
# What the TensorFlow process runs in parts; one more job takes all that is in none of them.
# Each process imports its framework anew, which takes as long as many tests.
PARTS = (
    ("tests/conformance", "tests/backends", *PROGRAMS),
    ("tests/frameworks/keras", "tests/documents"),
    ("tests/migration", "tests/cli"),
)
# XLA's newer emitters take a third of the time of whatever is compiled once. Here that is much, and
# the older ones serve; tests/frameworks/keras has XLA as users have it.
EMITTERS = {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
# These run in processes that never import Keras, which a test in each shows.
WITHOUT_KERAS = ("tests/frameworks/jax", "tests/frameworks/torch")


@dataclasses.dataclass(frozen=True)
class Job:
    """A process of pytest.

    Attributes:
        name: For the reader.
        environment: What selects the backend.
        arguments: What pytest runs.
    """

    name: str
    environment: dict[str, str]
    arguments: tuple[str, ...]


def _part(paths: tuple[str, ...], **environment: str) -> Job:
    return Job(f"tensorflow {' '.join(paths)}", {**TENSORFLOW, **environment}, paths)


_IN_PARTS = [*(path for part in PARTS for path in part), *WITHOUT_KERAS]
_REST = Job(
    "tensorflow, all else", TENSORFLOW, ("tests", *(f"--ignore={path}" for path in _IN_PARTS))
)
_TF_KERAS = Job(
    "tf_keras", TF_KERAS, ("tests/conformance", "tests/frameworks/tf_keras", *PROGRAMS[1:])
)
_JAX = Job("jax", JAX, ("tests/conformance", "tests/backends", *PROGRAMS))
_JAX_ALONE = Job("jax without Keras", JAX, WITHOUT_KERAS[:1])
_TORCH_ALONE = Job("torch without Keras", TORCH, WITHOUT_KERAS[1:])
_TORCH = Job("torch", TORCH, ("tests/conformance", "tests/backends", *PROGRAMS))

# By the time they take, longest first: what starts last is then short, and no core waits for long.
ALL = (
    _TF_KERAS,
    _part(PARTS[0], **EMITTERS),
    _JAX,
    _part(PARTS[2]),
    _part(PARTS[1]),
    _REST,
    _JAX_ALONE,
    _TORCH_ALONE,
    _TORCH,
)
QUICK = (
    Job("torch tests/conformance", TORCH, ("tests/conformance",)),
    Job("tests/core", TENSORFLOW, ("tests/core",)),
)


def run(job: Job, shared: str) -> tuple[int, str, float]:
    """Returns a job's exit status, what it printed, and the seconds that it took.

    Args:
        job: What is run.
        shared: A folder for what one job makes and others read.
    """
    start = time.monotonic()
    # The first process keeps the bytecode of our files for all that start later.
    inherited = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider", *job.arguments],
        cwd=ROOT,
        env={
            **inherited,
            "LOSSSCALE_TEST_SHARED": shared,
            "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(shared, "compiled")),
            **job.environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - start


def run_all(jobs: tuple[Job, ...], at_once: int, shared: str) -> list[str]:
    """Runs jobs and reports each as it ends; returns the names of those that failed."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    failed, reporting = [], threading.Lock()

    def work() -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            status, output, seconds = run(job, shared)
            with reporting:
                if status:
                    failed.append(job.name)
                    print(f"--- {job.name}: FAILED\n{output}", flush=True)
                closing = [line.strip("= ") for line in output.splitlines() if line[:1] == "="]
                said = closing[-1] if closing else "pytest said nothing"
                print(f"{job.name} ({seconds:.0f} s): {said}", flush=True)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(at_once)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the core and one backend only")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: the cores)"
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lossscale-tests-") as shared:
        failed = run_all(QUICK if arguments.quick else ALL, max(arguments.jobs, 1), shared)
    print(f"{time.monotonic() - start:.0f} s in all; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
