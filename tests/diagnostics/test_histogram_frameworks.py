"""Tables counted by each framework, compiled or not, against the one counted by NumPy.

A framework that cannot be imported fails this module; none is left out.
"""

from __future__ import annotations

import doctest
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch
from jax.experimental.sparse import BCOO

import lossscale.diagnostics
from lossscale.diagnostics import GradientHistogram
from lossscale.errors import ArgumentTypeError
from lossscale.jax import exponents as on_jax
from lossscale.tensorflow import exponents as on_tensorflow
from lossscale.torch import exponents as on_torch


class Way(NamedTuple):
    """A way to count: the module, what makes its tensors, and what compiles it."""

    module: Any
    tensor: Callable[[Any], Any]
    compiled: Callable[[Any], Any] = lambda function: function
    float64: bool = True


def torch_tensor(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == ml_dtypes.float8_e5m2:
        return torch.tensor(array.view(np.uint8)).view(torch.float8_e5m2)
    return torch.tensor(array)


WAYS = {
    "tensorflow": Way(on_tensorflow, tf.constant),
    "tensorflow-function": Way(on_tensorflow, tf.constant, tf.function),
    "tensorflow-xla": Way(on_tensorflow, tf.constant, lambda f: tf.function(f, jit_compile=True)),
    # JAX has 64-bit numbers only if told so for the whole process.
    "jax": Way(on_jax, jnp.asarray, float64=False),
    "jax-jit": Way(on_jax, jnp.asarray, jax.jit, float64=False),
    "torch": Way(on_torch, torch_tensor),
}

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.fixture(params=WAYS, scope="module")
def way(request):
    return WAYS[request.param]


# What is compiled for one size and dtype serves every test that keeps to these sizes.
@functools.cache
def counter(way):
    return way.compiled(way.module.count_bins)


SIZE = 5000
PIECE = 2**16
LONG = 3 * PIECE + 7


def histogram(way, tensor):
    return GradientHistogram.from_table(way.module.on_host(counter(way)(tensor)))


def every_kind_of_number(dtype, size=SIZE):
    """Numbers whose bits are random: all exponents, subnormals, infinities and NaNs; and zeros."""
    rng, width = np.random.default_rng(0), np.dtype(dtype).itemsize
    bits = rng.integers(0, 2 ** (8 * width), size, dtype=f"u{width}")
    values = bits.view(dtype).copy()
    values[:100] = 0
    # The subnormals of a wide format come up too rarely.
    values[100:200] = (bits[100:200] % 100).view(dtype)
    values[200:204] = np.array([np.inf, -np.inf, np.nan, -0.0]).astype(dtype)
    return values


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_number_is_counted_as_by_numpy(way, dtype):
    if dtype == "float64" and not way.float64:
        pytest.skip("JAX is used with 32-bit numbers here")
    values = every_kind_of_number(DTYPES[dtype])
    expected = GradientHistogram.from_array(values)
    assert expected.zeros
    assert expected.infs
    assert expected.nans
    assert histogram(way, way.tensor(values)) == expected


def normal(*shape):
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


# How many pieces there are, Python decides by the shape, compiled or not.
@pytest.mark.parametrize("name", ["tensorflow", "jax-jit", "torch"])
@pytest.mark.parametrize("size", [PIECE, PIECE + 1])
def test_a_piece_and_one_element_more(name, size):
    way, values = WAYS[name], normal(size)
    values[-1] = 1000.0
    assert histogram(way, way.tensor(values)) == GradientHistogram.from_array(values)
    # The rest of the last piece is filled up, and not counted.
    counted = histogram(way, way.tensor(np.zeros(size, np.float32)))
    assert counted == GradientHistogram(zeros=size)


def test_long_gradients_are_counted_in_pieces(way):
    values = normal(LONG)
    values[-1] = 1000.0
    assert histogram(way, way.tensor(values)) == GradientHistogram.from_array(values)


def test_nothing_but_zeros(way):
    counted = histogram(way, way.tensor(np.zeros(LONG, np.float32)))
    assert counted == GradientHistogram(zeros=LONG)


# The second has the greatest fraction that there is.
@pytest.mark.parametrize("value", [1 + 2.0**-23, 2 - 2.0**-23])
def test_sums_do_not_stall(way, value):
    # In float32 a sum of these would lose some long before it stood still.
    values = np.full(LONG, value, np.float32)
    counted = histogram(way, way.tensor(values))
    assert counted == GradientHistogram.from_array(values)
    assert counted.mass == LONG * value


@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2), (20, 10, 25)], ids=str)
def test_any_shape(way, shape):
    values = normal(*shape)
    assert histogram(way, way.tensor(values)) == GradientHistogram.from_array(values)


def test_subnormals_are_not_flushed_by_what_produced_them(way):
    # Smaller than any number of float16 that has full precision, and than any of float32.
    for dtype, small in ((np.float16, 2.0**-24), (np.float32, 2.0**-149)):
        counted = histogram(way, way.tensor(np.full(SIZE, small, dtype)))
        assert (counted.nonzeros, counted.amax) == (SIZE, small)


def test_complex_numbers_count_in_both_parts(way):
    values = np.array([1 + 2j, 0 - 3j, complex(np.inf, 0.5)], np.complex64)
    parts = np.concatenate([values.real, values.imag])
    assert histogram(way, way.tensor(values)) == GradientHistogram.from_array(parts)


def test_integers_are_refused(way):
    with pytest.raises(ArgumentTypeError, match=r"floating-point numbers.*int32"):
        histogram(way, way.tensor(np.array([1, 2], np.int32)))


VALUES = np.array([[1.0, 2.0], [0.0, 4.0]], np.float32)


@pytest.mark.parametrize(
    "sparse",
    [
        lambda: tf.IndexedSlices(tf.constant(VALUES), tf.constant([5, 1]), tf.constant([9, 2])),
        lambda: BCOO((jnp.asarray(VALUES), jnp.array([[5], [1]])), shape=(9, 2)),
        lambda: torch.sparse_coo_tensor(
            torch.tensor([[5, 1]]), torch.tensor(VALUES), (9, 2), check_invariants=True
        ),
        lambda: torch.sparse_csr_tensor(
            torch.tensor([0, 2, 4]),
            torch.tensor([0, 1, 0, 1]),
            torch.tensor(VALUES.ravel()),
            (2, 2),
            check_invariants=True,
        ),
    ],
    ids=["IndexedSlices", "BCOO", "torch-coo", "torch-csr"],
)
# PyTorch says so itself, of every tensor of this layout.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_of_sparse_gradients_the_stored_values_count(sparse):
    assert GradientHistogram.from_array(sparse()) == GradientHistogram.from_array(VALUES)


def test_slices_of_unknown_size_are_counted_in_a_compiled_function():
    @tf.function(
        input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int64)],
        jit_compile=True,
    )
    def counted(values, indices):
        return on_tensorflow.count_bins(tf.IndexedSlices(values, indices))

    table = on_tensorflow.on_host(counted(VALUES, [5, 1]))
    assert GradientHistogram.from_table(table) == GradientHistogram.from_array(VALUES)


@pytest.mark.parametrize(
    "make",
    [tf.constant, tf.Variable, jnp.asarray, torch.tensor, keras.Variable],
    ids=["tf-constant", "tf-variable", "jax", "torch", "keras-variable"],
)
def test_from_array_takes_tensors_and_variables(make):
    assert GradientHistogram.from_array(make(VALUES)) == GradientHistogram.from_array(VALUES)


def test_a_torch_tensor_that_needs_a_gradient_or_lies_in_strides():
    tensor = torch.tensor(VALUES, requires_grad=True)
    expected = GradientHistogram.from_array(VALUES)
    assert GradientHistogram.from_array(tensor) == expected
    assert GradientHistogram.from_array(tensor.T) == expected
    assert GradientHistogram.from_array(torch.tensor(VALUES * 1j).conj()).nonzeros == 3


def test_the_second_step_does_not_trace_again():
    traced = []

    def count(tensor):
        traced.append(1)
        return on_jax.count_bins(tensor)

    step = jax.jit(count)
    for seed in range(3):
        step(jnp.asarray(np.random.default_rng(seed).standard_normal(7).astype(np.float32)))
    assert len(traced) == 1


def test_jax_counts_float64_where_it_is_on():
    values = every_kind_of_number(np.float64)
    with jax.enable_x64(True):
        table = on_jax.on_host(jax.jit(on_jax.count_bins)(jnp.asarray(values)))
    assert GradientHistogram.from_table(table) == GradientHistogram.from_array(values)


@pytest.mark.parametrize("module", [on_jax, on_tensorflow, on_torch], ids=lambda m: m.__name__)
def test_the_examples_print_what_they_show(module):
    failed, tried = doctest.testmod(module, globs={**vars(module), "lossscale": lossscale})
    assert (failed, tried > 0) == (0, True)
