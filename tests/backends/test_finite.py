"""The finite check of each backend against NumPy's, element by element."""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from backends.support import BACKEND, number
from compile_options import compiling_quickly
from lossscale.keras import backends

# Below and above the size from which on a gradient is read by its sum.
SIZES = [1, 5, 2**14 - 1, 2**14, 20_011]
LARGEST = float(np.finfo(np.float32).max)
ELEMENTS = [0.0, -0.0, 1.0, -1e-45, 1e-38, LARGEST, -LARGEST, 65504.0, np.inf, -np.inf, np.nan]
SCALES = [None, 1.0, 2.0**15, 1000.0, 0.5, 2.0**-100]


def is_exact(scale):
    """Whether it is a power of two, by which nothing is rounded."""
    return scale is not None and np.frexp(scale)[0] == 0.5


cases = st.lists(
    st.tuples(
        st.sampled_from(SIZES),
        st.sampled_from(["float32", "float16"]),
        st.sampled_from([1.0, 0.0, 2.0**-120, 60000.0, 1e37, -LARGEST]),
        st.lists(st.tuples(st.integers(0, 2**15), st.sampled_from(ELEMENTS)), max_size=2),
    ),
    min_size=1,
    max_size=3,
)


def array(size, dtype, filling, elements):
    with np.errstate(over="ignore"):
        made = np.full(size, filling).astype(dtype)
        for index, value in elements:
            made[index % size] = value
    return made


def compiled(function):
    if BACKEND == "torch":
        # Compiled steps break off at the verdict there.
        return function
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=True)


def tensors(arrays):
    import keras

    return [keras.ops.convert_to_tensor(a) for a in arrays]


def check(verdict, arrays, scale):
    given = [] if scale is None else tensors([np.float32(scale)])
    found = bool(number(verdict([*tensors(arrays), None], *given)))
    with np.errstate(over="ignore", invalid="ignore"):
        divided = [a.astype(np.float32) / np.float32(scale or 1.0) for a in arrays]
    assert found == all(np.isfinite(a).all() for a in divided), scale


def verdict_with(exact):
    return lambda gradients, scale=None: backends.load().arrays.all_finite(gradients, scale, exact)


@hypothesis.given(cases=cases, scale=st.sampled_from(SCALES))
@hypothesis.settings(max_examples=60, deadline=None)
def test_it_finds_what_numpy_finds(cases, scale):
    exact = scale is None or is_exact(scale)
    with compiling_quickly():
        check(verdict_with(exact), [array(*case) for case in cases], scale)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
# A scale is an argument of what is compiled: one program for each way to take it.
@pytest.mark.parametrize(
    "scales",
    [[None], [scale for scale in SCALES if is_exact(scale)], [1000.0]],
    ids=["unscaled", "exact", "inexact"],
)
def test_it_finds_the_same_in_compiled_functions(scales, dtype):
    function = compiled(verdict_with(exact=scales != [1000.0]))
    for scale, filling, element, place in itertools.product(
        scales, (1.0, 2.0**-120, 1e37, -LARGEST), (0.0, LARGEST, np.inf, -np.inf, np.nan), (0, 1)
    ):
        arrays = [array(size, dtype, filling, []) for size in (5, 20_000)]
        with np.errstate(over="ignore"):
            arrays[place][-1] = element
        check(function, arrays, scale)


def test_nothing_to_look_at_is_finite():
    backend = backends.load().arrays
    assert bool(number(backend.all_finite([])))
    assert bool(number(backend.all_finite([None])))
    assert bool(number(backend.all_finite(tensors([np.zeros((0, 3), np.float32)]))))


@pytest.mark.parametrize("value", [np.inf, np.nan, 1.0])
def test_the_imaginary_part_counts(value):
    backend = backends.load().arrays
    spoiled = np.ones(3, np.complex64)
    spoiled[1] = complex(1.0, value)
    assert bool(number(backend.all_finite(tensors([spoiled])))) == np.isfinite(value)
