"""The clock of the benchmarks, run on a clock of its own."""

import gc
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from benchmarks.timing import burst, interleave, quartiles, ratios, steps_for


class Clock:
    """A clock that moves only when somebody works."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Work:
    """A program that takes a known time, and writes down what is asked of it."""

    def __init__(self, clock, seconds, name="", log=None, fresh_each_step=False, preparation=0.0):
        self.clock, self.seconds, self.name = clock, seconds, name
        self.log = [] if log is None else log
        self.fresh_each_step, self.preparation = fresh_each_step, preparation
        self.waiting = 0.0

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


@pytest.mark.parametrize("fresh_each_step", [False, True])
def test_a_burst_is_the_time_of_its_steps_without_their_preparation(fresh_each_step):
    clock = Clock()
    work = Work(clock, 2.0, fresh_each_step=fresh_each_step, preparation=64.0)
    assert burst(work, 4, clock) == 2.0
    assert [what for what, _ in work.log].count("step") == 4


def test_what_waits_before_a_burst_is_not_its_time():
    clock = Clock()
    work = Work(clock, 2.0)
    work.waiting = 100.0
    assert burst(work, 1, clock) == 2.0


def test_inputs_are_prepared_for_each_burst_or_for_each_step():
    clock = Clock()
    once, each = Work(clock, 1.0), Work(clock, 1.0, fresh_each_step=True)
    burst(once, 3, clock)
    burst(each, 3, clock)
    assert [what for what, _ in once.log] == ["prepare", "step", "step", "step"]
    assert [what for what, _ in each.log] == ["prepare", "step"] * 3


def test_every_round_runs_every_program_once_in_another_order():
    clock, log = Clock(), []
    programs = {name: Work(clock, 1.0, name, log) for name in "abcd"}
    times = interleave(programs, rounds=20, steps=2, clock=clock)
    steps = [name for what, name in log if what == "step"]
    rounds = [steps[i : i + 8 : 2] for i in range(0, len(steps), 8)]
    assert len(rounds) == 20
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 5
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys("abcd", 20)


def test_the_order_is_the_same_for_the_same_seed():
    def order(seed):
        clock, log = Clock(), []
        programs = {name: Work(clock, 1.0, name, log) for name in "abcd"}
        interleave(programs, rounds=5, steps=1, seed=seed, clock=clock)
        return log

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_ratios_are_taken_within_a_round():
    clock = Clock()
    slow, bare = Work(clock, 0.0), Work(clock, 0.0)
    # The machine becomes ten times slower after each round; the ratio stays.
    times = {"bare": [], "slow": []}
    for load in (1.0, 10.0, 100.0):
        bare.seconds, slow.seconds = load, 1.5 * load
        for name, found in interleave(
            {"bare": bare, "slow": slow}, rounds=1, steps=1, clock=clock
        ).items():
            times[name] += found
    assert times["bare"] == [1.0, 10.0, 100.0]
    assert ratios(times["slow"], times["bare"]) == (1.5, 1.5, 1.5)


def test_no_round_begins_when_the_time_is_gone():
    clock = Clock()
    times = interleave({"a": Work(clock, 1.0)}, rounds=100, steps=1, seconds=3.5, clock=clock)
    assert len(times["a"]) == 4


def test_but_so_many_rounds_are_run_whatever_they_take():
    clock = Clock()
    work = {"a": Work(clock, 50.0)}
    times = interleave(work, rounds=100, steps=1, seconds=3.5, fewest=6, clock=clock)
    assert len(times["a"]) == 6


@pytest.mark.parametrize("collecting", [False, True])
def test_garbage_is_not_collected_meanwhile(collecting):
    class Asks(Work):
        def step(self):
            super().step()
            seen.append(gc.isenabled())

    seen, clock, before = [], Clock(), gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        interleave({"a": Asks(clock, 1.0)}, rounds=2, steps=1, clock=clock)
        assert seen == [False, False]
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if before else gc.disable)()


def test_garbage_is_collected_again_after_an_error():
    class Fails(Work):
        def step(self):
            raise RuntimeError("no")

    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        interleave({"a": Fails(Clock(), 1.0)}, rounds=1, steps=1, clock=Clock())
    assert gc.isenabled()


@hypothesis.given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_quartiles_are_those_of_numpy(numbers):
    found = quartiles(numbers)
    expected = np.percentile(numbers, [50, 25, 75])
    assert np.allclose(found, expected, rtol=1e-12)


@hypothesis.given(st.floats(1e-9, 10), st.floats(0, 10), st.integers(1, 1000))
def test_a_burst_is_long_enough_unless_it_has_all_its_steps(seconds, step_seconds, most):
    steps = steps_for(seconds, step_seconds, most)
    assert 1 <= steps <= most
    assert steps == most or steps * max(step_seconds, 1e-9) >= seconds * (1 - 1e-9)
    assert steps == 1 or (steps - 1) * step_seconds < seconds


def test_the_quartiles_of_nothing_are_an_error():
    with pytest.raises(Exception, match="data point"):
        quartiles([])


def test_without_a_time_the_number_of_rounds_decides():
    clock = Clock()
    times = interleave({"a": Work(clock, 1e9)}, rounds=3, steps=1, seconds=math.inf, clock=clock)
    assert len(times["a"]) == 3
