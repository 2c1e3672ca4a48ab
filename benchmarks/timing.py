"""Times several programs side by side: a short burst of each in every round."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Program:
    """A program that runs steps: one method on one row.

    Attributes:
        fresh_each_step: Whether to call `prepare` before each step instead of each burst.
        traces: How often a compiler has traced the step.
        inner_steps: Number of training steps in a step.
    """

    fresh_each_step = False
    traces = 0
    inner_steps = 1

    def prepare(self) -> None:
        """Sets the inputs; not timed."""

    def step(self) -> None:
        """Starts a step."""
        raise NotImplementedError

    def wait(self) -> None:
        """Waits for all steps that were started."""

    def timed(self, steps: int, clock: Callable[[], float]) -> float:
        """Runs some steps to their end; returns their total time in seconds."""
        begin = clock()
        for _ in range(steps):
            self.step()
        self.wait()
        return clock() - begin

    def parameters(self) -> list[Any] | None:
        """Returns the trained values as NumPy arrays; None if they must not be compared."""
        return None

    def structure(self) -> dict[str, Any]:
        """Returns other measurements than time: numbers by name."""
        return {}


def burst(program: Program, steps: int, clock: Callable[[], float]) -> float:
    """Runs some steps and returns the seconds per step, without preparation."""
    chunks, size = (steps, 1) if program.fresh_each_step else (1, steps)
    spent = 0.0
    for _ in range(chunks):
        program.prepare()
        program.wait()
        spent += program.timed(size, clock)
    return spent / steps


def interleave(
    programs: Mapping[str, Program],
    *,
    rounds: int,
    steps: int,
    seconds: float = math.inf,
    fewest: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times programs round by round, in a new order each round.

    Programs are compared within a round, so that other load on the machine affects all alike.

    Args:
        programs: The programs by name, warmed up.
        rounds: Maximum number of rounds.
        steps: Number of steps of each program in a round.
        seconds: After this time no new round begins.
        fewest: Minimum number of rounds, whatever time they take.
        clock: Returns seconds.

    Returns:
        For each program the seconds per step, one number for each round.
    """
    order, shuffled = list(programs), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in programs}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    begin = clock()
    try:
        for done in range(rounds):
            if done >= fewest and clock() - begin >= seconds:
                break
            shuffled.shuffle(order)
            for name in order:
                times[name].append(burst(programs[name], steps, clock))
    finally:
        if collecting:
            gc.enable()
    return times


def steps_for(seconds: float, step_seconds: float, most: int) -> int:
    """Returns the number of steps in a burst of about this length, from 1 to `most`."""
    return max(1, min(most, math.ceil(seconds / max(step_seconds, 1e-9))))


def quartiles(numbers: Sequence[float]) -> dict[str, float]:
    """Returns the median and the quartiles; for one number, this number."""
    if len(numbers) == 1:
        return dict.fromkeys(("median", "q1", "q3"), numbers[0])
    q1, median, q3 = statistics.quantiles(numbers, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def ratios(times: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Returns the quartiles of the ratios of two programs' times, taken within each round."""
    return quartiles([a / b for a, b in zip(times, baseline, strict=True)])
