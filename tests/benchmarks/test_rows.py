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


def test_no_gradient_is_zero_or_so_small_that_scaling_it_rounds():
    workload = equal(1, 100_000)
    (gradient,), (scaled,) = workload.gradients(), workload.gradients(2.0**15)
    assert np.all(np.abs(gradient) > 2.0**-100)
    assert np.all(np.isfinite(scaled))
    assert np.array_equal(scaled / np.float32(2**15), gradient)


def test_one_infinity_overflows_a_step():
    workload = equal(3, 30)
    found, expected = (np.concatenate(workload.gradients(overflow=o)) for o in (True, False))
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


def test_sizes_are_as_documented():
    for backend in BACKENDS[:4]:
        big = [row.workload for row in rows_of(backend, ["big"])]
        assert {(len(work.shapes), work.parameters) for work in big} == {(100, 10_000_000)}
        assert {row.workload.shapes for row in rows_of(backend, ["small"])} == {((1000,),) * 200}
    parameters = [row.workload.parameters for row in rows_of("jax", ["parameters"])]
    assert parameters == [10**power for power in range(4, 9)]
    variables = [len(row.workload.shapes) for row in rows_of("torch", ["variables"])]
    assert variables == [1, 10, 100, 1000]


def test_peers_of_optax_that_compile_for_minutes_are_left_out():
    methods = {len(row.workload.shapes): row.methods for row in rows_of("optax", ["alone"])}
    assert set(methods[100]) - set(methods[200]) == {"jmp", "flax"}
    # Operation by operation there is no floor.
    assert set(methods[100]) - set(methods[10]) == {"read"}


def test_pytorch_decides_on_the_device_only_with_a_fused_optimizer():
    assert {row.mode for row in table("torch_native") if "device" in row.methods} == {"fused"}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_case_has_something_to_do(case, quick):
    processes = [p for b in BACKENDS for p in Process(b, [case], ALL_MODES, quick).split()]
    assert processes
    assert all({row.case for row in process.rows()} == {case} for process in processes)


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
