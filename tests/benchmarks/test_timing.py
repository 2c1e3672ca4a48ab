"""The clock of the benchmarks, run on a clock of its own."""

import contextlib
import dataclasses
import gc
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from benchmarks.timing import Program, burst, interleave, quartiles, ratios, steps_for


class Clock:
    """A clock that moves only when somebody works."""

    now = 0.0

    def __call__(self):
        return self.now


@dataclasses.dataclass
class Work(Program):
    """A program that takes a known time, and writes down what is asked of it."""

    clock: Clock
    seconds: float
    name: str = ""
    log: list = dataclasses.field(default_factory=list)
    fresh_each_step: bool = False
    preparation: float = 0.0
    waiting: float = 0.0

    def prepare(self):
        self.log.append(("prepare", self.name))
        self.clock.now += self.preparation

    def step(self):
        # Asynchronous: the work is done when somebody waits.
        self.log.append(("step", self.name))
        self.waiting += self.seconds

    def wait(self):
        self.clock.now += self.waiting
        self.waiting = 0.0


@pytest.mark.parametrize(
    ("fresh_each_step", "log"),
    [(False, ["prepare", *["step"] * 4]), (True, ["prepare", "step"] * 4)],
)
def test_a_burst_is_the_time_of_its_steps_without_their_preparation(fresh_each_step, log):
    clock = Clock()
    work = Work(clock, 2.0, fresh_each_step=fresh_each_step, preparation=64.0)
    # What waits before a burst is not its time either.
    work.waiting = 100.0
    assert burst(work, 4, clock) == 2.0
    assert [what for what, _ in work.log] == log


def interleaved(rounds, steps):
    """The times of four programs, and in which order they made their steps."""
    clock, log = Clock(), []
    programs = {name: Work(clock, 1.0, name, log) for name in "abcd"}
    times = interleave(programs, rounds=rounds, steps=steps, clock=clock)
    return times, [name for what, name in log if what == "step"]


def test_every_round_runs_every_program_once_in_another_order():
    times, steps = interleaved(rounds=20, steps=2)
    rounds = [steps[i : i + 8 : 2] for i in range(0, len(steps), 8)]
    assert len(rounds) == 20
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 5
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys("abcd", 20)
    # The same orders every time.
    assert interleaved(rounds=20, steps=2) == (times, steps)


def test_ratios_are_taken_within_a_round():
    clock = Clock()
    slow, bare = Work(clock, 0.0), Work(clock, 0.0)
    # The machine becomes ten times slower after each round; the ratio stays.
    times = {"bare": [], "slow": []}
    for load in (1.0, 10.0, 100.0):
        bare.seconds, slow.seconds = load, 1.5 * load
        found = interleave({"bare": bare, "slow": slow}, rounds=1, steps=1, clock=clock)
        for name, seconds in found.items():
            times[name] += seconds
    assert times["bare"] == [1.0, 10.0, 100.0]
    assert ratios(times["slow"], times["bare"]) == {"median": 1.5, "q1": 1.5, "q3": 1.5}


@pytest.mark.parametrize(
    ("step_seconds", "limits", "rounds"),
    [
        (1.0, {"rounds": 100, "seconds": 3.5}, 4),
        # So many rounds are run whatever they take.
        (50.0, {"rounds": 100, "seconds": 3.5, "fewest": 6}, 6),
        (1e9, {"rounds": 3, "seconds": math.inf}, 3),
    ],
)
def test_no_round_begins_when_the_time_is_gone(step_seconds, limits, rounds):
    clock = Clock()
    times = interleave({"a": Work(clock, step_seconds)}, steps=1, clock=clock, **limits)
    assert len(times["a"]) == rounds


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("collecting", [False, True])
def test_garbage_is_not_collected_meanwhile(collecting, fails):
    class Asks(Work):
        def step(self):
            super().step()
            seen.append(gc.isenabled())
            if fails:
                raise RuntimeError("no")

    switch = {True: gc.enable, False: gc.disable}
    seen, clock, before = [], Clock(), gc.isenabled()
    switch[collecting]()
    try:
        with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            interleave({"a": Asks(clock, 1.0)}, rounds=2, steps=1, clock=clock)
        assert seen == [False] * (1 if fails else 2)
        assert gc.isenabled() == collecting
    finally:
        switch[before]()


@hypothesis.given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_quartiles_are_those_of_numpy(numbers):
    found = quartiles(numbers)
    assert list(found) == ["median", "q1", "q3"]
    assert np.allclose(list(found.values()), np.percentile(numbers, [50, 25, 75]), rtol=1e-12)


@hypothesis.given(st.floats(1e-9, 10), st.floats(0, 10), st.integers(1, 1000))
def test_a_burst_is_long_enough_unless_it_has_all_its_steps(seconds, step_seconds, most):
    steps = steps_for(seconds, step_seconds, most)
    assert 1 <= steps <= most
    assert steps == most or steps * max(step_seconds, 1e-9) >= seconds * (1 - 1e-9)
    assert steps == 1 or (steps - 1) * step_seconds < seconds
