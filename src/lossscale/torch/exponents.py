"""PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

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
from lossscale.torch.scaling import real_parts

_PIECE_ON_CPU, _PIECE = 2**18, 2**24
"""Elements counted at a time: what stays in a processor's cache; elsewhere what fits in memory."""


def count_bins(gradient: Any) -> ExponentTable:
    """Counts the elements of a gradient by their exponents, without waiting for the device.

    Args:
        gradient: Tensor of any shape, of a floating-point or complex dtype (both parts count). Of
            a sparse one the values count, coalesced if it is of the COO layout.

    Returns:
        The table, on the tensor's device: `counts` int64 of shape (280, 2), or (2101, 2) for
        float64; `largest` an int64 scalar.

    Raises:
        ArgumentTypeError: If the dtype is none of these. It is a `TypeError`.

    Example:
        >>> counted = count_bins(torch.tensor([0.0, 1.0, 1.5]))
        >>> lossscale.diagnostics.GradientHistogram.from_table(on_host(counted)).mass
        2.5
    """
    parts = real_parts(gradient)
    if not parts:
        raise ArgumentTypeError(
            "A histogram is made from a gradient of floating-point numbers. "
            f"Received: a tensor of dtype {gradient.dtype}."
        )
    values = parts[0]
    layout = FLOAT64 if values.dtype == torch.float64 else FLOAT32
    values = values.reshape(-1)
    counts = torch.zeros((layout.rows, 2), dtype=torch.int64, device=values.device)
    largest = torch.zeros((), dtype=torch.int64, device=values.device)
    for piece in values.split(_PIECE_ON_CPU if values.device.type == "cpu" else _PIECE):
        if piece.numel():
            more, larger = _count_piece(piece, layout)
            counts, largest = counts + more, torch.maximum(largest, larger)
    return ExponentTable(counts, largest)


def on_host(table: ExponentTable) -> ExponentTable:
    """Returns a table of `count_bins` with int64 NumPy counts and an integer.

    Args:
        table: The table.
    """
    return ExponentTable(np.asarray(table.counts.cpu()), int(table.largest))


def _magnitude_bits(values: Any) -> Any:
    """The bits of |x|, of float64 as int64 or else of float32 as int32."""
    if values.dtype == torch.float64:
        return values.view(torch.int64) & torch.iinfo(torch.int64).max
    if values.dtype == torch.bfloat16:
        return (values.view(torch.int16).to(torch.int32) & 0x7FFF) << 16
    # Every number of the other formats is a normal one of float32, so that none is flushed here.
    return values.to(torch.float32).view(torch.int32) & torch.iinfo(torch.int32).max


def _count_piece(values: Any, layout: Layout) -> tuple[Any, Any]:
    bits = _magnitude_bits(values)
    row, fraction = _rows_and_fractions(bits, layout)
    columns = [
        torch.zeros(layout.rows, dtype=torch.int64, device=bits.device).scatter_add_(0, row, addend)
        for addend in (torch.ones_like(row), fraction.to(torch.int64))
    ]
    finite = torch.where(row < layout.exponents, bits, 0)
    return torch.stack(columns, dim=1), finite.max().to(torch.int64)


def _rows_and_fractions(bits: Any, layout: Layout) -> tuple[Any, Any]:
    """The row of each magnitude as int64, and its fraction in units of 2**-23 as float32."""
    width = layout.fraction_bits
    float_type = torch.float64 if layout == FLOAT64 else torch.float32
    mask = (1 << width) - 1
    exponent, fraction = bits >> width, bits & mask
    row = exponent + (width - 1)
    # As a number of its own the fraction of a subnormal number is normal, and so are its parts.
    own_bits = fraction.to(float_type).view(bits.dtype)
    bias = 2 ** (layout.exponent_bits - 1) - 1
    subnormal = (exponent == 0) & (fraction != 0)
    row = torch.where(subnormal, (own_bits >> width) - bias, row)
    fraction = torch.where(subnormal, own_bits & mask, fraction)
    special = exponent == 2**layout.exponent_bits - 1
    kind = torch.where(fraction == 0, INFS, NANS)
    row = torch.where(special, layout.exponents + kind, row)
    row = torch.where(bits == 0, layout.exponents + ZEROS, row)
    fraction = torch.where(special, 0, fraction)
    dropped = width - FRACTION_BITS
    if dropped:
        fraction = (fraction + (1 << (dropped - 1))) >> dropped
    return row.to(torch.int64), fraction.to(torch.float32)
