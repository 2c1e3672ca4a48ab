"""What the programs of the benchmarks do, where the short form would not show it."""

import gc
import weakref

import numpy as np
import pytest

from benchmarks.methods import METHODS, SCALE
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.workloads import Workload, equal


def test_the_bytes_of_a_sum_are_those_of_all_its_arrays():
    pytest.importorskip("jax")
    from benchmarks.frameworks import collectives_jax

    program = """
      %all-reduce = (f32[10,2]{1,0}, pred[], bf16[3]{0}) all-reduce(%a, %b, %c), to_apply=%add
      %start = f32[] all-reduce-start(%d), to_apply=%add
      %no = f32[7]{0} add(%all-reduce, %e)
    """
    sums = collectives_jax._SUM.findall(program)
    assert [collectives_jax._bytes(result) for result in sums] == [80 + 1 + 6, 4]


def test_every_wait_for_the_host_is_counted():
    torch = pytest.importorskip("torch")
    from benchmarks.frameworks.keras_torch import Calls

    tensor = torch.ones(3)
    with Calls() as counted:
        total = tensor.sum()
        assert float(total) == 3
        assert bool(total > 2)
        assert tensor.tolist() == [1, 1, 1]
    assert counted.host_syncs == 3
    assert counted.calls == 4


@pytest.fixture(scope="module")
def tensorflow():
    """The module of the programs on TensorFlow; the tests of this folder run with it."""
    import keras

    if keras.backend.backend() != "tensorflow":
        pytest.skip("another backend")
    from benchmarks.frameworks import keras_tensorflow

    return keras_tensorflow


def program(framework, name, workload, mode, optimizer="SGD"):
    """A program for a method."""
    optimizers = framework.optimizers("keras-tensorflow")

    def new_inner(**settings):
        return OPTIMIZERS[optimizer](optimizers, **settings)

    return framework.Apply(METHODS[name], workload, new_inner, mode=mode, scale=SCALE)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_gradient_descent(tensorflow, name):
    workload = equal(2, 20)
    made = program(tensorflow, name, workload, "function")
    for _ in range(2):
        made.step()
    made.wait()
    expected = [
        value - np.float32(0.01) * gradient - np.float32(0.01) * gradient
        for value, gradient in zip(workload.values(), workload.gradients(), strict=True)
    ]
    for found, wanted in zip(made.parameters(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["bare", "ours_dynamic", "read", "unscale"])
def test_a_sparse_step_moves_the_rows_it_touches(tensorflow, name):
    workload = Workload(((12, 2),), rows_touched=3)
    (gradient,), (before,) = workload.gradients(), workload.values()
    made = program(tensorflow, name, workload, "function")
    made.step()
    made.wait()
    (after,) = made.parameters()
    moved = np.flatnonzero(np.any(after != before, axis=1))
    assert list(moved) == list(gradient.rows)


@pytest.mark.parametrize("mode", ["function", "xla"])
def test_the_graph_of_a_program_that_is_gone_is_let_go(tensorflow, mode):
    made = program(tensorflow, "bare", equal(2, 20), mode)
    made.step()
    made.wait()
    graph = weakref.ref(made._run.get_concrete_function().graph)
    assert graph() is not None
    del made
    tensorflow.forget()
    gc.collect()
    assert graph() is None
