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
    """Something that runs step after step: one method on one row.

    Attributes:
        fresh_each_step: Whether `prepare` must be called before each step, not each burst.
        traces: How often a compiler has asked for the step.
        inner_steps: How many steps of training a step is.
    """

    fresh_each_step = False
    traces = 0
    inner_steps = 1

    def prepare(self) -> None:
        """Brings the inputs into place; not timed."""

    def step(self) -> None:
        """Starts a step."""
        raise NotImplementedError

    def wait(self) -> None:
        """Waits for all steps that were started."""

    def timed(self, steps: int, clock: Callable[[], float]) -> float:
        """Runs some steps to their end; returns the seconds that they took together."""
        begin = clock()
        for _ in range(steps):
            self.step()
        self.wait()
        return clock() - begin

    def parameters(self) -> list[Any] | None:
        """Returns the values of what is trained, NumPy arrays; None if nobody may compare them."""
        return None

    def structure(self) -> dict[str, Any]:
        """Returns what is measured beside time: numbers by name."""
        return {}


def burst(program: Program, steps: int, clock: Callable[[], float]) -> float:
    """Runs some steps and returns the seconds for each, without their preparation."""
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

    What the machine does besides meets all programs alike: they are compared within a round.

    Args:
        programs: The programs by name, warm.
        rounds: How many rounds at most.
        steps: How many steps of each program a round runs.
        seconds: When this much time is gone, no new round begins.
        fewest: But so many rounds are run whatever they take.
        clock: Returns seconds.

    Returns:
        For each program the seconds for a step, one number for each round.
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
    """Returns how many steps make a burst of about so many seconds, from 1 to `most`."""
    return max(1, min(most, math.ceil(seconds / max(step_seconds, 1e-9))))


def quartiles(numbers: Sequence[float]) -> dict[str, float]:
    """Returns the median and the quartiles around it; of one number that number."""
    if len(numbers) == 1:
        return dict.fromkeys(("median", "q1", "q3"), numbers[0])
    q1, median, q3 = statistics.quantiles(numbers, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def ratios(times: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Returns the quartiles of the ratios of two programs' times, taken within each round."""
    return quartiles([a / b for a, b in zip(times, baseline, strict=True)])
