"""Measures a row: builds its programs, checks that their results agree, and times them."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import numpy as np

from benchmarks.frameworks import Framework
from benchmarks.methods import SKIPPED, method
from benchmarks.rows import Row
from benchmarks.timing import Program, interleave, quartiles, ratios, steps_for

BURST_SECONDS = 0.02
MOST_STEPS_IN_A_BURST = 100
# A scale of 2**15 that halves at each overflow stays a normal number for so many steps.
MOST_OVERFLOWS = 135
# The first program of a row can run 10% faster (JAX) or slower (TensorFlow) than the same program
# built again. So the first program is not compared.
COMPILED = ("function", "xla", "jit")


class WrongResultError(Exception):
    """The result of a method differs from the others, so that their times mean nothing."""


def measure(
    row: Row, framework: Framework, *, rounds: int | None = None, quick: bool = False
) -> dict[str, Any]:
    """Measures a row; returns the results, JSON-ready.

    Args:
        row: The row.
        framework: The module that builds its programs.
        rounds: Number of timed rounds; None for the row's default.
        quick: Whether models are tiny, and a burst is a single step.

    Raises:
        WrongResultError: If the weights of a method are wrong, or it traced again.
    """
    fields = ("case", "point", "wrapper", "mode", "device", "optimizer")
    found = {field: getattr(row, field) for field in fields}
    try:
        with framework.on_device(row.device):
            return {**found, **_timed(row, framework, rounds, quick)}
    finally:
        # A row's arrays are in cycles with its compiled functions; the next row needs the memory.
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
            # A peer may fail, or its package may be missing.
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
        # CPU time is not the time of a GPU.
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
    """Checks that all methods did the same work; `before` has the initial weights of training."""
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
    # Without loss scaling, small gradients flush to zero, so `bare` has other weights.
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
        # Half precision rounds where another compilation fuses, and Adam magnifies the difference.
        if not apart < 0.1 * moved:
            raise WrongResultError(
                f"{row.name} {name}: after {row.timing.warm} steps it is {apart:.3g} from the "
                f"peer, which moved {moved:.3g}"
            )


def _flat(arrays: list[Any]) -> Any:
    return np.concatenate([array.ravel() for array in arrays])
