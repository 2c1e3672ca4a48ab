"""The table of rows, and what the optimizers in it work on."""

import numpy as np
import pytest

from benchmarks.rows import ALL_MODES, BACKENDS, CASES, MODES, Process, table
from benchmarks.workloads import Rows, Workload, equal


def rows_of(backend, cases=CASES, quick=False):
    """The rows of some cases."""
    processes = Process(backend, cases, MODES[backend], quick).split()
    return [row for process in processes for row in process.rows()]


def test_they_are_the_same_every_time():
    workload = Workload(((3, 4), (5,)))
    for made in (workload.values, workload.gradients):
        first, second = made(), made()
        assert [one.shape for one in first] == [(3, 4), (5,)]
        assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
        assert all(one.dtype == np.float32 for one in first)


def test_no_gradient_is_lost_by_scaling_and_one_infinity_overflows_a_step():
    workload = equal(1, 100_000)
    (gradient,), (scaled,) = workload.gradients(), workload.gradients(2.0**15)
    assert np.all(np.abs(gradient) > 2.0**-100)
    assert np.all(np.isfinite(scaled))
    assert np.array_equal(scaled / np.float32(2**15), gradient)
    (overflowing,) = workload.gradients(overflow=True)
    assert np.sum(~np.isfinite(overflowing)) == np.sum(overflowing != gradient) == 1


def test_a_sparse_gradient_touches_different_rows():
    (gradient,) = Workload(((40, 4),), rows_touched=8).gradients()
    assert isinstance(gradient, Rows)
    assert gradient.values.shape == (8, 4)
    assert len(set(gradient.rows)) == 8
    assert 0 <= min(gradient.rows) <= max(gradient.rows) < 40


def test_parameters_that_do_not_divide_are_an_error():
    assert equal(4, 12).parameters == 12
    with pytest.raises(ValueError, match="13 parameters do not divide into 4 variables"):
        equal(4, 13)


def test_every_case_and_no_other_is_in_the_tables():
    rows = [row for backend in BACKENDS for row in table(backend)]
    assert {row.case for row in rows} == set(CASES)
    assert {row.mode for row in rows} == set(ALL_MODES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_short_form_runs_every_mode_and_every_case(backend):
    short, whole = rows_of(backend, quick=True), rows_of(backend)
    assert len(short) < len(whole)
    for field in ("case", "mode", "model"):
        assert {getattr(row, field) for row in short} == {getattr(row, field) for row in whole}
    for row in (*short, *whole):
        # What the others are compared with comes first.
        assert row.methods[0] in ("bare", "no monitor") or row.timing is None
        assert len(set(row.methods)) == len(row.methods)
        clips = [name for name in row.methods if name.endswith(", clip")]
        assert clips == [] or clips[0] == "bare, clip"


def test_with_a_gpu_every_row_that_is_timed_runs_on_it_too():
    process = Process("torch", ("host_syncs", "big", "monitor"), ("eager", "fit"))
    found = [(row.case, row.device) for row in process.rows(["cpu", "gpu"])]
    timed = [(case, device) for device in ("cpu", "gpu") for case in ("big", "monitor")]
    # Last, because it leaves compiled code behind.
    assert found == [*timed, ("host_syncs", "cpu")]


def test_replicas_get_processes_of_their_own():
    found = Process("tensorflow", ["replicas", "big"], ["function"]).split()
    assert [(p.devices, [(row.case, row.point) for row in p.rows()]) for p in found] == [
        (1, [("big", ""), ("replicas", "1")]),
        (2, [("replicas", "2")]),
        (4, [("replicas", "4")]),
    ]
