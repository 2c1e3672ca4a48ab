"""The variables and gradients that the benchmarks work on."""

import numpy as np
import pytest

from benchmarks.plan import BACKENDS, CASES, MODES, Process, processes, rows
from benchmarks.workloads import Rows, Workload, equal


def of_case(backend, case, quick=False):
    """The rows of a case."""
    return rows(Process(backend, (case,), MODES[backend]), ["cpu"], quick)


def test_they_are_the_same_every_time():
    workload = Workload(((3, 4), (5,)))
    for made in (workload.values, workload.gradients):
        first, second = made(), made()
        assert [one.shape for one in first] == [(3, 4), (5,)]
        assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
        assert all(one.dtype == np.float32 for one in first)


def test_no_gradient_is_zero_or_so_small_that_scaling_it_rounds():
    (gradient,) = equal(1, 100_000).gradients()
    assert np.all(np.abs(gradient) > 2.0**-100)
    assert np.all(np.isfinite(gradient * np.float32(2**15)))


def test_one_infinity_overflows_a_step():
    workload = equal(3, 30)
    found = np.concatenate(workload.overflowing().gradients())
    expected = np.concatenate(workload.gradients())
    assert np.sum(~np.isfinite(found)) == 1
    assert np.sum(found != expected) == 1


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_big_and_small_are_as_documented(backend):
    for row in of_case(backend, "big"):
        assert (len(row.workload.shapes), row.workload.parameters) == (100, 10_000_000)
    for row in of_case(backend, "small"):
        assert row.workload.shapes == ((1000,),) * 200


def test_the_sweeps_go_as_far_as_documented():
    assert [row.workload.parameters for row in of_case("jax", "parameters")] == [
        10**power for power in range(4, 9)
    ]
    assert [len(row.workload.shapes) for row in of_case("torch", "variables")] == [1, 10, 100, 1000]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_case_has_something_to_do(case, quick):
    found = processes(BACKENDS, [case], [m for modes in MODES.values() for m in modes], quick)
    assert found
    for process in found:
        assert rows(process, ["cpu"], quick) or case in ("collectives", "host_syncs")


@pytest.mark.parametrize("quick", [False, True])
def test_every_row_begins_with_the_bare_optimizer(quick):
    for backend in BACKENDS:
        for row in rows(Process(backend, tuple(CASES), MODES[backend]), ["cpu"], quick):
            assert row.methods[0] == "bare"
            assert len(set(row.methods)) == len(row.methods)


def test_with_a_gpu_every_row_runs_on_it_too():
    process = Process("torch", ("big", "mlp"), ("eager",))
    on_cpu, both = rows(process, ["cpu"], False), rows(process, ["cpu", "gpu"], False)
    assert [row.device for row in both] == ["cpu"] * len(on_cpu) + ["gpu"] * len(on_cpu)


def test_replicas_get_processes_of_their_own():
    found = processes(["tensorflow"], ["replicas", "big"], ["function"], False)
    assert [(process.devices, process.cases) for process in found] == [
        (1, ("replicas", "big")),
        (2, ("replicas",)),
        (4, ("replicas",)),
    ]
    for process in found:
        points = [row.point for row in rows(process, ["cpu"], False) if row.case == "replicas"]
        assert points == [str(process.devices)]
