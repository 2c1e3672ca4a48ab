"""One process of the benchmarks: the cases of one backend, on one number of devices."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import plan
from benchmarks.plan import STEP, Process
from benchmarks.workloads import equal

FRAMEWORKS = {
    "tensorflow": "keras_tensorflow",
    "tf_keras": "tf_keras",
    "jax": "keras_jax",
    "torch": "keras_torch",
}

# PyTorch allocates for each operation. Where the C library returns large blocks to the system at
# once, most of a step goes into asking for them again, and no two steps take the same time.
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**35),
    "MALLOC_TOP_PAD_": str(2**28),
}


def environment(process: Process, quick: bool) -> dict[str, str]:
    """Returns the environment variables that a process needs before it starts."""
    keras_backend = "tensorflow" if process.backend == "tf_keras" else process.backend
    found = {"KERAS_BACKEND": keras_backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if process.backend == "tf_keras":
        found["TF_USE_LEGACY_KERAS"] = "1"
    if process.backend == "torch":
        found.update(_KEEP_FREED_MEMORY)
    if quick:
        # Several processes at once, whose threads would wait for each other.
        found["OMP_NUM_THREADS"] = "1"
    if process.backend == "jax" and process.devices > 1:
        devices = f"--xla_force_host_platform_device_count={process.devices}"
        found["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()
        found["JAX_PLATFORMS"] = "cpu"
    return found


def arguments(process: Process, rounds: int | None, quick: bool, output: Any) -> list[str]:
    """Returns the command line of a process, without the interpreter's."""
    found = ["--backend", process.backend, "--devices", str(process.devices)]
    found += ["--cases", ",".join(process.cases), "--modes", ",".join(process.modes)]
    found += ["--output", str(output)]
    found += [] if rounds is None else ["--rounds", str(rounds)]
    return [*found, "--quick"] if quick else found


def main(command_line: list[str]) -> int:
    """Measures and writes a JSON file, anew after each row; returns the exit status.

    It must be started with the variables of `environment`.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--modes", required=True)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args(command_line)
    cases, modes = tuple(options.cases.split(",")), tuple(options.modes.split(","))
    process = Process(options.backend, cases, modes, options.devices)

    framework = _framework(process)
    from benchmarks.measure import TooBigError, WrongResultError, measure

    results: dict[str, Any] = {
        "versions": framework.versions(),
        "gpus": {process.backend: name} if (name := framework.devices().get("gpu")) else {},
        "measured_by": {
            f"memory_bytes, {process.backend}": framework.MEMORY,
            f"graph_size, {process.backend}": framework.GRAPH,
        },
        "rows": [],
        "collectives": [],
        "host_syncs": [],
        "not_run": _left_out(process, framework),
        "wrong": [],
    }
    _warm_up(process, framework)
    for row in plan.rows(process, list(framework.devices()), options.quick):
        begin = time.perf_counter()
        try:
            found = measure(row, framework, rounds=options.rounds, quick=options.quick)
        except TooBigError as error:
            results["not_run"].append({"what": row.name, "why": str(error)})
            _progress(f"{row.name}: left out, it {error}")
        except WrongResultError as error:
            results["wrong"].append(str(error))
            _progress(f"error: {error}")
        else:
            results["rows"].append(found)
            took = time.perf_counter() - begin
            times = f"{found['rounds']} rounds of {found['steps_per_round']}"
            _progress(f"{row.name}: {times}, {took:.0f} s")
        options.output.write_text(json.dumps(results))
    for key, found in _counts(process, options.quick):
        results[key].append(found)
        _progress(f"{process.backend} {key} {found['method']}")
    options.output.write_text(json.dumps(results))
    return 0


def _warm_up(process: Process, framework: Any) -> None:
    """Makes the framework load what it loads only once, so that no row pays for it."""
    from benchmarks.measure import measure

    for row in plan.rows(process, list(framework.devices()), quick=True):
        if row.case == process.cases[0]:
            measure(dataclasses.replace(row, methods=("bare",)), framework, rounds=1, quick=True)
    # What is loaded stays; to look through it for garbage after each row takes seconds.
    gc.collect()
    gc.freeze()


def _framework(process: Process) -> Any:
    from lossscale.cli.backend import silenced

    with silenced():
        if process.backend == "tensorflow":
            import tensorflow as tf

            # Possible only before the first operation.
            cpu = tf.config.list_physical_devices("CPU")[0]
            each = [tf.config.LogicalDeviceConfiguration()] * process.devices
            tf.config.set_logical_device_configuration(cpu, each)
        module = f"benchmarks.frameworks.{FRAMEWORKS[process.backend]}"
        framework: Any = importlib.import_module(module)
    framework.PACKAGE.mixed_precision.set_global_policy("mixed_float16")
    return framework


def _left_out(process: Process, framework: Any) -> list[dict[str, str]]:
    found = []
    could = process.backend in ("jax", "torch") and process.devices == 1
    if could and "gpu" not in framework.devices():
        found.append({"what": f"{process.backend} on a GPU", "why": "there is no GPU"})
    if "replicas" in process.cases:
        found.append(
            {
                "what": "replicas under XLA",
                "why": "a MirroredStrategy over virtual CPUs does not run there, "
                "with the bare optimizer neither",
            }
        )
    return found


def _counts(process: Process, quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is counted and not timed: the name of the list it goes into, and what was found."""
    if "collectives" in process.cases:
        module = importlib.import_module(f"benchmarks.frameworks.collectives_{process.backend}")
        workload = equal(10, 10_000)
        for devices in (2, 4) if process.backend == "jax" else (process.devices,):
            for name in ("bare", "ours_dynamic", "peer_dynamic"):
                found = module.measure(name, workload, devices)
                place = {"backend": process.backend, "devices": devices, "method": name}
                yield "collectives", {**place, **found}
    if "host_syncs" in process.cases:
        from benchmarks.frameworks import host_syncs

        workload = equal(4, 16) if quick else equal(50, 50_000)
        for name in ("ours_dynamic",) if quick else STEP:
            yield "host_syncs", {"method": name, **host_syncs.measure(name, workload, quick)}


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
