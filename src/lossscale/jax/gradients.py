"""Gradients as JAX arrays: scaling, unscaling and the overflow check."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.sparse import BCOO

from lossscale.common.sizes import SMALL, grouped_by_size
from lossscale.jax.apply_or_skip import ArrayTree, has_sharding, may_be_sharded, static_size

Gradient: TypeAlias = Array | BCOO | None

JOINED_ARRAYS = 32
"""Number of arrays that a GPU kernel reads as if they were joined; XLA admits some 90."""

JOINED = 2**21
"""The largest number of elements of an array that is joined with others on a GPU.

Each element of 32 joined arrays is found by five branches and loaded by itself, and is used before
the next one is loaded. The PTX for an H100, in float32 and (`.b16`) in float16:

    setp.gt.u32 %p1, %r46, 1605631;  @%p1 bra $L__BB0_49;    (five times, in a loop)
    setp.gt.u32 %p61, %r46, 99999;   @%p61 bra $L__BB0_96;   (the end of a row is filled up)
    ld.global.nc.b32 %r48, [%rd67];

Of an array by itself each thread loads vectors, eight at a time:

    ld.global.nc.v2.b32 {%r13, %r14}, [%rd9];
    ld.global.nc.v2.b32 {%r21, %r22}, [%rd9+512];

So every thread waits for four bytes, the device for 1.1 MB; at a latency of 0.7 microseconds these
are 1.5 TB/s of its 3.35, or 1.4 ps more for an element. To start a kernel for an array by itself
takes 2 to 3 microseconds. Both are equal at 1.4 to 2.1 million elements. This was calculated, not
measured.
"""

SHORT_ROW, LONG_ROW, FEW = 2**7, 2**10, 2**20
"""Elements that a GPU counts in one number: if there are few together, and if there are more.

With longer rows XLA copies few elements into one array first, which it then reads.
"""


def is_traced(values: Sequence[object]) -> bool:
    """Whether one of these arrays is traced."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def real_parts(gradient: Gradient) -> list[Array]:
    """The arrays of real numbers that a gradient consists of, as they are stored.

    Args:
        gradient: Array or `BCOO` of any dtype, or None.

    Returns:
        One array, two for a complex dtype, none for None or integers.
    """
    if gradient is None:
        return []
    values = jnp.asarray(gradient.data if isinstance(gradient, BCOO) else gradient)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return [values.real, values.imag]
    return [values] if jnp.issubdtype(values.dtype, jnp.floating) else []


def widened(array: jax.typing.ArrayLike) -> Array:
    """An array in float32 or wider."""
    values: Array = jnp.asarray(array)
    wide = values.dtype == jnp.float64 or jnp.issubdtype(values.dtype, jnp.complexfloating)
    return values if wide else values.astype(jnp.float32)


def scaled(loss: jax.typing.ArrayLike, scale: Array | float) -> Array:
    """Multiplies a loss by the scale, in float32 or wider."""
    wide = widened(loss)
    return wide * jnp.asarray(scale, wide.dtype)


def unscaled(
    gradients: Sequence[Gradient], scale: Array | float, powers_of_two: bool
) -> list[Gradient]:
    """Divides gradients by the scale, in float32 or wider.

    Args:
        gradients: Arrays or `BCOO` of any dtype, or None. Sparse stays sparse.
        scale: float32 scalar array, or a Python float.
        powers_of_two: Whether the scale is a power of two. Then gradients are multiplied by the
            reciprocal, which is exact; otherwise they are divided.
    """

    def divided(gradient: Gradient) -> Gradient:
        if gradient is None:
            return None
        if isinstance(gradient, BCOO):
            data = _divided(gradient.data, scale, powers_of_two)
            return BCOO((data, gradient.indices), shape=gradient.shape)
        return _divided(gradient, scale, powers_of_two)

    return [divided(gradient) for gradient in gradients]


def _divided(array: Array, scale: Array | float, powers_of_two: bool) -> Array:
    wide = widened(array)
    divisor = jnp.asarray(scale, wide.dtype)
    return wide * (1.0 / divisor) if powers_of_two else wide / divisor


def flat_gradients(gradients: ArrayTree) -> list[Gradient]:
    """The gradients in a nested structure, without None."""
    return list(jax.tree.leaves(gradients, is_leaf=lambda leaf: isinstance(leaf, BCOO)))


def all_finite(
    gradients: Sequence[Gradient], scale: Array | float | None = None, powers_of_two: bool = True
) -> Array:
    """Whether every element of every gradient is finite after unscaling; reads each once.

    The check compares bits, as integers, so it creates no non-finite number. Other checks fail:
    with `--xla_cpu_enable_fast_math` XLA simplifies `sum(x - x)` to 0, and `isfinite` to true if
    it may assume that there is no NaN; `checkify` and `jax_debug_nans` report a NaN that a check
    creates.

    Args:
        gradients: Arrays, `BCOO` (their data are checked) or None (ignored).
        scale: The divisor of the gradients; None if they are already unscaled, or if dividing
            cannot make them infinite.
        powers_of_two: As for `unscaled`.

    Returns:
        A boolean scalar array.
    """
    parts = [part for gradient in gradients for part in real_parts(gradient)]
    if not parts:
        return jnp.asarray(True)
    finite: Array = _all_finite(parts, scale, powers_of_two)
    return finite


# Outside of a compiled function, this is one dispatch instead of many.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def _all_finite(parts: Sequence[Array], scale: Array | float | None, powers_of_two: bool) -> Array:
    def default() -> Array:
        extremes = _extremes_on_cpu(parts)

        def of_dtype(dtype: np.dtype) -> Array:
            # One reduction over all numbers of a dtype. XLA would repeat a chain of scalar
            # operations in each loop of the update, and it compiles more slowly.
            numbers = jnp.stack([number for number in extremes if number.dtype == dtype])
            finite = _is_finite(numbers)
            if scale is not None:
                # Division keeps the order of numbers. Infinities and NaN are left out, since
                # dividing them gives NaN.
                rest = jnp.where(finite, numbers, jnp.zeros_like(numbers))
                finite &= _is_finite(_divided(rest, scale, powers_of_two))
            return jnp.all(finite)

        dtypes = dict.fromkeys(number.dtype for number in extremes)
        return functools.reduce(jnp.logical_and, map(of_dtype, dtypes))

    def on_gpu() -> Array:
        arrays = parts
        if scale is not None:
            arrays = [_divided(part, scale, powers_of_two) for part in parts]

        def nonfinite(group: Sequence[Array]) -> Array:
            if not may_be_divided(group[0]):
                return nonfinite_by_row(group)[0]
            magnitude, infinite = _magnitude(_with_bits(jnp.stack(group)))
            return (jnp.max(magnitude, initial=0) >= infinite)[None]

        groups = ([arrays[place] for place in places] for places in in_groups(arrays))
        return ~jnp.any(jnp.concatenate(list(map(nonfinite, groups))))

    finite: Array = jax.lax.platform_dependent(default=default, cuda=on_gpu, rocm=on_gpu)
    return finite


def _extremes_on_cpu(parts: Sequence[Array]) -> list[Array]:
    apart = [part for part in parts if has_sharding(part)]
    small, large = grouped_by_size([p for p in parts if not has_sharding(p)], static_size)
    joined = [jnp.concatenate([part.ravel() for part in group]) for group in small]
    return [number for part in [*joined, *large, *apart] for number in _extremes(part)]


def _extremes(array: Array) -> list[Array]:
    """Two elements of an array, of which one is infinite or NaN if any element is; 0 if empty.

    Interpreted as signed integers, the largest bits belong to the largest positive element; as
    unsigned integers, to the most negative one. The bits of NaN are larger than those of infinity.
    """
    array = _with_bits(array)
    width = 8 * array.dtype.itemsize
    views = [jax.lax.bitcast_convert_type(array, f"{kind}{width}") for kind in ("int", "uint")]
    # With both in one reduction, XLA on a CPU reads each array once and materializes nothing. For
    # all(isfinite(x)) it would materialize the booleans first.
    zeros = tuple(np.zeros((), view.dtype) for view in views)
    found = jax.lax.reduce(tuple(views), zeros, _both_larger, tuple(range(array.ndim)))
    return [jax.lax.bitcast_convert_type(bits, array.dtype) for bits in found]


def in_groups(arrays: Sequence[Array]) -> Iterator[list[int]]:
    """Yields the places of the arrays that one kernel of a GPU reads together.

    To join arrays that are divided among devices, XLA would gather them. Those of one shape are
    stacked, and only small ones, because they may be divided differently.
    """
    together: dict[object, list[int]] = {}
    for place, array in enumerate(arrays):
        divided, size = may_be_divided(array), static_size(array)
        if size is None or size > (SMALL if divided else JOINED):
            together[place] = [place]
        else:
            together.setdefault(jax.typeof(array) if divided else array.dtype, []).append(place)
    for places in together.values():
        yield from (places[i : i + JOINED_ARRAYS] for i in range(0, len(places), JOINED_ARRAYS))


def may_be_divided(array: Array) -> bool:
    """Whether an array may be divided among devices, or has a size that is not known."""
    return static_size(array) is None or has_sharding(array) or may_be_sharded(array)


def nonfinite_by_row(arrays: Sequence[Array]) -> tuple[Array, list[int]]:
    """Counts what is not finite in the rows of a matrix that a GPU reads arrays as.

    One kernel reads all arrays, whatever their shapes are: it finds a sum for each row.

    Args:
        arrays: Arrays of one dtype. Each begins with a row, and its last row is filled up.

    Returns:
        A uint32 for each row, with the infinities in the lower 16 bits and the NaN in the upper;
        and the number of rows of each array.
    """
    sizes = [int(array.size) for array in arrays]
    row = SHORT_ROW if sum(sizes) < FEW else LONG_ROW
    rows = [-(-size // row) for size in sizes]
    padded = [
        jnp.pad(array.ravel(), (0, number * row - size))
        for array, number, size in zip(arrays, rows, sizes, strict=True)
    ]
    magnitude, infinite = _magnitude(_with_bits(jnp.concatenate(padded).reshape(sum(rows), row)))
    infinities = (magnitude == infinite).astype(jnp.uint32)
    nans = (magnitude > infinite).astype(jnp.uint32)
    return jnp.sum(infinities | nans << 16, axis=1, dtype=jnp.uint32), rows


_HAVE_BITS = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


def _both_larger(first: Sequence[Array], second: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(map(jax.lax.max, first, second))


def _with_bits(array: Array) -> Array:
    """An array whose dtype has an integer of the same width, and infinities."""
    return array if array.dtype in _HAVE_BITS else array.astype(jnp.float32)


def _is_finite(array: Array) -> Array:
    """Whether each element of an array is finite, by its bits."""
    magnitude, infinite = _magnitude(array)
    # Compare with <, not the exponent with ==: LLVM recognizes that as a test for infinity and NaN,
    # and removes it under fast-math flags.
    return magnitude < infinite


def _magnitude(array: Array) -> tuple[Array, np.ndarray]:
    """The bits of magnitudes as integers, and those of infinity; those of NaN are larger."""
    bits = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    without_sign = bits.type(np.iinfo(bits).max >> 1)
    infinite = np.asarray(np.inf, array.dtype).view(bits)
    return jax.lax.bitcast_convert_type(array, bits) & without_sign, infinite
