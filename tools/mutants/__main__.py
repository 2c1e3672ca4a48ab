"""Do the tests notice? Runs wrong versions of the sources, each against the tests that must fail.

`python -m tools.mutants` runs all of tools/mutants/mutants.py, which takes about an hour and a half
on 2 cores; `python -m tools.mutants --backend torch Engine` those whose part or function has this
word. It needs the test environment.

Each backend's framework is imported once, and each mutant's tests run in a fork of that process,
with a changed copy of the sources. Before that they must pass on the sources as they are.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
import tempfile
import time

from forks import Program
from tools import ROOT
from tools.mutants.edits import PACKAGES
from tools.mutants.mutants import ALL, TENSORFLOW, TF_KERAS, Mutant

SECONDS = 1800
PASSED, FAILED, INTERRUPTED = 0, 1, 2
PYTEST = """
import os, sys
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
import pytest

sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
# What the tests of a backend have in their environment.
TF_KERAS_ONLY = {"LOSSSCALE_TEST_KERAS": "tf_keras", "TF_USE_LEGACY_KERAS": "1"}


def survives(sources: pathlib.Path, mutant: Mutant) -> bool:
    """Whether the tests of a mutant pass with these sources."""
    is_tf_keras = mutant.backend == TF_KERAS
    backend = {"KERAS_BACKEND": TENSORFLOW if is_tf_keras else mutant.backend}
    done = Program(
        PYTEST,
        *mutant.tests,
        environment={
            "PYTHONPATH": os.pathsep.join(str((sources / p).parent) for p in PACKAGES.values()),
            **backend,
            **(TF_KERAS_ONLY if is_tf_keras else {}),
        },
        module="tf_keras" if is_tf_keras else "keras",
    ).finished(timeout=SECONDS)
    # A crash counts as a failed test.
    if done.returncode >= 0 and done.returncode not in (PASSED, FAILED, INTERRUPTED):
        print(done.stdout)
        raise SystemExit(f"pytest {' '.join(mutant.tests)} ended with status {done.returncode}.")
    if done.returncode and sources == ROOT:
        print(done.stdout)
        raise SystemExit(f"Without any mutant the tests {mutant.tests} must pass.")
    return done.returncode == PASSED


def run_backend(backend: str, words: list[str]) -> int:
    """Runs the mutants of one backend; returns how many survived."""
    chosen = [m for m in ALL if m.backend == backend and all(w in m.place for w in words)]
    survivors, passing = 0, set()
    for mutant in chosen:
        if mutant.tests not in passing:
            survives(ROOT, mutant)
            passing.add(mutant.tests)
        with tempfile.TemporaryDirectory() as name:
            sources = pathlib.Path(name)
            for package in PACKAGES.values():
                shutil.copytree(ROOT / package, sources / package)
            path, text = mutant.apply(sources)
            path.write_text(text, encoding="utf-8")
            start = time.monotonic()
            survived = survives(sources, mutant)
        survivors += survived
        seconds = time.monotonic() - start
        edit = f"{mutant.place}: {mutant.old} -> {mutant.new}"
        print(f"{'SURVIVED' if survived else 'killed'} ({seconds:.0f} s) {edit}", flush=True)
    print(f"{backend}: {len(chosen) - survivors} of {len(chosen)} killed", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend", choices=sorted({m.backend for m in ALL}), help="only the mutants of this one"
    )
    parser.add_argument("words", nargs="*", help="only mutants whose part.function has all these")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")
    backends = dict.fromkeys(mutant.backend for mutant in ALL)
    chosen = [arguments.backend] if arguments.backend else backends
    return 1 if sum([run_backend(backend, arguments.words) for backend in chosen]) else 0


if __name__ == "__main__":
    sys.exit(main())
