"""Gradients as JAX arrays: scaling, unscaling, the overflow check, and statistics for a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from lossscale.common.sizes import SMALL, small_and_large
from lossscale.jax.apply_or_skip import is_laid_out, may_be_sharded, type_of
from lossscale.jax.jaxprs import static_size
from lossscale.rules import GradientStats, StatsRequest

JOINED_ARRAYS = 32
"""How many arrays one kernel of a GPU reads as if they were joined; XLA admits some 90."""

JOINED = 2**22
"""The largest number of elements of an array that is joined with others on a GPU.

Two kernels in a chain, which an array by itself takes, cost 4 to 6 microseconds to start. In the
PTX for an H100 the kernel of 32 joined arrays finds the array of each element by five branches,
loads the element by itself, and uses it before the next load. So every thread waits for four bytes,
the device for 1.1 MB; at a latency of 0.7 microseconds these are 1.5 TB/s of its 3.35, or 1.4 ps
more for an element. Both are equal at 3 to 4 million elements. This was calculated, not measured.
"""


def is_traced(values: Sequence[Any]) -> bool:
    """Whether one of these arrays is traced."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def stored(gradient: Any) -> Any:
    """The dense array that stores a gradient; the data of a `BCOO`."""
    return jnp.asarray(gradient.data if isinstance(gradient, BCOO) else gradient)


def real_parts(gradient: Any) -> list[Any]:
    """The arrays of real numbers that a gradient consists of, as they are stored.

    Args:
        gradient: Array or `BCOO` of any dtype, or None.

    Returns:
        One array, two for a complex dtype, none for None or integers.
    """
    if gradient is None:
        return []
    values = stored(gradient)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return [values.real, values.imag]
    return [values] if jnp.issubdtype(values.dtype, jnp.floating) else []


def widened(array: Any) -> Any:
    """An array in float32 or wider."""
    array = jnp.asarray(array)
    wide = array.dtype == jnp.float64 or jnp.issubdtype(array.dtype, jnp.complexfloating)
    return array if wide else array.astype(jnp.float32)


def scaled(loss: Any, scale: Any) -> Any:
    """Multiplies a loss by the scale, in float32 or wider."""
    loss = widened(loss)
    return loss * jnp.asarray(scale, loss.dtype)


def unscaled(gradients: Sequence[Any], scale: Any, powers_of_two: bool) -> list[Any]:
    """Divides gradients by the scale, in float32 or wider.

    Args:
        gradients: Arrays or `BCOO` of any dtype, or None. Sparse stays sparse.
        scale: float32 scalar array, or a Python float.
        powers_of_two: Whether the scale is a power of two. Then gradients are multiplied by the
            reciprocal, which is exact; otherwise they are divided.
    """

    def divided(gradient: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, BCOO):
            return BCOO((divided(gradient.data), gradient.indices), shape=gradient.shape)
        gradient = widened(gradient)
        divisor = jnp.asarray(scale, gradient.dtype)
        return gradient * (1.0 / divisor) if powers_of_two else gradient / divisor

    return [divided(gradient) for gradient in gradients]


def flat_gradients(gradients: Any) -> list[Any]:
    """The gradients in a nested structure, without None."""
    return list(jax.tree.leaves(gradients, is_leaf=lambda leaf: isinstance(leaf, BCOO)))


def all_finite(gradients: Sequence[Any], scale: Any = None, powers_of_two: bool = True) -> Any:
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
    # Outside of jit, this is one dispatch instead of many.
    compute = _all_finite if is_traced([*parts, scale]) else _all_finite_jit
    return compute(parts, scale, powers_of_two)


def _all_finite(parts: Sequence[Any], scale: Any, powers_of_two: bool) -> Any:
    def verdict(extremes_of: Callable[[Sequence[Any]], list[Any]]) -> Any:
        extremes = extremes_of(parts)

        def of_dtype(dtype: Any) -> Any:
            # One reduction over all numbers of a dtype. XLA would repeat a chain of scalar
            # operations in each loop of the update, and it compiles more slowly.
            numbers = jnp.stack([number for number in extremes if number.dtype == dtype])
            finite = _is_finite(numbers)
            if scale is not None:
                # Division keeps the order of numbers. Infinities and NaN are left out, since
                # dividing them gives NaN.
                rest = jnp.where(finite, numbers, jnp.zeros_like(numbers))
                [divided] = unscaled([rest], scale, powers_of_two)
                finite &= _is_finite(divided)
            return jnp.all(finite)

        dtypes = dict.fromkeys(number.dtype for number in extremes)
        return functools.reduce(jnp.logical_and, map(of_dtype, dtypes))

    on_gpu = functools.partial(verdict, _largest_on_gpu)
    default = functools.partial(verdict, _extremes_on_cpu)
    return jax.lax.platform_dependent(default=default, cuda=on_gpu, rocm=on_gpu)


_all_finite_jit = functools.partial(jax.jit, static_argnums=2)(_all_finite)


def _extremes_on_cpu(parts: Sequence[Any]) -> list[Any]:
    apart = [part for part in parts if is_laid_out(part)]
    small, large = small_and_large([p for p in parts if not is_laid_out(p)], static_size)
    joined = [jnp.concatenate([part.ravel() for part in group]) for group in small]
    return [number for part in [*joined, *large, *apart] for number in _extremes(part)]


def _extremes(array: Any) -> list[Any]:
    """Two elements of an array, of which one is infinite or NaN if any element is; 0 if empty.

    Interpreted as signed integers, the largest bits belong to the largest positive element; as
    unsigned integers, to the most negative one. The bits of NaN are larger than those of infinity.
    """
    if array.dtype not in _HAVE_BITS:
        array = array.astype(jnp.float32)
    width = 8 * array.dtype.itemsize
    views = [jax.lax.bitcast_convert_type(array, f"{kind}{width}") for kind in ("int", "uint")]
    # With both in one reduction, XLA on a CPU reads each array once and materializes nothing. For
    # all(isfinite(x)) it would materialize the booleans first.
    zeros = tuple(np.zeros((), view.dtype) for view in views)
    found = jax.lax.reduce(tuple(views), zeros, _both_larger, tuple(range(array.ndim)))
    return [jax.lax.bitcast_convert_type(bits, array.dtype) for bits in found]


def _largest_on_gpu(parts: Sequence[Any]) -> list[Any]:
    """The largest magnitude in each group of arrays; one is infinite or NaN if any element is.

    On a GPU each array by itself takes two kernels, and XLA runs all of these one after another.
    """
    parts = [part if part.dtype in _HAVE_BITS else part.astype(jnp.float32) for part in parts]
    together: dict[Any, list[Any]] = {}
    for part in parts:
        if not is_joined(part):
            together[len(together)] = [part]
        elif _is_divided(part):
            together.setdefault(type_of(part), []).append(part[None])
        else:
            together.setdefault(part.dtype, []).append(part.ravel())
    return [_largest(jnp.concatenate(group)) for group in in_groups(together)]


def is_joined(array: Any) -> bool:
    """Whether one kernel of a GPU reads an array together with others.

    To join arrays that are divided among devices, XLA would gather them. Those of one shape are
    stacked, and only small ones, because they may be divided differently.
    """
    size = static_size(array)
    return size is not None and size <= (SMALL if _is_divided(array) else JOINED)


def _is_divided(array: Any) -> bool:
    return is_laid_out(array) or may_be_sharded(array)


def in_groups(together: Mapping[Any, list[Any]]) -> Iterator[list[Any]]:
    """What one kernel of a GPU reads, of lists of what may be joined."""
    for joined in together.values():
        yield from (joined[i : i + JOINED_ARRAYS] for i in range(0, len(joined), JOINED_ARRAYS))


def _largest(array: Any) -> Any:
    """The largest magnitude in an array, where NaN is larger than infinity; 0 if it is empty."""
    unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    magnitude = unsigned.type(np.iinfo(unsigned).max >> 1)
    bits = jax.lax.bitcast_convert_type(array, unsigned) & magnitude
    largest = jax.lax.reduce(bits, unsigned.type(0), jax.lax.max, tuple(range(bits.ndim)))
    return jax.lax.bitcast_convert_type(largest, array.dtype)


_HAVE_BITS = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


def _both_larger(first: Any, second: Any) -> tuple[Any, ...]:
    return tuple(map(jax.lax.max, first, second))


def _is_finite(number: Any) -> Any:
    """Whether a scalar array is finite, by its bits."""
    bits = jnp.dtype(f"uint{8 * number.dtype.itemsize}")
    infinite = np.asarray(np.inf, number.dtype).view(bits)
    magnitude = bits.type(np.iinfo(bits).max >> 1)
    # Compare with <, not the exponent with ==: LLVM recognizes that as a test for infinity and NaN,
    # and removes it under fast-math flags.
    return (jax.lax.bitcast_convert_type(number, bits) & magnitude) < infinite


def gradient_stats(
    needs: StatsRequest, finite: Any, gradients: Sequence[Any], scale: Any, *, are_scaled: bool
) -> GradientStats:
    """Returns the statistics of a step for a rule.

    Args:
        needs: The statistics that the rule needs; nothing else is computed.
        finite: Whether the gradients are finite, a boolean scalar array; True if unchecked.
        gradients: Arrays, `BCOO` or None.
        scale: The loss scale of the step, float32 scalar array.
        are_scaled: Whether the gradients are still multiplied by the scale.
    """
    parts = [jnp.abs(widened(p)) for gradient in gradients for p in real_parts(gradient)]
    largest = None
    if needs.largest:
        maxima = [jnp.max(part, initial=0).astype(jnp.float32) for part in parts]
        largest = jnp.max(jnp.stack(maxima)) if maxima else jnp.zeros((), jnp.float32)
        largest = jnp.where(finite, largest / scale if are_scaled else largest, jnp.inf)
    if not needs.counts_from:
        return GradientStats(finite, largest)
    scaled = parts if are_scaled else [part * jnp.asarray(scale, part.dtype) for part in parts]
    counts = tuple(
        sum(
            (jnp.sum(part >= edge, dtype=jnp.int32).astype(jnp.float32) for part in scaled),
            jnp.zeros((), jnp.float32),
        )
        for edge in needs.counts_from
    )
    elements = jnp.asarray(float(sum(part.size for part in parts)), jnp.float32)
    return GradientStats(finite, largest, counts, elements)
