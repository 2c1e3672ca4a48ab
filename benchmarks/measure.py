"""Measures a row: makes its programs, checks that they agree, and times them."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import numpy as np

from benchmarks.frameworks import Framework
from benchmarks.machine import available
from benchmarks.methods import SKIPPED, method
from benchmarks.rows import Row
from benchmarks.timing import Program, interleave, quartiles, ratios, steps_for

BURST_SECONDS = 0.02
MOST_STEPS_IN_A_BURST = 100
# A scale of 2**15 that halves at each overflow stays a normal number for so many steps.
MOST_OVERFLOWS = 135
# What is built first in a row can run a tenth faster (JAX) or slower (TensorFlow) than the same
# built again. So the first program is one that nothing is compared with.
COMPILED = ("function", "xla", "jit")
# Variables, two slots, gradients, their copies and what a branch copies, in float32.
BYTES_PER_PARAMETER = 4 * 8


class WrongResultError(Exception):
    """A method did not do what the others did, so that their times mean nothing."""


class TooBigError(Exception):
    """There is not enough memory for a row."""


def measure(
    row: Row, framework: Framework, *, rounds: int | None = None, quick: bool = False
) -> dict[str, Any]:
    """Measures a row; returns what was found, JSON-ready.

    Args:
        row: The row.
        framework: What makes its programs.
        rounds: How many rounds are timed; None for what the row says.
        quick: Whether models are tiny, and a burst is a single step.

    Raises:
        WrongResultError: If a method came to other weights than it must, or traced again.
        TooBigError: If there is not enough memory.
    """
    if row.workload is not None:
        programs = len(row.methods) + (row.mode in COMPILED)
        needed = row.workload.parameters * BYTES_PER_PARAMETER * programs
        if needed > (free := available()):
            raise TooBigError(f"needs {needed / 2**30:.0f} GiB of memory, {free / 2**30:.0f} free")
    fields = ("case", "point", "wrapper", "mode", "device", "optimizer")
    found = {field: getattr(row, field) for field in fields}
    try:
        with framework.on_device(row.device):
            if row.timing is not None:
                return {**found, **_timed(row, framework, rounds, quick)}
            made = {name: framework.program(row, name, quick) for name in row.methods}
            return {**found, "methods": {name: one.structure() for name, one in made.items()}}
    finally:
        # A row's arrays hang in cycles with its compiled functions; the next one needs the room.
        framework.forget()
        gc.collect()


def _timed(row: Row, framework: Framework, rounds: int | None, quick: bool) -> dict[str, Any]:
    timing, first = row.timing, row.methods[0]
    programs: dict[str, Program] = {}
    before: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    if row.mode in COMPILED:
        uncompared = framework.program(row, first, quick)
        _timed_step(uncompared)
    for name in row.methods:
        try:
            program = framework.program(row, name, quick)
            before[name] = program.parameters() if row.model else None
            found[name] = {"first_step_seconds": _timed_step(program)}
        except Exception as error:
            # A peer may not run, and its package need not be there.
            if not name.startswith("peer") and not isinstance(error, ModuleNotFoundError):
                raise
            found[name] = {"does_not_run": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        for _ in range(timing.warm - 1):
            _timed_step(program)
        programs[name] = program
    _check(row, programs, before)
    limit = MOST_OVERFLOWS if any(name.endswith(SKIPPED) for name in programs) else 10**9
    most = min(rounds or timing.rounds, limit)
    steps = 1 if quick else timing.steps
    if steps is None:
        step_seconds = min(_timed_step(programs[first]) for _ in range(3))
        steps = steps_for(BURST_SECONDS, step_seconds, min(MOST_STEPS_IN_A_BURST, limit // most))
    traces = {name: program.traces for name, program in programs.items()}
    times = interleave(
        programs,
        rounds=most,
        steps=steps,
        seconds=timing.seconds if rounds is None else math.inf,
        fewest=timing.fewest,
        # What the processor does meanwhile is not what a GPU takes.
        clock=getattr(time, timing.clock) if row.device == "cpu" else time.perf_counter,
    )
    for name, program in programs.items():
        if program.traces != traces[name]:
            raise WrongResultError(f"{row.name} {name}: it was traced again while it was timed")
        found[name]["seconds"] = quartiles([each / program.inner_steps for each in times[name]])
        base = "bare, clip" if name.endswith(", clip") else first
        found[name]["ratio"] = ratios(times[name], times[base])
        if name.endswith(SKIPPED):
            applied = times[name.removesuffix(SKIPPED)]
            found[name]["ratio_to_applied"] = ratios(times[name], applied)
        if row.structure:
            found[name].update(program.structure())
    return {"rounds": len(times[first]), "steps_per_round": steps, "methods": found}


def _timed_step(program: Program) -> float:
    program.prepare()
    program.wait()
    begin = time.perf_counter()
    program.step()
    program.wait()
    return time.perf_counter() - begin


def _check(row: Row, programs: dict[str, Program], before: dict[str, Any]) -> None:
    """Checks that all methods did the same work; `before` has the first weights of training."""
    bare = programs[row.methods[0]].parameters()
    if bare is None:
        return
    if row.workload is None:
        _check_training(row, programs, before)
        return
    first = row.workload.values()
    if all(np.array_equal(one, other) for one, other in zip(bare, first, strict=True)):
        raise WrongResultError(f"{row.name} bare: no weight changed")
    for name, program in programs.items():
        skips = name.endswith(SKIPPED)
        exact = skips or (row.exact and method(name).exact)
        expected, found = first if skips else bare, program.parameters()
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            if np.array_equal(one, other):
                continue
            if exact or not np.allclose(one, other, rtol=1e-5, atol=1e-6):
                raise WrongResultError(
                    f"{row.name} {name}: variable {index} is off by up to "
                    f"{np.max(np.abs(one - other)):.3g} in {np.mean(one != other):.2%} of its "
                    f"elements, after {row.timing.warm} steps"
                )


def _check_training(row: Row, programs: dict[str, Program], before: dict[str, Any]) -> None:
    # Without loss scaling small gradients flush to zero, so that `bare` goes elsewhere.
    weights = {name: _flat(program.parameters()) for name, program in programs.items()}
    for name, found in weights.items():
        if not np.all(np.isfinite(found)):
            raise WrongResultError(f"{row.name} {name}: a weight is not finite")
    if "peer_dynamic" not in weights:
        return
    expected = weights["peer_dynamic"]
    moved = np.mean(np.abs(expected - _flat(before["peer_dynamic"])))
    for name in ("ours_dynamic", "ours_monitored", "ours_fixed", "peer_fixed", "unscale"):
        apart = np.mean(np.abs(weights.get(name, expected) - expected))
        # Half precision rounds where another compilation fuses, and Adam magnifies it.
        if not apart < 0.1 * moved:
            raise WrongResultError(
                f"{row.name} {name}: after {row.timing.warm} steps it is {apart:.3g} from the "
                f"peer, which moved {moved:.3g}"
            )


def _flat(arrays: list[Any]) -> Any:
    return np.concatenate([array.ravel() for array in arrays])
