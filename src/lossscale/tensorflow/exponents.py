"""TensorFlow: eager, in a `tf.function`, and under XLA."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

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
from lossscale.tensorflow.scaling import real_parts, stored

_PIECE = 2**16
"""Elements counted at a time: the intermediate tensors of so many stay in a processor's cache."""


def count_bins(gradient: Any) -> ExponentTable:
    """Counts the elements of a gradient by their exponents.

    Args:
        gradient: Tensor of any shape and floating-point or complex dtype (both parts count), a
            variable, or `tf.IndexedSlices`, of which the values count as they are stored.

    Returns:
        The table: `counts` float64 of shape (280, 2), or (2101, 2) for float64, with whole numbers
        that are exact up to 2**30 elements; `largest` an int64 scalar.

    Raises:
        ArgumentTypeError: If the dtype is none of these. It is a `TypeError`.

    Example:
        >>> counted = tf.function(count_bins)(tf.constant([0.0, 1.0, 1.5]))
        >>> lossscale.diagnostics.GradientHistogram.from_table(on_host(counted)).mass
        2.5
    """
    parts = real_parts(gradient)
    if not parts:
        raise ArgumentTypeError(
            "A histogram is made from a gradient of floating-point numbers. "
            f"Received: a tensor of dtype {stored(gradient).dtype.name}."
        )
    values = parts[0] if len(parts) == 1 else tf.stack(parts)
    layout = FLOAT64 if values.dtype == tf.float64 else FLOAT32
    values = tf.reshape(values, [-1])
    size = values.shape[0]
    # Of a gradient whose size is not known yet, such as slices, no loop can be compiled.
    whole = 0 if size is None else size // _PIECE * _PIECE
    counts, largest = _count_piece(values[whole:], layout)
    if not whole:
        return ExponentTable(counts, largest)
    pieces = tf.reshape(values[:whole], [-1, _PIECE])

    def add_piece(number: Any, counts: Any, largest: Any) -> tuple[Any, Any, Any]:
        more, larger = _count_piece(pieces[number], layout)
        return number + 1, counts + more, tf.maximum(largest, larger)

    _, counts, largest = tf.while_loop(
        lambda number, *_: number < whole // _PIECE,
        add_piece,
        (tf.constant(0), counts, largest),
        parallel_iterations=1,
    )
    return ExponentTable(counts, largest)


def on_host(table: ExponentTable) -> ExponentTable:
    """Returns a table of `count_bins` with int64 NumPy counts and an integer.

    Args:
        table: The table, of tensors with values.
    """
    return ExponentTable(np.asarray(table.counts).astype(np.int64), int(table.largest))


def _magnitude_bits(values: Any) -> Any:
    """The bits of |x| as int64, of float64 or else of float32.

    int64 throughout: TensorFlow keeps int32 in the host's memory, where it expects shapes.
    """
    if values.dtype == tf.float64:
        return tf.bitcast(values, tf.int64) & tf.int64.max
    if values.dtype == tf.bfloat16:
        bits = tf.cast(tf.bitcast(values, tf.uint16), tf.int64)
        return tf.bitwise.left_shift(bits & 0x7FFF, tf.constant(16, tf.int64))
    # Every number of the other formats is a normal one of float32, so that none is flushed here.
    wide = values if values.dtype == tf.float32 else tf.cast(values, tf.float32)
    return tf.cast(tf.bitcast(wide, tf.int32), tf.int64) & tf.int32.max


def _count_piece(values: Any, layout: Layout) -> tuple[Any, Any]:
    bits = _magnitude_bits(values)
    row, fraction = _rows_and_fractions(bits, layout)
    ones = tf.ones_like(fraction, tf.float64)
    # float64 and not int64, for which TensorFlow has no such sum on a GPU.
    columns = [
        tf.math.unsorted_segment_sum(tf.cast(addend, tf.float64), row, layout.rows)
        for addend in (ones, fraction)
    ]
    finite = tf.where(row < layout.exponents, bits, tf.zeros_like(bits))
    largest = tf.reduce_max(tf.concat([finite, tf.zeros([1], tf.int64)], 0))
    return tf.stack(columns, axis=1), largest


def _rows_and_fractions(bits: Any, layout: Layout) -> tuple[Any, Any]:
    """The row of each magnitude, and its fraction in units of 2**-23 as float32; 0 of specials."""
    width = tf.constant(layout.fraction_bits, tf.int64)
    mask, one = (1 << layout.fraction_bits) - 1, tf.ones_like(bits)
    exponent, fraction = tf.bitwise.right_shift(bits, width), bits & mask
    row = exponent + (layout.fraction_bits - 1)
    # As a number of its own the fraction of a subnormal number is normal, and so are its parts.
    # Up to 52 bits: float64 holds each exactly.
    own_bits = tf.bitcast(tf.cast(fraction, tf.float64), tf.int64)
    wide_width = tf.constant(FLOAT64.fraction_bits, tf.int64)
    subnormal = (exponent == 0) & (fraction != 0)
    row = tf.where(subnormal, tf.bitwise.right_shift(own_bits, wide_width) - 1023, row)
    own_fraction = tf.bitwise.right_shift(
        own_bits & ((1 << FLOAT64.fraction_bits) - 1), wide_width - width
    )
    fraction = tf.where(subnormal, own_fraction, fraction)
    special = exponent == 2**layout.exponent_bits - 1
    kind = tf.where(fraction == 0, INFS * one, NANS * one)
    row = tf.where(special, layout.exponents + kind, row)
    row = tf.where(bits == 0, (layout.exponents + ZEROS) * one, row)
    fraction = tf.where(special, 0 * one, fraction)
    dropped = layout.fraction_bits - FRACTION_BITS
    if dropped:
        half = 1 << (dropped - 1)
        fraction = tf.bitwise.right_shift(fraction + half, tf.constant(dropped, tf.int64))
    return row, tf.cast(fraction, tf.float32)
