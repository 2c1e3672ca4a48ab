"""JAX: compiled or not, with 64-bit numbers or without."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from lossscale.diagnostics.exponents import (
    FLOAT32,
    FLOAT64,
    FRACTION_BITS,
    INFS,
    NANS,
    ZEROS,
    ExponentTable,
    Layout,
)
from lossscale.errors import ArgumentTypeError
from lossscale.jax.scaling import real_parts, stored

_PIECE = 2**16
"""Elements counted at a time. A column of 12 bits then sums up to less than 2**32."""

_LOW_BITS = 11
"""A sum of fractions is kept in two columns, of their low bits and of the others."""


def count_bins(gradient: Any) -> ExponentTable:
    """Counts the elements of a gradient by their exponents.

    Args:
        gradient: Array of any shape and floating-point or complex dtype (both parts count), or
            `BCOO`, of which the data count as they are stored.

    Returns:
        The table: `counts` uint32 of shape (280, 3, 2), or (2101, 3, 2) for float64; `largest` a
        scalar, uint32 or for float64 uint64. Without 64-bit numbers, which JAX has only if asked
        to, a sum takes several: of low and high parts of the fractions, each as a number of low
        and one of high bits. `on_host` puts them together. They hold up to 2**32 - 1 elements.

    Raises:
        ArgumentTypeError: If the dtype is none of these. It is a `TypeError`.

    Example:
        >>> import jax
        >>> counted = jax.jit(count_bins)(jnp.asarray([0.0, 1.0, 1.5]))
        >>> lossscale.diagnostics.GradientHistogram.from_table(on_host(counted)).mass
        2.5
    """
    parts = real_parts(gradient)
    if not parts:
        raise ArgumentTypeError(
            "A histogram is made from a gradient of floating-point numbers. "
            f"Received: an array of dtype {stored(gradient).dtype.name}."
        )
    values = parts[0] if len(parts) == 1 else jnp.stack(parts)
    layout = FLOAT64 if values.dtype == jnp.float64 else FLOAT32
    values = values.ravel()
    if values.size <= _PIECE:
        return _count_piece(values, layout)
    missing = -values.size % _PIECE
    pieces = jnp.pad(values, (0, missing)).reshape(-1, _PIECE)

    def add_piece(table: ExponentTable, piece: Any) -> tuple[ExponentTable, None]:
        more, larger = _count_piece(piece, layout)
        return ExponentTable(table.counts + more, jnp.maximum(table.largest, larger)), None

    table: ExponentTable
    table, _ = lax.scan(add_piece, _count_piece(values[:0], layout), pieces)
    # The low bits of the number of zeros; if they fall below 0, `on_host` borrows from the high.
    zeros = (layout.exponents + ZEROS, 0, 0)
    return table._replace(counts=table.counts.at[zeros].add(-jnp.uint32(missing)))


def on_host(table: ExponentTable) -> ExponentTable:
    """Returns a table of `count_bins` with int64 NumPy counts and an integer.

    Args:
        table: The table, of arrays with values.
    """
    parts = np.asarray(table.counts).astype(np.int64)
    sums = parts[..., 0] + (parts[..., 1] << 16)
    count, low, high = np.moveaxis(sums, 1, 0)
    counts = np.stack([count & 0xFFFFFFFF, low + (high << _LOW_BITS)], axis=1)
    return ExponentTable(counts, int(table.largest))


def _magnitude_bits(values: Any) -> Any:
    """The bits of |x|, of float64 or else of float32, as unsigned integers."""
    if values.dtype == jnp.float64:
        return lax.bitcast_convert_type(values, jnp.uint64) & np.uint64(2**63 - 1)
    if values.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.uint32)
        return (bits & 0x7FFF) << 16
    # Every number of the other formats is a normal one of float32, so that none is flushed here.
    wide = values.astype(jnp.float32)
    return lax.bitcast_convert_type(wide, jnp.uint32) & 0x7FFFFFFF


def _count_piece(values: Any, layout: Layout) -> ExponentTable:
    bits = _magnitude_bits(values)
    row, fraction = _rows_and_fractions(bits, layout)
    low = 2**_LOW_BITS - 1
    addends = (jnp.ones_like(fraction), fraction & low, fraction >> _LOW_BITS)
    empty = jnp.zeros(layout.rows, jnp.uint32)
    sums = jnp.stack(
        [empty.at[row].add(addend, mode="promise_in_bounds") for addend in addends], axis=1
    )
    finite = jnp.where(row < layout.exponents, bits, 0)
    counts = jnp.stack([sums & 0xFFFF, sums >> 16], axis=-1)
    return ExponentTable(counts, jnp.max(finite, initial=0))


def _rows_and_fractions(bits: Any, layout: Layout) -> tuple[Any, Any]:
    """The row of each magnitude as int32, and its fraction in units of 2**-23 as uint32."""
    wide = layout == FLOAT64
    width, float_type = layout.fraction_bits, jnp.float64 if wide else jnp.float32
    mask = bits.dtype.type((1 << width) - 1)
    exponent, fraction = (bits >> width).astype(jnp.int32), bits & mask
    row = exponent + (width - 1)
    # As a number of its own the fraction of a subnormal number is normal, and so are its parts.
    own_bits = lax.bitcast_convert_type(fraction.astype(float_type), bits.dtype)
    bias = 2 ** (layout.exponent_bits - 1) - 1
    subnormal = (exponent == 0) & (fraction != 0)
    row = jnp.where(subnormal, (own_bits >> width).astype(jnp.int32) - bias, row)
    fraction = jnp.where(subnormal, own_bits & mask, fraction)
    special = exponent == 2**layout.exponent_bits - 1
    row = jnp.where(special, layout.exponents + jnp.where(fraction == 0, INFS, NANS), row)
    row = jnp.where(bits == 0, layout.exponents + ZEROS, row)
    fraction = jnp.where(special, 0, fraction)
    dropped = width - FRACTION_BITS
    if dropped:
        fraction = (fraction + bits.dtype.type(1 << (dropped - 1))) >> dropped
    return row, fraction.astype(jnp.uint32)
