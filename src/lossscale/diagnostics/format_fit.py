"""What a number format keeps of numbers, and what it loses, at every loss scale."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

from lossscale.checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    checked_above_zero,
    checked_count,
    checked_number,
)
from lossscale.diagnostics.bins import ExponentBin
from lossscale.diagnostics.formats import NumberFormat, number_format
from lossscale.errors import ArgumentError


class FormatFit:
    """How numbers that are counted by binary exponent fit into number formats.

    Attributes:
        bins: The bins that have elements, by ascending exponent.
        amax: The largest finite magnitude, exactly; 0.0 if none is above zero.
    """

    bins: tuple[ExponentBin, ...]
    amax: float

    @property
    def nonzeros(self) -> int:
        """How many elements are finite and not zero."""
        return sum(bin.elements for bin in self.bins)

    def flushed_count(self, format: str | NumberFormat, scale: float = 1.0) -> float:
        """Returns the share of elements that become zero when they are scaled and rounded.

        Args:
            format: The format to round to, a key of `FORMATS`.
            scale: The loss scale, a positive number, dimensionless.

        Returns:
            The number of elements with 0 < scale * |x| <= `flush_edge`, divided by that of finite
            elements that are not zero, from 0 to 1. 0 if there is none.

        Raises:
            ArgumentError: If the format is not known or the scale no positive number.

        Example:
            >>> from lossscale.diagnostics import GradientHistogram
            >>> GradientHistogram.from_array([0.0, 2.0**-26, 1.0]).flushed_count("float16")
            0.5
        """
        edge = number_format(format).flush_edge / checked_above_zero("scale", scale)
        return self._share_below(edge, tie=True, of=_count)

    def flushed_mass(self, format: str | NumberFormat, scale: float = 1.0) -> float:
        """Returns the share of the sum of |x| that is lost to zero when scaled and rounded.

        Unlike the count it says how much a training step loses: thousands of elements that are
        each a millionth of the largest one are no loss.

        Args:
            format: The format to round to, a key of `FORMATS`.
            scale: The loss scale, a positive number, dimensionless.

        Returns:
            The sum of |x| over elements with 0 < scale * |x| <= `flush_edge`, divided by that
            over all finite elements, from 0 to 1. 0 if that is 0.

        Raises:
            ArgumentError: If the format is not known or the scale no positive number.

        Example:
            >>> from lossscale.diagnostics import GradientHistogram
            >>> GradientHistogram.from_array([2.0**-26, 3 * 2.0**-26]).flushed_mass("float16")
            0.25
        """
        edge = number_format(format).flush_edge / checked_above_zero("scale", scale)
        return self._share_below(edge, tie=True, of=_mass)

    def subnormal_mass(self, format: str | NumberFormat, scale: float = 1.0) -> float:
        """Returns the share of the sum of |x| that keeps less than full precision.

        Args:
            format: The format to round to, a key of `FORMATS`.
            scale: The loss scale, a positive number, dimensionless.

        Returns:
            The sum of |x| over elements with `flush_edge` < scale * |x| < `min_normal`, divided by
            that over all finite elements, from 0 to 1. 0 if that is 0.

        Raises:
            ArgumentError: If the format is not known or the scale no positive number.

        Example:
            >>> from lossscale.diagnostics import GradientHistogram
            >>> GradientHistogram.from_array([2.0**-20, 3 * 2.0**-20]).subnormal_mass("float16")
            1.0
        """
        known, scale = number_format(format), checked_above_zero("scale", scale)
        below_normal = self._share_below(known.min_normal / scale, tie=False, of=_mass)
        return below_normal - self._share_below(known.flush_edge / scale, tie=True, of=_mass)

    def overflow_count(self, format: str | NumberFormat, scale: float = 1.0) -> int:
        """Returns how many elements leave the format upwards when they are scaled and rounded.

        The edge lies inside a bin, so the number is an estimate, but for one thing: it is 0 if and
        only if no element overflows.

        Args:
            format: The format to round to, a key of `FORMATS`.
            scale: The loss scale, a positive number, dimensionless.

        Returns:
            The number of finite elements with scale * |x| from `overflow_edge` up. Those that are
            infinite already are in `infs`.

        Raises:
            ArgumentError: If the format is not known or the scale no positive number.

        Example:
            >>> from lossscale.diagnostics import GradientHistogram
            >>> GradientHistogram.from_array([1.0, 65519.0, 65536.0]).overflow_count("float16")
            1
        """
        known = number_format(format)
        edge = known.overflow_edge / checked_above_zero("scale", scale)
        if self.amax < edge or (self.amax == edge and not known.edge_overflows):
            return 0
        share = self._share_below(edge, tie=not known.edge_overflows, of=_count)
        return max(1, round((1.0 - share) * self.nonzeros))

    def headroom_bits(self, format: str | NumberFormat, scale: float = 1.0) -> float:
        """Returns how many times the scale can double before the largest element overflows.

        Args:
            format: The format to round to, a key of `FORMATS`.
            scale: The loss scale, a positive number, dimensionless.

        Returns:
            log2(`overflow_edge`) - log2(scale * amax), in bits, exactly known from `amax`: below 0
            something overflows. Infinite if no finite element is above zero.

        Raises:
            ArgumentError: If the format is not known or the scale no positive number.

        Example:
            >>> from lossscale.diagnostics import GradientHistogram
            >>> GradientHistogram.from_array([-8.0]).headroom_bits("float8_e4m3fn", scale=29.0)
            1.0
        """
        edge, scale = number_format(format).overflow_edge, checked_above_zero("scale", scale)
        if not self.bins:
            return math.inf
        return _log2_of_ratio(edge, self.amax) - math.log2(scale)

    def min_scale(
        self, format: str | NumberFormat, *, max_flushed_mass: float = 1e-3
    ) -> float | None:
        """Returns the smallest power of two that keeps what flushes within a limit.

        Args:
            format: The format to round to, a key of `FORMATS`.
            max_flushed_mass: The share of the sum of |x| that may be lost, from 0 to 1.

        Returns:
            The least 2**k with `flushed_mass(format, 2**k) <= max_flushed_mass`, exactly but for
            the tie; None if no finite element is above zero.

        Raises:
            ArgumentError: If the format is not known or the share not from 0 up to below 1.

        Example:
            >>> from lossscale.diagnostics import GradientHistogram
            >>> GradientHistogram.from_array([1.5 * 2.0**-30, 2.0**-29]).min_scale("float16")
            32.0
        """
        known = number_format(format)
        _check_share("max_flushed_mass", max_flushed_mass)
        kept = self._lowest_kept_exponent(max_flushed_mass)
        if kept is None:
            return None
        scale = math.ldexp(known.flush_edge, -kept)
        # The tie: all elements of the only bin that counts may lie on the edge.
        return scale if self.flushed_mass(known, scale) <= max_flushed_mass else 2 * scale

    def max_scale(
        self, format: str | NumberFormat, *, margin: float = 2.0, summands: int = 1
    ) -> float | None:
        """Returns the largest power of two that leaves room above the largest element.

        Args:
            format: The format to round to, a key of `FORMATS`.
            margin: The room to leave, in bits, from 0 up.
            summands: How many such gradients are added up in the format before they are unscaled:
                micro-batches times replicas.

        Returns:
            The greatest 2**k with `headroom_bits(format, 2**k) >= margin + log2(summands)`, at
            most 2**126, beyond which no loss scale goes; None if no finite element is above zero.

        Raises:
            ArgumentError: If the format is not known, the margin negative or `summands` below 1.

        Example:
            >>> from lossscale.diagnostics import GradientHistogram
            >>> GradientHistogram.from_array([1.0]).max_scale("float16", margin=0) == 2.0**15
            True
            >>> GradientHistogram.from_array([1.0]).max_scale("float16", summands=8) == 2.0**10
            True
        """
        known = number_format(format)
        if not 0 <= checked_number("margin", margin) < math.inf:
            raise ArgumentError(
                f"`margin` must be a finite number of bits from 0 up. Received: margin={margin!r}."
            )
        checked_count("summands", summands)
        if not self.bins:
            return None
        power = math.floor(self.headroom_bits(known) - margin - math.log2(summands))
        scale = math.ldexp(1.0, max(min(power, 126), -1021))
        # Without a margin the largest element could land on the edge, which may overflow.
        return scale / 2 if self.overflow_count(known, scale) else scale

    def recommended_scale(
        self,
        format: str | NumberFormat,
        *,
        max_flushed_mass: float = 1e-3,
        margin: float = 2.0,
        summands: int = 1,
    ) -> float | None:
        """Returns the fixed loss scale to train with, if one fits.

        Every scale from `min_scale` to `max_scale` is as good for this gradient. Recommended is the
        one in the middle, because later gradients are other ones: while the demo's network learns
        its digits, the largest gradient grows by more than the two bits of `margin` within the
        first epoch, and `min_scale` by more than that in eight.

        Args:
            format: The format to round to, a key of `FORMATS`.
            max_flushed_mass: As of `min_scale`.
            margin: As of `max_scale`, in bits.
            summands: As of `max_scale`.

        Returns:
            A power of two from 2**-126 to 2**126: the geometric mean of `min_scale` and
            `max_scale`, rounded down. None if the first is above the second: then the gradient
            does not fit into the format; or if no finite element is above zero.

        Raises:
            ArgumentError: If an argument cannot be used.

        Example:
            >>> from lossscale.diagnostics import GradientHistogram
            >>> histogram = GradientHistogram.from_array([1e-9, 1e-7, 1e-5])
            >>> histogram.min_scale("float16"), histogram.max_scale("float16") == 2.0**30
            (0.5, True)
            >>> histogram.recommended_scale("float16")
            16384.0
        """
        lowest = self.min_scale(format, max_flushed_mass=max_flushed_mass)
        highest = self.max_scale(format, margin=margin, summands=summands)
        if lowest is None or highest is None:
            return None
        return middle_scale(lowest, highest)

    def range_bits(self, *, lost_mass: float = 1e-3) -> float:
        """Returns how wide the gradient is, for comparison with the width of a format.

        Args:
            lost_mass: The share of the sum of |x| that the smallest elements make up and that is
                left out, from 0 to 1.

        Returns:
            log2(amax) less the exponent of the first bin that does not belong to this share, in
            bits. 0 if no finite element is above zero.

        Raises:
            ArgumentError: If the share is not from 0 up to below 1.

        Example:
            >>> from lossscale.diagnostics import GradientHistogram
            >>> GradientHistogram.from_array([1e-30, 0.25, 8.0]).range_bits()
            5.0
        """
        _check_share("lost_mass", lost_mass)
        kept = self._lowest_kept_exponent(lost_mass)
        return 0.0 if kept is None else math.log2(self.amax) - kept

    def _share_below(
        self, edge: float, *, tie: bool, of: Callable[[ExponentBin, int], float]
    ) -> float:
        """The share of the elements below an edge, or also of those on it if `tie`."""
        if not self.bins or self.amax < edge or (tie and self.amax == edge):
            return 1.0 if self.bins else 0.0
        mantissa, power = math.frexp(edge)
        significand, exponent = 2 * mantissa, power - 1
        top = self.bins[-1].exponent
        below = [of(bin, top) for bin in self.bins if bin.exponent < exponent]
        # Spread evenly over log2|x|, these are the parts of a bin that lie below its middle.
        part = significand - 1.0 if of is _mass else math.log2(significand)
        below += [part * of(bin, top) for bin in self.bins if bin.exponent == exponent]
        return math.fsum(below) / math.fsum(of(bin, top) for bin in self.bins)

    def _lowest_kept_exponent(self, lost_mass: float) -> int | None:
        """The exponent of the first bin that the smallest elements of this share do not fill."""
        if not self.bins:
            return None
        top = self.bins[-1].exponent
        masses = [_mass(bin, top) for bin in self.bins]
        whole = math.fsum(masses)
        number = bisect.bisect_right(
            range(1, len(masses)),
            lost_mass,
            key=lambda number: math.fsum(masses[:number]) / whole,
        )
        return self.bins[number].exponent


def middle_scale(lowest: float, highest: float) -> float | None:
    """Returns the loss scale in the middle between two powers of two, None if there is none.

    Args:
        lowest: The smallest scale that suits.
        highest: The largest.

    Example:
        >>> from lossscale.diagnostics import GradientHistogram
        >>> middle_scale(1.0, 2.0**5), middle_scale(2.0, 2.0), middle_scale(2.0, 1.0)
        (4.0, 2.0, None)
    """
    lowest, highest = max(lowest, SMALLEST_SCALE), min(highest, LARGEST_SCALE)
    if lowest > highest:
        return None
    powers = math.frexp(lowest)[1] - 1, math.frexp(highest)[1] - 1
    return math.ldexp(1.0, sum(powers) // 2)


def _log2_of_ratio(dividend: float, divisor: float) -> float:
    """Exact if the numbers differ by a power of two, and in range for any two numbers."""
    (above, power_above), (below, power_below) = math.frexp(dividend), math.frexp(divisor)
    return math.log2(above / below) + (power_above - power_below)


def _count(bin: ExponentBin, top: int) -> float:
    return float(bin.elements)


def _mass(bin: ExponentBin, top: int) -> float:
    """In units of 2**top, so that no sum is out of float64's range."""
    return bin._replace(exponent=bin.exponent - top).mass


def _check_share(name: str, value: Any) -> None:
    if not 0 <= checked_number(name, value) < 1:
        raise ArgumentError(
            f"`{name}` must be a number from 0 to below 1. Received: {name}={value!r}."
        )
