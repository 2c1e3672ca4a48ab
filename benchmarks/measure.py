"""Measures a row: builds its programs, checks that they agree, and times them."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import numpy as np

from benchmarks.memory import available
from benchmarks.methods import METHODS, SCALE
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.plan import SKIPPED, Row
from benchmarks.timing import as_numbers, interleave, quartiles, ratios, steps_for

WARM_STEPS = 3
BURST_SECONDS = 0.02
MOST_STEPS_IN_A_BURST = 100
MOST_ROUNDS = 41
FEWEST_ROUNDS = 7
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
    row: Row, framework: Any, *, rounds: int | None = None, quick: bool = False
) -> dict[str, Any]:
    """Measures a row.

    Args:
        row: The row.
        framework: A module of `benchmarks.frameworks`.
        rounds: How many rounds are timed; None for as many as its seconds allow.
        quick: Whether models are tiny, and a burst is a single step.

    Returns:
        What was found, JSON-ready.

    Raises:
        WrongResultError: If a method came to other weights than it must, or traced again.
        TooBigError: If there is not enough memory.
    """
    if row.workload is not None:
        programs = len(row.methods) + (row.mode in COMPILED)
        needed = row.workload.parameters * BYTES_PER_PARAMETER * programs
        if (free := available()) is not None and needed > free:
            raise TooBigError(f"needs {needed / 2**30:.0f} GiB of memory, {free / 2**30:.0f} free")
    try:
        with framework.on_device(row.device):
            return _measured(row, framework, rounds, quick)
    finally:
        # A row's arrays hang in cycles with its compiled functions; the next one needs the room.
        framework.forget()
        gc.collect()


def _measured(row: Row, framework: Any, rounds: int | None, quick: bool) -> dict[str, Any]:
    programs: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    if row.mode in COMPILED:
        first = _program(row, "bare", framework, quick)
        _timed_step(first)
    for name in row.methods:
        try:
            program = _program(row, name, framework, quick)
            found[name] = {"first_step_seconds": _timed_step(program)}
        except Exception as error:
            if not name.startswith("peer"):
                raise
            found[name] = {"does_not_run": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        for _ in range(WARM_STEPS - 1):
            _timed_step(program)
        programs[name] = program
    _check(row, programs)
    overflowing = any(name.endswith(SKIPPED) for name in row.methods)
    limit = MOST_OVERFLOWS if overflowing else 10**9
    most = min(rounds or MOST_ROUNDS, limit)
    steps = steps_for(
        BURST_SECONDS,
        min(_timed_step(programs["bare"]) for _ in range(3)),
        1 if quick else min(MOST_STEPS_IN_A_BURST, limit // most),
    )
    traces = {name: program.traces for name, program in programs.items()}
    times = interleave(
        programs,
        rounds=most,
        steps=steps,
        seconds=row.seconds if rounds is None else math.inf,
        fewest=FEWEST_ROUNDS,
    )
    for name, program in programs.items():
        if program.traces != traces[name]:
            raise WrongResultError(f"{row.name} {name}: it was traced again while it was timed")
        found[name]["seconds"] = as_numbers(quartiles(times[name]))
        found[name]["ratio"] = as_numbers(ratios(times[name], times["bare"]))
        if name.endswith(SKIPPED):
            applied = times[name.removesuffix(SKIPPED)]
            found[name]["ratio_to_applied"] = as_numbers(ratios(times[name], applied))
        if row.structure:
            found[name].update(program.structure())
    return {
        **{
            field: getattr(row, field)
            for field in ("case", "point", "shell", "mode", "device", "optimizer")
        },
        "rounds": len(times["bare"]),
        "steps_per_round": steps,
        "methods": found,
    }


def _program(row: Row, name: str, framework: Any, quick: bool) -> Any:
    method = METHODS[name.removesuffix(SKIPPED)]
    optimizers = framework.optimizers(row.shell)

    def new_inner(**settings: Any) -> Any:
        return OPTIMIZERS[row.optimizer](optimizers, **settings)

    if row.workload is None:
        return framework.Train(
            method, row.model, new_inner, mode=row.mode, scale=SCALE, small=quick
        )
    workload = row.workload.overflowing() if name.endswith(SKIPPED) else row.workload
    if row.replicas:
        return framework.Replicated(method, workload, new_inner, row.replicas, scale=SCALE)
    return framework.Apply(method, workload, new_inner, mode=row.mode, scale=SCALE)


def _timed_step(program: Any) -> float:
    program.prepare()
    program.wait()
    begin = time.perf_counter()
    program.step()
    program.wait()
    return time.perf_counter() - begin


def _check(row: Row, programs: dict[str, Any]) -> None:
    """Checks that all methods did the same work.

    Raises:
        WrongResultError: If one did not.
    """
    if row.workload is None:
        _check_training(row, programs)
        return
    first, bare = row.workload.values(), programs["bare"].parameters()
    if all(np.array_equal(one, other) for one, other in zip(bare, first, strict=True)):
        raise WrongResultError(f"{row.name} bare: no weight changed")
    for name, program in programs.items():
        skips = name.endswith(SKIPPED)
        exact = skips or (METHODS[name].exact and row.exact)
        weights = program.parameters()
        for index, (one, other) in enumerate(zip(weights, first if skips else bare, strict=True)):
            if np.array_equal(one, other):
                continue
            if exact or not np.allclose(one, other, rtol=1e-5, atol=1e-6):
                raise WrongResultError(
                    f"{row.name} {name}: variable {index} is off by up to "
                    f"{np.max(np.abs(one - other)):.3g} in {np.mean(one != other):.2%} of its "
                    f"elements, after {WARM_STEPS} steps"
                )


def _check_training(row: Row, programs: dict[str, Any]) -> None:
    # Without loss scaling small gradients flush to zero, so that `bare` goes elsewhere.
    weights = {
        name: np.concatenate([value.ravel() for value in program.parameters()])
        for name, program in programs.items()
    }
    for name, found in weights.items():
        if not np.all(np.isfinite(found)):
            raise WrongResultError(f"{row.name} {name}: a weight is not finite")
    if "peer_dynamic" not in weights:
        return
    expected, first = weights["peer_dynamic"], programs["peer_dynamic"].first_parameters
    moved = np.mean(np.abs(expected - np.concatenate([value.ravel() for value in first])))
    for name in ("ours_dynamic", "ours_monitored", "ours_fixed", "peer_fixed", "unscale"):
        if name in weights:
            apart = np.mean(np.abs(weights[name] - expected))
            # Half precision rounds where another compilation fuses, and Adam magnifies it.
            if not apart < 0.1 * moved:
                raise WrongResultError(
                    f"{row.name} {name}: after {WARM_STEPS} steps it is {apart:.3g} from the "
                    f"peer, which moved {moved:.3g}"
                )
