"""Runs programs one after another in one process: what one imports serves the next.

A program finds the global settings of lossscale and Keras as the first one found them, and a
`__main__` of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import re
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Iterator

import keras

from lossscale import installation

# What TensorFlow says of the machine when it first computes.
OF_THE_MACHINE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog"
    r"|([IWE]\d{4}|\d{4}-\d\d-\d\d) .*(cuda|CUDA|GPU|oneDNN|cpu_feature|xla|XLA|MLIR)"
)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collects the lines that are written to the standard error stream, also by libraries in C."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += [line for line in file.read().splitlines() if not OF_THE_MACHINE.match(line)]


def forget_traces() -> None:
    """Lets TensorFlow, which warns of functions traced often, count those of one program alone."""
    where = "tensorflow.python.eager.polymorphic_function.polymorphic_function"
    if where in sys.modules:
        sys.modules[where]._frequent_tracing_detector_manager._detectors.clear()


def outcome(source: str, number: int) -> dict[str, object]:
    """Returns what a program prints, what was logged, and its traceback if it fails."""
    printed, error = io.StringIO(), None
    lines: list[str] = []
    # AutoGraph reads the source of what it translates.
    name = f"<program {number}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    policy = keras.config.dtype_policy()
    forget_traces()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed), logged() as lines:
            # A page must not show a program that warns.
            warnings.filterwarnings("error", module="lossscale")
            exec(compile(source, name, "exec"), vars(sys.modules["__main__"]))
    except Exception:
        error = traceback.format_exc()
    finally:
        sys.modules["__main__"] = main
        keras.config.set_dtype_policy(policy)
        if installation.Installation._first is not None:
            installation.Installation._first.undo()
    return {"printed": printed.getvalue(), "logged": lines, "error": error}


def run_all(programs: str, outcomes: str) -> None:
    """Runs the programs of a JSON file; writes a line for each, as it ends."""
    with open(programs) as file:
        sources = json.load(file)
    with open(outcomes, "w") as file:
        for number, source in enumerate(sources):
            print(json.dumps(outcome(source, number)), file=file, flush=True)
    # Taking the frameworks down in order takes seconds and tests nothing.
    os._exit(0)
