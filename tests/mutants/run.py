"""Runs each mutant's tests against it: a test suite that protects the sources kills every one.

The backends run one after the other, each in a process that imports its framework once; each
mutant is a fork of it with a changed copy of the sources. Before that its tests must pass on the
sources as they are.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
# In the place of this folder, whose mutants.py would be the package `mutants` otherwise.
sys.path[0] = str(HERE.parent)

from mutants.mutants import ALL, TF_KERAS, Mutant  # noqa: E402

SECONDS = 1800
PASSED, FAILED, INTERRUPTED = 0, 1, 2


def environment(backend: str) -> dict[str, str]:
    """What the tests of a backend need before a framework is imported."""
    chosen = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    if backend == TF_KERAS:
        tf_keras = {"LOSSSCALE_TEST_KERAS": "tf_keras", "TF_USE_LEGACY_KERAS": "1"}
        return {**chosen, **tf_keras, "KERAS_BACKEND": "tensorflow"}
    return {**chosen, "KERAS_BACKEND": backend}


def mutated(mutant: Mutant, folder: pathlib.Path) -> None:
    """Writes a copy of the sources into a folder, with the edit."""
    shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True)
    path, text = mutant.apply(folder / "lossscale")
    path.write_text(text, encoding="utf-8")


def forked(sources: pathlib.Path, tests: tuple[str, ...], log: pathlib.Path) -> int:
    """Runs tests in a fork, with these sources; returns the status of pytest."""
    child = os.fork()
    if not child:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.path.insert(0, str(sources))
        os.environ["PYTHONPATH"] = str(sources)
        import pytest

        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
        sys.stdout.flush()
        os._exit(int(status))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            # A crash counts as a failed test.
            return FAILED if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return FAILED


def run_backend(backend: str, words: list[str]) -> int:
    """Runs the mutants of one backend in this process; returns how many survived."""
    import keras  # noqa: F401

    if backend == TF_KERAS:
        import tf_keras  # noqa: F401
    os.chdir(ROOT)
    chosen = [m for m in ALL if m.backend == backend and all(w in m.place for w in words)]
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        passing = set()
        for number, mutant in enumerate(chosen):
            if mutant.tests not in passing:
                if forked(ROOT / "src", mutant.tests, folder / "log") != PASSED:
                    print((folder / "log").read_text())
                    raise SystemExit(f"Without any mutant the tests {mutant.tests} must pass.")
                passing.add(mutant.tests)
            sources = folder / str(number)
            mutated(mutant, sources)
            start = time.monotonic()
            status = forked(sources, mutant.tests, folder / "log")
            if status not in (PASSED, FAILED, INTERRUPTED):
                print((folder / "log").read_text())
                raise SystemExit(f"pytest {' '.join(mutant.tests)} ended with status {status}.")
            survivors += status == PASSED
            said = "SURVIVED" if status == PASSED else "killed"
            seconds = time.monotonic() - start
            edit = f"{mutant.place}: {mutant.old} -> {mutant.new}"
            print(f"{said} ({seconds:.0f} s) {edit}", flush=True)
    print(f"{backend}: {len(chosen) - survivors} of {len(chosen)} killed", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend", choices=sorted({m.backend for m in ALL}), help="only the mutants of this one"
    )
    # What this program calls itself with, once the environment is that of the backend.
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="only mutants whose room.function has all these")
    arguments = parser.parse_args()
    if arguments.in_this_process:
        return 1 if run_backend(arguments.backend, arguments.words) else 0
    status = 0
    backends = dict.fromkeys(mutant.backend for mutant in ALL)
    for backend in [arguments.backend] if arguments.backend else backends:
        command = [sys.executable, __file__, "--in-this-process", "--backend", backend]
        command += arguments.words
        status |= subprocess.run(command, env=environment(backend), check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
