"""One process of the benchmarks: some cases of one backend."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.frameworks import Framework
from benchmarks.measure import WrongResultError, measure
from benchmarks.rows import Process, Row

# PyTorch allocates for each operation. If the C library returns large blocks to the system at once,
# most of a step is spent on allocating them again, and no two steps take the same time.
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**35),
    "MALLOC_TOP_PAD_": str(2**28),
}


def environment(process: Process) -> dict[str, str]:
    """Returns the environment variables that a process needs before it starts."""
    # Programs without Keras must not import it, which this name of a backend ensures.
    found = {"KERAS_BACKEND": process.backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if process.backend == "tf_keras":
        found.update(KERAS_BACKEND="tensorflow", TF_USE_LEGACY_KERAS="1")
    if process.backend == "torch":
        found.update(_KEEP_FREED_MEMORY)
    if process.backend == "optax" and process.device != "gpu":
        found["JAX_PLATFORMS"] = "cpu"
    return found


def main(arguments: Sequence[str]) -> int:
    """Measures, and writes a JSON file after each row; returns the exit status.

    Args:
        arguments: The fields of a `Process`, in JSON, and the file; its `environment` must be set.
    """
    process, output = Process(**json.loads(arguments[0])), pathlib.Path(arguments[1])
    module = "tensorflow" if process.backend == "tf_keras" else process.backend
    framework = importlib.import_module(f"benchmarks.frameworks.{module}").FRAMEWORK
    framework.start()
    kinds = framework.devices()
    gpus = {process.backend: kinds["gpu"]} if "gpu" in kinds else {}
    results: dict[str, Any] = {"gpus": gpus, "rows": [], "not_run": [], "wrong": []}
    asked = process.backend in ("jax", "torch") or process.device == "gpu"
    if asked and not gpus:
        results["not_run"].append({"what": f"{process.backend} on a GPU", "why": "there is no GPU"})
    output.write_text(json.dumps(results))
    _warm_up(process, framework)
    for row in process.rows(kinds):
        _measure(row, framework, process, results)
        output.write_text(json.dumps(results))
    return 0


def _measure(row: Row, framework: Framework, process: Process, results: dict[str, Any]) -> None:
    """Adds the results of a row."""
    begin = time.perf_counter()
    try:
        found = measure(row, framework, rounds=process.rounds, quick=process.quick)
    except WrongResultError as error:
        results["wrong"].append(str(error))
        told = f"error: {error}"
    else:
        results["rows"].append(found)
        times = f"{found['rounds']} rounds of {found['steps_per_round']}"
        told = f"{times}, {time.perf_counter() - begin:.0f} s"
    print(f"{row.name}: {told}", file=sys.stderr, flush=True)


def _warm_up(process: Process, framework: Framework) -> None:
    """Makes the framework do its one-time loading, so that no row pays for it."""
    rows = dataclasses.replace(process, quick=True, device="").rows()
    for row in rows:
        if row.case == rows[0].case:
            first = dataclasses.replace(row, methods=row.methods[:1])
            measure(first, framework, rounds=1, quick=True)
    # Loaded objects stay; searching them for garbage after each row would take seconds.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
