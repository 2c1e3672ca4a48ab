"""What is done before anything is timed: the work of all methods, and what memory there is."""

import math

import numpy as np
import pytest

from benchmarks import measure as measured
from benchmarks.frameworks import Framework
from benchmarks.machine import available, peak_above_rest
from benchmarks.measure import TooBigError, WrongResultError, measure
from benchmarks.methods import SKIPPED
from benchmarks.rows import SKIPS, Row
from benchmarks.timing import Program
from benchmarks.workloads import equal

WORK = equal(2, 20)
MEBIBYTE = 2**20


class Descent(Program):
    """Gradient descent in NumPy, with whatever a test does to it."""

    def __init__(self, skips, spoil):
        self.values, self.gradients = WORK.values(), WORK.gradients()
        self.skips, self.spoil = skips, spoil

    def step(self):
        if not self.skips:
            self.values = [v - g for v, g in zip(self.values, self.gradients, strict=True)]
        self.spoil(self)

    def parameters(self):
        return self.values

    def structure(self):
        return {"memory_bytes": 0, "graph_size": 1}


def found(*methods, rounds=1, spoil=lambda program: None, whose="", **settings):
    """What is measured of a small row, with one method's programs spoiled."""

    def program(row, name, small):
        is_it = name.removesuffix(SKIPPED) == whose
        return Descent(name.endswith(SKIPPED), spoil if is_it else lambda program: None)

    row = Row("small", "numpy", "eager", methods, workload=WORK, **settings)
    return measure(row, Framework(program), rounds=rounds)


def off_by_one_bit(program):
    program.values[1][3] = np.nextafter(program.values[1][3], np.float32(9))


def far_off(program):
    program.values[1][3] += 1


def undo(program):
    program.values = WORK.values()


def change_if_skipped(program):
    if program.skips:
        off_by_one_bit(program)


def trace(program):
    program.traces += 1


def fail(program):
    raise TypeError("no such thing")


OURS, PEER, WRONG = ("bare", "ours_dynamic"), ("bare", "peer_dynamic"), WrongResultError


@pytest.mark.parametrize(
    ("methods", "spoil", "error", "message"),
    [
        (OURS, off_by_one_bit, WRONG, "numpy eager cpu small Adam ours_dynamic: variable 1 is off"),
        (PEER, far_off, WRONG, "peer_dynamic: variable 1 is off by up to"),
        (("bare",), undo, WRONG, "bare: no weight changed"),
        (SKIPS, change_if_skipped, WRONG, "peer_dynamic/skipped: variable 1"),
        (OURS, trace, WRONG, "it was traced again"),
        (OURS, fail, TypeError, "no such thing"),
    ],
)
def test_a_method_that_does_something_else_stops_the_row(methods, spoil, error, message):
    with pytest.raises(error, match=message):
        found(*methods, spoil=spoil, whose=methods[-1].removesuffix(SKIPPED))


def test_a_peer_may_round_otherwise_and_one_that_does_not_run_is_told():
    found("bare", "peer_dynamic", spoil=off_by_one_bit, whose="peer_dynamic")
    result = found("bare", "peer_fixed", spoil=fail, whose="peer_fixed")
    assert result["methods"]["peer_fixed"] == {"does_not_run": "TypeError: no such thing"}


def test_so_few_steps_overflow_that_a_scale_stays_a_normal_number():
    seen = []

    def count(program):
        seen.extend([program] * program.skips)

    result = found(*SKIPS, rounds=10_000, spoil=count, whose="peer_dynamic")
    assert result["rounds"] * result["steps_per_round"] <= measured.MOST_OVERFLOWS
    assert np.float32(2.0**15) * np.float32(2.0 ** -len(seen)) >= np.finfo(np.float32).tiny


def test_the_peak_of_memory_is_what_was_held_at_once():
    nothing = peak_above_rest(lambda: None)
    if nothing is None:
        pytest.skip("this system does not tell")
    assert nothing < 16 * MEBIBYTE
    for _ in range(2):
        # Each is given back before the next is made.
        peak = peak_above_rest(lambda: [np.ones(64 * MEBIBYTE, np.uint8).size for _ in range(2)])
        assert 60 * MEBIBYTE < peak < 100 * MEBIBYTE


def test_a_row_that_does_not_fit_is_left_out(monkeypatch):
    assert available() > 0
    monkeypatch.setattr(measured, "available", lambda: 100)
    with pytest.raises(TooBigError, match="GiB of memory"):
        found("bare")
    monkeypatch.setattr(measured, "available", lambda: math.inf)
    assert found("bare")["rounds"] == 1


def test_a_step_of_many_takes_the_time_of_one():
    def is_many(program):
        program.inner_steps = 1000

    result = found("bare", "ours_dynamic", rounds=3, spoil=is_many, whose="ours_dynamic")
    one, many = (method["seconds"]["median"] for method in result["methods"].values())
    assert 0 < many < one / 10
