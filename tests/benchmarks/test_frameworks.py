"""What the programs of the benchmarks do, where the short form would not show it."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest

from benchmarks.methods import TORCH
from benchmarks.rows import Row, table
from benchmarks.workloads import Workload, equal
from quickly import compiling_quickly


def test_the_bytes_of_a_sum_are_those_of_all_its_arrays():
    from benchmarks.frameworks import jax

    program = """
      %all-reduce = (f32[10,2]{1,0}, pred[], bf16[3]{0}) all-reduce(%a, %b, %c), to_apply=%add
      %start = f32[] all-reduce-start(%d), to_apply=%add
      %no = f32[7]{0} add(%all-reduce, %e)
    """
    sums = jax._SUM.findall(program)
    assert [jax._bytes(result) for result in sums] == [80 + 1 + 6, 4]


def test_every_wait_for_the_host_is_counted():
    import torch

    from benchmarks.frameworks.torch import Calls

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
    """Makes programs on TensorFlow; the tests of this folder run with it."""
    import keras

    if keras.backend.backend() != "tensorflow":
        pytest.skip("another backend")
    from benchmarks.frameworks.tensorflow import FRAMEWORK

    return FRAMEWORK


def program(framework, name, workload, mode):
    """A program for a method."""
    row = Row("small", "keras-tensorflow", mode, (name,), workload=workload, optimizer="SGD")
    return framework.program(row, name, True)


def test_a_bare_step_is_gradient_descent(tensorflow):
    """The other methods are held to it before they are timed."""
    workload = equal(2, 20)
    made = program(tensorflow, "bare", workload, "function")
    for _ in range(2):
        made.step()
    made.wait()
    expected = [
        value - np.float32(0.01) * gradient - np.float32(0.01) * gradient
        for value, gradient in zip(workload.values(), workload.gradients(), strict=True)
    ]
    for found, wanted in zip(made.parameters(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8)


def test_a_sparse_step_moves_the_rows_it_touches(tensorflow):
    workload = Workload(((12, 2),), rows_touched=3)
    (gradient,), (before,) = workload.gradients(), workload.values()
    made = program(tensorflow, "bare", workload, "function")
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


@pytest.fixture
def _compiled_quickly():
    with compiling_quickly("jax"):
        yield


@pytest.mark.usefixtures("_compiled_quickly")
@pytest.mark.parametrize("model", ["", "mlp", "cnn", "transformer"])
def test_the_methods_of_optax_come_to_the_same_parameters(model):
    from benchmarks.frameworks.optax import FRAMEWORK

    row = next(row for row in table("optax") if row.model == model)
    row = dataclasses.replace(row, mode="jit", workload=None if model else equal(3, 60))
    found = {}
    for name in ("lossscale",) if model in ("cnn", "transformer") else row.methods:
        made = FRAMEWORK.program(row, name, True)
        before = np.concatenate([value.ravel() for value in made.parameters()])
        # The scale of the convolutional network is too large at first.
        for _ in range(8 if model == "cnn" else 2):
            made.step()
        found[name] = np.concatenate([value.ravel() for value in made.parameters()])
        assert 1e-4 < np.max(np.abs(found[name] - before)) < 1e-3
        assert model == "" or np.isfinite(made._read)
    # In float16 the gradients of an unscaled loss are others.
    for name in {"lossscale", "jmp", "flax"} & set(found) if model else found:
        np.testing.assert_allclose(found[name], found["lossscale"], rtol=0, atol=1e-6)


def test_the_methods_of_pytorch_come_to_the_same_gradients():
    import torch

    from benchmarks.frameworks.torch_native import FRAMEWORK

    fused = next(row for row in table("torch_native") if row.case == "backward")
    row = dataclasses.replace(fused, workload=equal(3, 12))
    assert row.methods == TORCH
    gradients = {}
    for name in TORCH:
        made = FRAMEWORK.program(row, name, True)
        made.prepare()
        made.step()
        gradients[name] = [tensor.grad.clone() for tensor in made._tensors]
    for name, found in gradients.items():
        # torch.amp.GradScaler leaves those that a fused optimizer divides as that leaves them.
        expected = gradients["bare, clip" if name.endswith("clip") else "bare"]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
