"""What is done before anything is timed: the work of all methods is compared."""

import contextlib
import types

import numpy as np
import pytest

from benchmarks import measure as measured
from benchmarks.measure import TooBigError, WrongResultError, measure
from benchmarks.plan import SKIPS, Row
from benchmarks.workloads import equal


class Descent:
    """Gradient descent in NumPy, with whatever a test does to it."""

    fresh_each_step = False

    def __init__(self, workload, scaled, spoil):
        self.values, self.gradients = workload.values(), workload.gradients()
        self.skips = scaled and workload.overflows
        self.spoil, self.traces, self.steps = spoil, 0, 0

    def prepare(self):
        pass

    def wait(self):
        pass

    def step(self):
        self.steps += 1
        if not self.skips:
            self.values = [v - g for v, g in zip(self.values, self.gradients, strict=True)]
        self.spoil(self)

    def parameters(self):
        return self.values

    def structure(self):
        return {"memory_bytes": 0, "graph_size": 1}


def framework(**spoilers):
    """A framework whose programs are `Descent`; `ours_dynamic=spoil` spoils that method's."""

    def apply(method, workload, new_inner, *, mode, scale):
        name = next(name for name, known in measured.METHODS.items() if known is method)
        return Descent(workload, method.scaled, spoilers.get(name, lambda program: None))

    return types.SimpleNamespace(
        Apply=apply,
        optimizers=lambda shell: None,
        on_device=lambda device: contextlib.nullcontext(),
        forget=lambda: None,
    )


def row(*methods, **settings):
    """A row of a small workload."""
    return Row("small", "numpy", "eager", methods, workload=equal(2, 20), **settings)


def test_what_is_found_is_a_ratio_for_each_method():
    names = ("bare", "ours_dynamic", "peer_dynamic")
    found = measure(row(*names, structure=True), framework(), rounds=3)
    assert found["rounds"] == 3
    assert tuple(found["methods"]) == names
    assert found["methods"]["bare"]["ratio"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
    for method in found["methods"].values():
        assert method["seconds"]["median"] > 0
        assert method["graph_size"] == 1


def off_by_one_bit(program):
    program.values[1][3] = np.nextafter(program.values[1][3], np.float32(9))


def far_off(program):
    program.values[1][3] += 1


def test_one_wrong_bit_of_ours_stops_the_row():
    with pytest.raises(WrongResultError, match="eager cpu small Adam ours_dynamic: variable 1"):
        measure(row("bare", "ours_dynamic"), framework(ours_dynamic=off_by_one_bit), rounds=1)


def test_a_peer_may_round_otherwise():
    measure(row("bare", "peer_dynamic"), framework(peer_dynamic=off_by_one_bit), rounds=1)


def test_but_it_must_do_the_same():
    with pytest.raises(WrongResultError, match="peer_dynamic: variable 1 is off by up to"):
        measure(row("bare", "peer_dynamic"), framework(peer_dynamic=far_off), rounds=1)


def test_a_method_that_does_nothing_is_no_baseline():
    def undo(program):
        program.values = equal(2, 20).values()

    with pytest.raises(WrongResultError, match="bare: no weight changed"):
        measure(row("bare"), framework(bare=undo), rounds=1)


def test_a_skipped_step_must_change_nothing():
    found = measure(row(*SKIPS), framework(), rounds=2)
    assert found["methods"]["ours_dynamic/skipped"]["ratio_to_applied"]["median"] > 0
    assert "ratio_to_applied" not in found["methods"]["ours_dynamic"]

    def changes(program):
        if program.skips:
            off_by_one_bit(program)

    with pytest.raises(WrongResultError, match="peer_dynamic/skipped: variable 1"):
        measure(row(*SKIPS), framework(peer_dynamic=changes), rounds=2)


def test_so_few_steps_overflow_that_a_scale_stays_a_normal_number():
    seen = []
    counted = framework(peer_dynamic=lambda program: seen.append(program) if program.skips else 0)
    found = measure(row(*SKIPS), counted, rounds=10_000)
    assert found["rounds"] * found["steps_per_round"] <= measured.MOST_OVERFLOWS
    assert np.float32(2.0**15) * np.float32(2.0 ** -len(seen)) >= np.finfo(np.float32).tiny


def test_a_second_trace_while_it_is_timed_stops_the_row():
    def traces(program):
        program.traces += 1

    with pytest.raises(WrongResultError, match="it was traced again"):
        measure(row("bare", "ours_dynamic"), framework(ours_dynamic=traces), rounds=1)


def fails(program):
    raise TypeError("no such thing")


def test_a_peer_that_does_not_run_is_told():
    found = measure(row("bare", "peer_fixed"), framework(peer_fixed=fails), rounds=1)
    assert found["methods"]["peer_fixed"] == {"does_not_run": "TypeError: no such thing"}


def test_ours_has_to_run():
    with pytest.raises(TypeError, match="no such thing"):
        measure(row("bare", "ours_fixed"), framework(ours_fixed=fails), rounds=1)


def test_a_row_that_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(measured, "available", lambda: 100)
    with pytest.raises(TooBigError, match="GiB of memory"):
        measure(row("bare"), framework(), rounds=1)
    monkeypatch.setattr(measured, "available", lambda: None)
    assert measure(row("bare"), framework(), rounds=1)["rounds"] == 1
